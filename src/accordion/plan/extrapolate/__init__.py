"""Logs of larger models, batches and worlds from the logs of small ones."""
