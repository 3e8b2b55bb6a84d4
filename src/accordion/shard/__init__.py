"""`accordion.shard`: from a model and what the user asked for to an engine."""
