"""`accordion export`: writes a model in the formats of other libraries, with one tensor in memory at a time."""
