"""Predict memory and time of a training step before launch. The code is best read in the order api, search, predict, trace."""
