"""Copies of parameters in the lower precision to which autocast casts them, in place of these parameters."""

from __future__ import annotations

# The key under which a parameter itself stands among the parts of its optimizer state: it is read and written by
# updates alone, and moves as they do.
WHOLE = "the parameter"
