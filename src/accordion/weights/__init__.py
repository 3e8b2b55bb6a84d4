"""Fills sharded parameters, by initialisation or from files, without a full model on any rank."""
