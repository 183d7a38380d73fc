"""Lowering: turns traced and profiled blocks into the solver's plain numbers, and its answer back into tensors."""
