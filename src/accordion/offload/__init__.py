"""Keep shards, gradients, optimizer states and activations on host or disk. The engine does not import this package."""
