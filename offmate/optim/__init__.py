"""Optimizers: the user's own implementation, run on one tensor or some of its rows at a time."""
