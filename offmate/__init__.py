"""Train any exportable PyTorch model inside a device-memory budget, with the same numbers."""

__version__ = "0.1.0"
