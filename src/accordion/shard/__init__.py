"""`accordion.shard.api`: from a model and what the user asked for to an engine."""
