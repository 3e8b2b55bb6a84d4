"""Offload of the inputs of recomputed units."""
