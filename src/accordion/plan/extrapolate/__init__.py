"""Extrapolate logs of small models, batches and worlds to larger ones."""
