"""The optimizer step of offloaded parameters."""
