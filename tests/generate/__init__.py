"""Tests of `accordion generate`."""
