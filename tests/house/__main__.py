"""python -m tests.house: how the house stands: modules, arrows, circles, and who knows what."""

from .order import census

print("\n".join(census()))
