"""Measurements that anyone can repeat: this engine beside the ones that people use today, on one machine."""
