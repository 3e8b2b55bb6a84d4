"""`accordion.shard`: check the arguments, shard the model's parameters and attach the engine."""
