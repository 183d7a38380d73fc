"""Of containers of values; torch has no public module for them, though `torch.export` flattens batches by this one."""

from __future__ import annotations

from torch.utils import _pytree

tree_flatten = _pytree.tree_flatten
"""A container's leaves, and a spec of how they belong together."""

tree_flatten_with_path = _pytree.tree_flatten_with_path
"""The same, with the path to each leaf."""

tree_leaves = _pytree.tree_leaves
"""A container's leaves."""

tree_map = _pytree.tree_map
"""A container of the same form, with what a function makes of every leaf."""

tree_unflatten = _pytree.tree_unflatten
"""The container of these leaves that a spec describes."""
