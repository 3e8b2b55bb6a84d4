"""Optimizers of sharded parameters: local steps, steps of whole matrices, low-bit states, and clipping."""
