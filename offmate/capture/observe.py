"""Watches a forward during export: what its Python code reads and changes, and its by-products.

A graph keeps what operators compute. Everything else that a forward does would be lost silently: attributes that it
sets, hooks that look at values, numbers drawn from Python's own generators, hooks on gradients. Each of these either
becomes part of the graph's outputs (a by-product), is found to make no difference, or is refused by name.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ..errors import CaptureError
from ..guards.python_objects import Found, attribute_path
from ..guards.python_state import random_states, same_state
from ..guards.settings import is_simple
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.modules import buffers_of
from ..runtime.torch_names.tensors import version_of
from .byproducts import GONE, ByProduct, Look, Setting, Tree, put
from .hooks import gradient_hooks_refused, hook_name, hooks_replaced, of_a_package
from .plain import forward_replaced
from .settled import check_modules


@dataclass
class Observer:
    """Watches one forward of a model.

    State: all fields below except `model`, filled while the forward runs.

    Parameters
    ----------
    by_products: in order of occurrence, each with its tensors. kept: attributes among them that were read before they
        were set: path -> index of the by-product. read: attributes of modules that were read, by path.
    changed: non-tensors that the forward set: path -> (holder, name, value, whether it was read before).
    """

    model: torch.nn.Module
    by_products: list[tuple[ByProduct, list[torch.Tensor]]] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    changed: dict[str, tuple[Any, Any, Any, bool]] = field(default_factory=dict)
    _read: set[tuple[int, str]] = field(default_factory=set)
    _first: set[tuple[int, str]] = field(default_factory=set)
    _written: set[tuple[int, str]] = field(default_factory=set)
    _read_first: frozenset[str] = frozenset()
    _attributes: dict[str, str] = field(default_factory=dict)

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Paths that the forward read and then set: the next call may find another value, and act differently."""
        return tuple(path for path, (*_, first) in self.changed.items() if first)

    @property
    def free(self) -> frozenset[str]:
        """Attributes that the forward sets, by path."""
        set_ = (*self.changed, *(f".{b.name}" for b, _ in self.by_products if isinstance(b.use, Setting)))
        return frozenset(self._attributes[path] for path in set_)

    def sets(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the value, before the forward, of an attribute that the forward sets."""
        settings = [b.use for b, _ in self.by_products if isinstance(b.use, Setting)]
        return any(entry_of(setting.holder, setting.name) is tensor for setting in settings)

    def put_changes(self) -> None:
        """Set the model to the state in which the forward has left it, with zeros for the values of tensors."""
        for holder, name, value, _ in self.changed.values():
            put(holder, name, value)
        for by_product, tensors in self.by_products:
            if isinstance(by_product.use, Setting):
                by_product.use.deliver([torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forward that runs in the body."""
        model = self.model
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._watched(original, args, kwargs)

        with (
            forward_replaced(model, forward),
            hooks_replaced(model, self._seen_by),
            gradient_hooks_refused(),
        ):
            yield

    def _watched(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward, and return the tensors of its by-products together with its result."""
        before, drawn = Found(self.model), random_states()
        modules = dict(self.model.named_modules(remove_duplicate=False))
        sources = _sources(before)
        values = {path: entry_of(holder, name) for path, (holder, name) in before.places.items()}
        with self._attributes_recorded():
            output = original(*args, **kwargs)
        for name, state in random_states().items():
            if not same_state(state, drawn[name]):
                raise CaptureError(
                    f"the forward draws from {name}, so one graph cannot stand for several calls; draw with torch "
                    "(torch.rand, torch.bernoulli), which gives the numbers of plain PyTorch, or draw outside of the "
                    "forward" + _spec_augment(self.model)
                )
        for path, state in _sources(before).items():
            if state != sources[path]:
                raise CaptureError(
                    f"the forward draws from {path[1:]}, so one graph cannot stand for several calls; draw with torch, "
                    "or draw outside of the forward and pass the result"
                )
        check_modules(modules, dict(self.model.named_modules(remove_duplicate=False)))
        after = Found(self.model)
        self.read, self._read_first = self._paths(self._read, after), self._paths(self._first, after)
        self._note_changes(before, values, after)
        return output, [tensor.clone() for _, tensors in self.by_products for tensor in tensors]

    @staticmethod
    def _paths(attributes: set[tuple[int, str]], found: Found) -> frozenset[str]:
        return frozenset(attribute_path(found.paths[m], name) for m, name in attributes if m in found.paths)

    # -- attributes ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _attributes_recorded(self) -> Iterator[None]:
        """Note which attributes of modules are read and set."""
        module_class = torch.nn.Module
        set_attribute = module_class.__setattr__
        read, first, written = self._read, self._first, self._written

        def get(module: Any, name: str) -> Any:
            key = id(module), name
            if name == "__dict__" and not _is_torch(sys._getframe(1)):
                # Code that takes the dictionary itself may read anything in it.
                read.update((id(module), own) for own in object.__getattribute__(module, name))
            read.add(key)
            if key not in written:
                first.add(key)
            return object.__getattribute__(module, name)

        def put(module: Any, name: str, value: Any) -> None:
            written.add((id(module), name))
            set_attribute(module, name, value)

        with (
            mock.patch.object(module_class, "__getattribute__", get),
            mock.patch.object(module_class, "__setattr__", put),
        ):
            yield

    def _note_changes(self, before: Found, values: dict[str, Any], after: Found) -> None:
        """Classify what the forward has set: tensors become by-products, numbers are noted.

        Parameters
        ----------
        values: values of the attributes before the forward, by path.
        """
        for attribute in sorted({*before.description, *after.description}):
            was, now = before.description.get(attribute), after.description.get(attribute)
            if was == now or not attribute.startswith("."):
                continue
            holder, name = after.places.get(attribute) or before.places[attribute]
            value = entry_of(holder, name)
            if value is GONE or is_simple(value) or value is values.get(attribute):
                # The order of keys has no place in the model; the keys that changed it have one.
                paths = {*(was or {}), *(now or {})} & {*before.places, *after.places}
                for path in sorted(paths):
                    if (was or {}).get(path) != (now or {}).get(path):
                        self._note_change(attribute, path, before, after)
            else:
                self._note_replaced(attribute, holder, name, value)

    def _note_replaced(self, attribute: str, holder: Any, name: str, value: Any) -> None:
        """Note an attribute that was set to a tensor, or to a new container."""
        self._attributes[attribute] = attribute
        tree, tensors = Tree.of(value)
        odd = [rest[0] for rest in tree.rest if rest is not None and not is_simple(rest[0])]
        if odd:
            raise CaptureError(
                f"the forward sets {attribute[1:]} to a new {type(odd[0]).__name__} at every call, which a graph "
                "cannot follow; create it once, in __init__"
            )
        first = attribute in self._read_first
        if not tensors:
            self.changed[attribute] = (holder, name, value, first)
            return
        if first:
            self.kept[attribute] = len(self.by_products)
        self.by_products.append((ByProduct(attribute[1:], len(tensors), Setting(holder, name, tree)), tensors))

    def _note_change(self, attribute: str, path: str, before: Found, after: Found) -> None:
        """Note a change of a number, or of an entry of a container that is the same object as before."""
        holder, name = after.places.get(path) or before.places[path]
        value = entry_of(holder, name)
        self._attributes[path] = attribute
        grown = isinstance(holder, list | set | collections.deque) and (value is GONE or path not in before.places)
        tensor = isinstance(value, torch.Tensor)
        if grown or (tensor and not isinstance(holder, dict)) or not (tensor or is_simple(value) or value is GONE):
            raise CaptureError(
                f"the forward changes {attribute[1:]} at every call (now {path[1:]}), which a plan would not do; "
                "return the value, or register a buffer"
            )
        if tensor:
            # It is not known which entries were read.
            self.kept[path] = len(self.by_products)
            tree, tensors = Tree.of(value)
            self.by_products.append((ByProduct(path[1:], 1, Setting(holder, name, tree)), tensors))
        else:
            first = attribute in self._read_first or not isinstance(holder, torch.nn.Module)
            self.changed[path] = (holder, name, value, first)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _seen_by(self, path: str, hook: Callable[..., Any], module: torch.nn.Module, given: tuple[Any, ...]) -> Any:
        """Call a hook; if it only looks, note it, so that it is called with the values of every call."""
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        state = [*map(version_of, tensors)], {n: id(v) for n, v in vars(module).items()}, _versions(module)
        try:
            result = hook(module, *given)
        except CaptureError:
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or ["no words"])[0]
            raise CaptureError(
                f"the hook {hook_name(hook)} of {path} failed with {type(error).__name__}: {first}. During capture, "
                "every hook inside the model is called once with tensors that have no values. Let it return "
                "immediately if torch.compiler.is_exporting() is true; it is called with real values later"
            ) from error
        now = [*map(version_of, tensors)], {n: id(v) for n, v in vars(module).items()}, _versions(module)
        if result is None and state == now and not of_a_package(hook):
            self._note_look(path, hook, module, given)
        return result

    def _note_look(self, path: str, hook: Callable[..., Any], module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        tree, tensors = Tree.of(given)
        for rest in tree.rest:
            if rest is not None and not is_simple(rest[0]) and isinstance(getattr(rest[0], "__dict__", None), dict):
                raise CaptureError(
                    f"the hook {hook_name(hook)} of {path} is given a {type(rest[0]).__name__}, which a plan cannot "
                    "fill with values; let the module return tensors, tuples or dicts, or register the class with "
                    "torch.utils._pytree.register_pytree_node"
                )
        name = f"{path} ({hook_name(hook)})"
        clones = [tensor.clone() for tensor in tensors]
        self.by_products.append((ByProduct(name, len(clones), Look(hook, module, tree)), clones))


def _sources(found: Found) -> dict[str, str]:
    """Describe generators and iterators that a model holds, as text that changes when an item is taken from them."""
    held = {path: entry_of(holder, name) for path, (holder, name) in found.places.items()}
    states = {}
    for path, value in held.items():
        if isinstance(value, random.Random):
            states[path] = repr(value.getstate())
        elif hasattr(value, "bit_generator"):
            states[path] = repr(value.bit_generator.state)
        elif type(value).__module__.startswith("numpy.random") and hasattr(value, "get_state"):
            states[path] = repr(value.get_state())
        elif isinstance(value, Iterator):
            states[path] = f"{value!r} {operator.length_hint(value, -1)}"
    return states


def entry_of(holder: Any, name: Any) -> Any:
    """Return the value at a place of a model, `GONE` if there is nothing."""
    if isinstance(holder, dict):
        return holder.get(name, GONE)
    if isinstance(holder, list | tuple | collections.deque):
        return holder[name] if name < len(holder) else GONE
    if isinstance(holder, set | frozenset):
        return GONE
    try:
        # Past what a holder's class makes of reads: transformers' configurations refuse some.
        return object.__getattribute__(holder, name)
    except AttributeError:
        return getattr(holder, name, GONE)


def _versions(module: torch.nn.Module) -> list[int]:
    return [version_of(buffer) for buffer in buffers_of(module).values() if buffer is not None]


def _is_torch(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "offmate")


def _spec_augment(model: torch.nn.Module) -> str:
    """Return how to switch off what draws in the speech models of transformers."""
    if not getattr(getattr(model, "config", None), "apply_spec_augment", False):
        return ""
    return ". This model draws for SpecAugment; switch it off with model.config.apply_spec_augment = False"
