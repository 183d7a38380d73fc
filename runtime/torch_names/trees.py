"""Private names of containers of values; torch has no public module for them, though `torch.export` uses this one."""

from __future__ import annotations

from torch.utils import _pytree

tree_flatten = _pytree.tree_flatten
"""Returns a container's leaves, and a spec of its structure."""

tree_flatten_with_path = _pytree.tree_flatten_with_path
"""The same, with the path to each leaf."""

tree_leaves = _pytree.tree_leaves
"""Returns a container's leaves."""

tree_map = _pytree.tree_map
"""Applies a function to every leaf; returns a container of the same structure."""

tree_unflatten = _pytree.tree_unflatten
"""Rebuilds the container that a spec describes from its leaves."""
