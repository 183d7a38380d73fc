"""Random sequences of what users do, against plain PyTorch: equal bits or a clear error, and nothing else.

A sequence follows from one integer. `python -m tests.fuzz --help` runs many of them; see `campaign`.
"""
