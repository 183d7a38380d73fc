"""Operators that captured graphs hold beside torch's own."""
