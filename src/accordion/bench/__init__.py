"""Measurements that anyone can repeat: this engine and its peers, on one machine."""
