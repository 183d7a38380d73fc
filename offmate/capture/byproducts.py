"""By-products of a forward: attributes that it sets, and values that hooks look at."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.torch_names import trees as pytree

if TYPE_CHECKING:
    from ..guards.watch import Watch


@dataclass(frozen=True)
class Tree:
    """The structure of nested containers of tensors and other values, without the tensors.

    Parameters
    ----------
    rest: per leaf None for a tensor, else the leaf in a tuple. spec: the structure of the containers.
    """

    rest: tuple[tuple[Any] | None, ...]
    spec: Any

    @staticmethod
    def of(value: Any) -> tuple[Tree, list[torch.Tensor]]:
        """Split a value into its tree and its tensors."""
        leaves, spec = pytree.tree_flatten(value)
        rest = tuple(None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves)
        return Tree(rest, spec), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """Rebuild the value with these tensors."""
        values = iter(tensors)
        return pytree.tree_unflatten([next(values) if r is None else r[0] for r in self.rest], self.spec)


@dataclass(frozen=True)
class Setting:
    """An attribute, or an entry of a dictionary, that the forward sets to tensors.

    Parameters
    ----------
    holder, name: the module or dictionary, and the attribute's name or the key. tree: of the value.
    """

    holder: Any
    name: Any
    tree: Tree

    def deliver(self, tensors: list[torch.Tensor]) -> None:
        """Set the attribute or entry."""
        put(self.holder, self.name, self.tree.filled(tensors))


@dataclass(frozen=True)
class Look:
    """A forward hook inside the model that only looks at values.

    Parameters
    ----------
    tree: the structure of its arguments besides the module.
    """

    hook: Callable[..., Any]
    module: torch.nn.Module
    tree: Tree

    def deliver(self, tensors: list[torch.Tensor]) -> None:
        """Call the hook."""
        self.hook(self.module, *self.tree.filled(tensors))


@dataclass(frozen=True)
class ByProduct:
    """A by-product of a forward: an attribute that it sets, or a hook that looks.

    Parameters
    ----------
    name: of the attribute, or of the module and its hook. n_tensors: how many tensors it consists of. use: what is done
        with the tensors of a call.
    """

    name: str
    n_tensors: int
    use: Setting | Look


GONE = object()


def put(holder: Any, name: Any, value: Any) -> None:
    """Set an attribute or an entry, bypassing a module's own `__setattr__`; the value `GONE` deletes it."""
    entries = holder if isinstance(holder, dict | list | collections.deque) else getattr(holder, "__dict__", None)
    if entries is None:
        setattr(holder, name, value)
    elif value is GONE:
        del entries[name]
    else:
        entries[name] = value


def deliver(by_products: list[tuple[ByProduct, list[torch.Tensor]]], watch: Watch) -> None:
    """Set the attributes that the call of the forward sets, and call the hooks that look at its values."""
    settings = [(b.use, tensors) for b, tensors in by_products if isinstance(b.use, Setting)]
    for setting, tensors in settings:
        setting.deliver(tensors)
    if settings:
        watch.settle()
    for by_product, tensors in by_products:
        if isinstance(by_product.use, Look):
            by_product.use.deliver(tensors)
