"""Tests of `accordion export`."""
