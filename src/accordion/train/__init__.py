"""`accordion train`: train a sharded model with one command."""
