"""Optimizers: the user's own implementation, one tensor or some rows of it at a time."""
