"""Devices: the emulated one, and those with streams and memory of their own."""
