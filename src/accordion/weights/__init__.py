"""Values of sharded parameters: initialised, or read from files, without a full model anywhere."""
