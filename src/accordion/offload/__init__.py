"""Memory tiers: keeps shards, gradients, optimizer states and activations off the device; the engine does not import it."""
