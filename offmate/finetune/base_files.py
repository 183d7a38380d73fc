"""A frozen base in files: its weights are mapped as its checkpoint has them, and others get a file of their own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import OffmateError
from ..sizes import format_bytes
from ..transformers_names import joins_one_by_one, parameters_made
from .base_cache import BaseCache, Cached, Writer
from .weight_files import map_weights

log = logging.getLogger("offmate")

_MOST_ELEMENT_BYTES = 8


@dataclass(frozen=True)
class InFiles:
    """Where the weights of a frozen base stay.

    Parameters
    ----------
    place: the folder for a file of those that the checkpoint does not have as the run uses them; None leaves these in
        RAM.
    """

    place: Path | None = None

    @contextlib.contextmanager
    def state(
        self, folder: Path, model_class: Any, dtype: torch.dtype, digests: Mapping[str, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the weights by name, from which transformers makes a model's parameters inside the body.

        Parameters
        ----------
        folder: the model's. dtype: of the run. digests: of the content of the files of weights.

        Raises: OffmateError if a file cannot be read or written.
        """
        import transformers

        stored = map_weights(folder)
        if self.place is None or not joins_one_by_one():
            yield dict(stored)
            return
        cache = BaseCache.of(self.place, digests, dtype, f"{model_class.__name__} {transformers.__version__}")
        with cache.locked():
            cached = cache.read()
            with _reused(cache, stored, cached) if cached is not None else _written(cache, stored) as state:
                yield state


@contextlib.contextmanager
def _reused(cache: BaseCache, stored: dict[str, torch.Tensor], cached: Cached) -> Iterator[dict[str, Any]]:
    """Yield the weights with what a cache has in the place of what that was made from."""
    left = dict(cached.tensors)

    def by(name: str, tensor: Any) -> Any:
        if name in left and left[name].data_ptr() == tensor.data_ptr():
            del left[name]
        return tensor

    with parameters_made(by):
        yield {name: tensor for name, tensor in stored.items() if name not in cached.sources} | dict(cached.tensors)
    if left:
        raise OffmateError(f"{cache.file} does not fit the model ({next(iter(left))}); remove it, and begin again")
    log.info("%s of the base lie in %s, as an earlier run has written them", _size(cached.tensors), cache.file)


@contextlib.contextmanager
def _written(cache: BaseCache, stored: dict[str, torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the weights; what is made from them and lies in no file is written to the cache."""
    places = {tensor.untyped_storage().data_ptr() for tensor in stored.values()}
    used: set[str] = set()
    made_from: set[str] = set()

    def by(writer: Writer, name: str, tensor: Any) -> Any:
        nonlocal made_from
        made_from = set(used) or made_from  # of several parameters made at once, the first one comes with the sources
        used.clear()
        mapped = tensor.untyped_storage().data_ptr() in places and tensor.is_contiguous()
        return tensor if mapped else writer.write(name, tensor, frozenset(made_from))

    most_bytes = sum(tensor.numel() for tensor in stored.values()) * _MOST_ELEMENT_BYTES
    with cache.writing(most_bytes, len(stored)) as writer, parameters_made(partial(by, writer)):
        yield {name: _Source(name, tensor, used) for name, tensor in stored.items()}
    if writer.n_bytes:
        log.info(
        "%s of the base are not in its checkpoint as the run uses them; they were written to %s",
        format_bytes(writer.n_bytes), cache.file,
    )  # fmt: skip


@dataclass(frozen=True)
class _Source:
    """A tensor of a checkpoint that notes when a parameter is made from it.

    Parameters
    ----------
    used: collects the names.
    """

    name: str
    tensor: torch.Tensor
    used: set[str]

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.used.add(self.name)
        return self.tensor[index]


def _size(tensors: Mapping[str, torch.Tensor]) -> str:
    return format_bytes(sum(tensor.nbytes for tensor in tensors.values()))
