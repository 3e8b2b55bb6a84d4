"""`accordion export`: a model in the formats of others, one tensor of it in memory at a time."""
