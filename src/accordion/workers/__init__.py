"""Rank processes that are kept alive, and a process group that does nothing."""
