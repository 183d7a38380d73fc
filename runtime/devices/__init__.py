"""Devices: the emulated one, and accelerators with their own streams and memory."""
