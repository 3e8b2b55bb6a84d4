"""Freeze the garbage collector; imported last by the tests' fork server. Collections in a forked rank then ignore all objects
that exist by now, which saves 0.4 s each."""

import gc

gc.collect()
gc.freeze()
