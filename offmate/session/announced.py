"""Batches that the loop announces, and the calls that it will make with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import ArgumentTypeError, ProtocolError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tensors import version_of

Batch = TypeVar("Batch")
Path = tuple[Any, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class _Source(NamedTuple):
    """Where an argument's leaf comes from: a place in the batch, or always the same value.

    Parameters
    ----------
    path: its place in the batch; None if it is the same in every call. value: that value.
    """

    path: Path | None
    value: Any = None


class Announced:
    """The batches of the loop, as many at a time as make one update.

    State: `_batches`, those of the present group, and `_parts`, what they held when they were announced; `called`, how
    many of them the model has been called with.

    Parameters
    ----------
    per_update: micro-batches of an update; 1 if none has to be known before its turn. one_by_one: as in `Turns`.
    """

    def __init__(self, per_update: int, one_by_one: str) -> None:
        self._per_update, self._one_by_one = per_update, one_by_one
        self._batches: list[Any] = []
        self._parts: list[dict[Path, Any]] = []
        self.called = 0

    def each(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches, all of an update being known before the first of them is yielded.

        Raises, when it is gone through: ProtocolError if plain PyTorch would give other batches.
        """
        if not isinstance(loader, Iterable):
            raise ArgumentTypeError(
                f"batches() takes what the loop goes through, such as a DataLoader, not {type(loader).__name__}"
            )
        return iter(loader) if self._per_update == 1 else self._each(iter(loader))

    def _each(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while first := list(islice(batches, 1)):
            seen = [_Seen(first[0])]
            generator = torch.get_rng_state()
            group = [*first, *islice(batches, self._per_update - 1)]
            seen += map(_Seen, group[1:])
            drew = not torch.equal(generator, torch.get_rng_state())
            _check_memory(seen, self._one_by_one)
            self.announce(group)
            for number, batch in enumerate(group, 1):
                generator = torch.get_rng_state()
                yield batch
                if drew and number < len(group) and not torch.equal(generator, torch.get_rng_state()):
                    raise ProtocolError(
                        "the loader draws random numbers from torch's generator, and so does the loop (dropout does). "
                        "model.offmate.batches() takes all batches of an update before the first forward, so that "
                        "both get other numbers than in plain PyTorch. Give the loader a generator of its own, or "
                        f"{self._one_by_one}, which takes batches one by one"
                    )
            self.announce(())

    def announce(self, batches: Iterable[Any]) -> None:
        """Take the batches of the next update, which the loop has in hand."""
        self._batches, self.called = list(batches), 0
        self._parts = [dict(parts_of(batch)) for batch in self._batches]

    @property
    def any(self) -> bool:
        """Return whether the loop is among batches that it has announced."""
        return bool(self._batches)

    @property
    def begins(self) -> bool:
        """Return whether the next call is the first of a whole group."""
        return self.called == 0 and len(self._batches) == self._per_update

    def foreseen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """Return the arguments of all calls of the present group, those of the first of them being given.

        An argument that is a part of the first batch is the same part of each later one. Any other argument is expected
        again as it is.
        """
        leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
        sources = [_source(path, leaf, self._parts[0]) for path, leaf in leaves]
        found = [(args, kwargs)]
        for own in self._parts[1:]:
            values = [own.get(s.path, s.value) if s.path is not None else s.value for s in sources]
            found.append(pytree.tree_unflatten(values, spec))
        return found


class _Seen:
    """The tensors of a batch, and their versions when the loader handed it out."""

    def __init__(self, batch: Any) -> None:
        self.tensors = [part for _, part in parts_of(batch) if isinstance(part, torch.Tensor) and part.numel()]
        self._versions = [version_of(tensor) for tensor in self.tensors]

    @property
    def changed(self) -> bool:
        """Return whether a tensor was written into since."""
        return any(version_of(tensor) != then for tensor, then in zip(self.tensors, self._versions))


def _check_memory(seen: list[_Seen], one_by_one: str) -> None:
    """Raise if a loader has handed out a batch in the memory of an earlier one of the same update."""
    known: dict[int, torch.Tensor] = {}
    again = False
    for one in seen:
        for tensor in one.tensors:
            other = known.setdefault(tensor.data_ptr(), tensor)
            again = again or (other is not tensor and other.numel() == tensor.numel())
    if again or any(one.changed for one in seen):
        raise ProtocolError(
            "the loader hands out batches of one update in the same memory. Later ones have overwritten earlier "
            "ones when model.offmate.batches() has taken all. Let it make new tensors, or "
            f"{one_by_one}, which takes batches one by one"
        )


class Expected:
    """The arguments with which a call was foreseen, to be compared with those of the call.

    Parameters
    ----------
    arguments: what the forward has run with. number: of the micro-batch, from 1. one_by_one: as in `Turns`.
    """

    def __init__(self, arguments: Arguments, number: int, one_by_one: str) -> None:
        self._leaves, self._spec = pytree.tree_flatten(arguments)
        self._versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in self._leaves]
        self._number, self._one_by_one = number, one_by_one

    def check(self, arguments: Arguments) -> None:
        """Raise if a call has other arguments."""
        what = self.differs(arguments)
        if what is not None:
            raise ProtocolError(
                f"the call for micro-batch {self._number} differs from what its batch announced: {what}. With "
                "model.offmate.batches(), the forwards of several micro-batches run at the first call. So each call's "
                "arguments must be parts of its batch, or the same in every call. No update was made. Compute inputs "
                f"in the data loader or its collate_fn, or {self._one_by_one}"
            )

    def differs(self, arguments: Arguments) -> str | None:
        """Return what a call has other than this; None if it has the same arguments."""
        leaves, spec = pytree.tree_flatten_with_path(arguments)
        if str(spec) != str(self._spec):
            return "the arguments that it names"
        for (path, leaf), expected, version in zip(leaves, self._leaves, self._versions):
            edited = isinstance(expected, torch.Tensor) and version_of(expected) != version
            if edited or not _equal(leaf, expected):
                return f"its argument {_words(path)}"
        return None


def parts_of(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a batch with their places; mappings, lists and tuples may be nested."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from parts_of(value, (*path, key))
    elif isinstance(batch, (list, tuple)):
        for key, value in enumerate(batch):
            yield from parts_of(value, (*path, key))
    else:
        yield path, batch


def _source(path: Any, leaf: Any, parts: dict[Path, Any]) -> _Source:
    """Find the part of the batch that an argument's leaf is: the same object, else one of equal value and name."""
    for place, part in parts.items():
        if part is leaf and isinstance(leaf, torch.Tensor):
            return _Source(place)
    name = next((key.key for key in reversed(path) if hasattr(key, "key")), None)
    equal = [place for place, part in parts.items() if _equal(part, leaf)]
    named = [place for place in equal if place[-1:] == (name,)]
    if named or (equal and isinstance(leaf, torch.Tensor)):
        return _Source((named or equal)[0])
    return _Source(None, leaf)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two leaves have the same values; a tensor may have been copied to another device."""
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and isinstance(one, _PLAIN) and one == other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    one, other = one.detach().cpu(), other.detach().cpu()
    if torch.equal(one, other):
        return True
    # A copy of a NaN, which is why a loop leaves out a backward(), is equal to it here.
    fractions = one.is_floating_point() or one.is_complex()
    return fractions and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _words(path: Any) -> str:
    keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]]
    return ".".join(keys) or "of the call"
