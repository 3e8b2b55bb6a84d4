"""Rank processes that stay alive between measurements, and a process group that does nothing."""
