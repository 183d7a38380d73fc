"""Rounding: fractions become whole tensors."""
