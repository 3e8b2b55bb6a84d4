"""Derive logs of deeper models, of other micro-batches and of steps with offload from traced logs."""
