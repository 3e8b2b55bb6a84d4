"""Memory tiers: buffers of shards, gradients and optimizer states off the device. Made by `shard`, unknown to the engine."""
