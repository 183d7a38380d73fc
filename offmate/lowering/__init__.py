"""Lowering: from traced and profiled blocks to the solver's plain numbers, and from its answer back to tensors."""
