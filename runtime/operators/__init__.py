"""Operators that captured graphs contain besides torch's own."""
