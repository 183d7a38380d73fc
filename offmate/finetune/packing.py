"""Tokens on disk, cut into sequences of one length, and the order in which steps read them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..errors import OffmateError
from ..files import reason
from .data import pieces
from .tokenizing import Tokens, tokenized

Batch = dict[str, torch.Tensor]

IGNORED = -100  # the label that losses ignore
_TOLD_PIECES = 1024  # between two reports of how far tokenizing is
_SCANNED = 2**22  # tokens that are looked at at a time
_TOKEN_BYTES = 4
_TRAIN, _EVAL, _META = TOKEN_FILES = ("train.bin", "eval.bin", "tokens.json")


@dataclass(frozen=True)
class Packed:
    """The tokens of a run, on disk.

    Parameters
    ----------
    train, eval: all tokens of each split. A token that is read but not trained on is stored as its bitwise complement,
        which is negative. digest: hash of both splits, by which a resumed run recognises them.
    tally: number of documents by format, and of those that are left out; empty for tokens of older versions.
    """

    train: np.ndarray
    eval: np.ndarray
    digest: str
    tally: dict[str, int] = field(default_factory=dict)


def write_tokens(
    data: str,
    tokenizer: Any,
    eval_fraction: float,
    folder: Path,
    say: Callable[[int], None] = lambda n_tokens: None,
    assistant_only: bool = False,
) -> Packed:
    """Tokenize a source into a folder as a stream; the folder appears complete or not at all.

    Documents follow one another, each closed by the tokenizer's end-of-sequence token if it has one. Every
    1 / `eval_fraction`-th document is held out. If there are not that many, that share of all tokens is held out at the
    end, provided that the documents there are texts: nothing follows there, so no neighbours are joined.

    Raises: OffmateError with the place of an entry that cannot be used.
    """
    tally: Counter[str] = Counter()
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    documents = tokenized(pieces(data), tokenizer, assistant_only, tally)
    try:
        aside.mkdir(parents=True)
        _write(documents, Fraction(str(eval_fraction)), aside, say, tally)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OffmateError(
            f"the run's tokens cannot be written to {folder}: {reason(error)}; free disk space, or name another output"
        ) from error
    return read_tokens(folder)


def _write(
    documents: Iterator[Tokens], share: Fraction, folder: Path, say: Callable[[int], None], tally: Counter[str]
) -> None:
    """Write the tokens of all documents, and what is known of them, into a folder."""
    counts = [0, 0]
    n_documents = split = 0
    texts_from = 0  # the number of the token from which on there are only texts
    with (folder / _TRAIN).open("w+b") as train, (folder / _EVAL).open("w+b") as held_out:
        for number, part in enumerate(documents):
            if part.first:
                split = int((n_documents + 1) * share) - int(n_documents * share)
                n_documents += 1
            (train, held_out)[split].write(np.asarray(part.ids, dtype="<i4").tobytes())
            counts[split] += len(part.ids)
            if not part.is_text:
                texts_from = counts[0]
            if number % _TOLD_PIECES == 0:
                say(sum(counts))
        if int(n_documents * share) == 0:
            kept = counts[0] - int(counts[0] * share)
            if kept >= texts_from:
                _move_end(train, held_out, kept * _TOKEN_BYTES)
                counts = [kept, counts[0] - kept]
    splits = [_mapped(folder / name, count) for name, count in zip((_TRAIN, _EVAL), counts)]
    known = {"train": counts[0], "eval": counts[1], "digest": _digest(*splits), "tally": dict(tally)}
    (folder / _META).write_text(json.dumps(known))


def _move_end(source: BinaryIO, target: BinaryIO, kept_bytes: int) -> None:
    """Move what stands in a file behind its first bytes to the end of another one."""
    source.seek(kept_bytes)
    shutil.copyfileobj(source, target)
    source.truncate(kept_bytes)


def read_tokens(folder: Path) -> Packed:
    """Map the tokens that `write_tokens` wrote, without reading them into memory.

    Raises: OffmateError if the files are damaged.
    """
    try:
        meta = json.loads((folder / _META).read_text())
        splits = [_mapped(folder / name, meta[key]) for name, key in ((_TRAIN, "train"), (_EVAL, "eval"))]
        digest, tally = meta["digest"], {str(kind): int(count) for kind, count in meta.get("tally", {}).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OffmateError(
            f"{folder}: the run's tokens are damaged ({_META}: {type(error).__name__}: {error}); remove that folder "
            "and resume to make them again from the data"
        ) from None
    return Packed(splits[0], splits[1], digest, tally)


def verify_tokens(packed: Packed) -> bool:
    """Return whether the tokens on disk are those that were written, reading them piece by piece."""
    return _digest(packed.train, packed.eval) == packed.digest


def _digest(train: np.ndarray, held_out: np.ndarray) -> str:
    hashes = []
    for split in (train, held_out):
        digest = hashlib.sha256()
        for start in range(0, len(split), _SCANNED):
            digest.update(split[start : start + _SCANNED].tobytes())
        hashes.append(digest.hexdigest())
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class Batches:
    """The sequences that each step reads: one permutation per epoch, which depends only on the seed and the step.

    Parameters
    ----------
    tokens: those of the training split. sequence_length: in tokens. batch_size: in sequences.
    accumulation: batches per step. keeps_all: use sequences without a token to train on, too, as older versions did,
        although a batch of nothing else has no loss.
    """

    tokens: np.ndarray
    sequence_length: int
    batch_size: int
    accumulation: int
    seed: int
    keeps_all: bool = False

    @property
    def n_sequences(self) -> int:
        """The number of whole sequences that are used."""
        return len(self._used)

    @property
    def n_unused(self) -> int:
        """The number of whole sequences without a token to train on, which are left out."""
        return len(self.tokens) // self.sequence_length - self.n_sequences

    @property
    def n_leftover_tokens(self) -> int:
        """The number of tokens at the end that fill no sequence, which are left out."""
        return len(self.tokens) % self.sequence_length

    @property
    def n_leftover_sequences(self) -> int:
        """The number of sequences that each epoch leaves out, because they fill no step."""
        return self.n_sequences - self.steps_per_epoch * self.batch_size * self.accumulation

    @cached_property
    def _used(self) -> np.ndarray:
        """The numbers of the sequences that are used."""
        length = self.sequence_length
        n_whole = len(self.tokens) // length
        if self.keeps_all:
            return np.arange(n_whole)
        learns = np.empty(n_whole, dtype=bool)
        some = max(1, _SCANNED // length)
        for start in range(0, n_whole, some):
            rows = self.tokens[start * length : min(start + some, n_whole) * length].reshape(-1, length)
            # Nothing predicts the first token of a sequence.
            learns[start : start + some] = (rows[:, 1:] >= 0).any(axis=1)
        return np.flatnonzero(learns)

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole steps in an epoch; leftover sequences wait for the next epoch's permutation."""
        return self.n_sequences // (self.batch_size * self.accumulation)

    def check(self) -> None:
        """Raise OffmateError if there are not enough tokens for one step."""
        if self.steps_per_epoch == 0:
            needed = self.sequence_length * self.batch_size * self.accumulation
            unused = f" ({self.n_unused} sequences have no tokens to train on)" if self.n_unused else ""
            raise OffmateError(
                f"the data hold {len(self.tokens)} training tokens{unused}, fewer than the {needed} of one step "
                f"({self.batch_size} × {self.sequence_length} × accumulation {self.accumulation}); use more "
                "data or a smaller step"
            )

    def steps(self, start: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every step from `start` on, endlessly."""
        step = start
        while True:
            epoch = step // self.steps_per_epoch
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = self._used[torch.randperm(self.n_sequences, generator=generator).numpy()].tolist()
            for within in range(step % self.steps_per_epoch, self.steps_per_epoch):
                first = within * self.accumulation * self.batch_size
                yield [
                    self.batch(order[first + k * self.batch_size : first + (k + 1) * self.batch_size])
                    for k in range(self.accumulation)
                ]
                step += 1

    def batch(self, numbers: list[int]) -> Batch:
        """Return the sequences of these numbers as `input_ids` and `labels`."""
        length = self.sequence_length
        rows = np.stack([self.tokens[n * length : (n + 1) * length] for n in numbers])
        input_ids, labels = _read_and_trained(rows)
        return {"input_ids": input_ids, "labels": labels}


def eval_batches(tokens: np.ndarray, sequence_length: int, batch_size: int) -> Iterator[Batch]:
    """Yield all held-out tokens in batches of the training shape; the padding of the last one has no labels."""
    size = sequence_length * batch_size
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        if len(part) < 2:
            return
        input_ids = torch.zeros(size, dtype=torch.long)
        labels = torch.full((size,), IGNORED)
        input_ids[: len(part)], labels[: len(part)] = _read_and_trained(part)
        shape = (batch_size, sequence_length)
        yield {"input_ids": input_ids.view(shape), "labels": labels.view(shape)}


def _read_and_trained(tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's input tokens and the labels, which are `IGNORED` where the model is not trained."""
    found = torch.from_numpy(tokens.astype(np.int64))
    return torch.where(found < 0, ~found, found), torch.where(found < 0, IGNORED, found)


def _mapped(path: Path, n_tokens: int) -> np.ndarray:
    if path.stat().st_size != n_tokens * _TOKEN_BYTES:
        raise OSError(f"{path.name} has {path.stat().st_size} bytes, not {n_tokens * _TOKEN_BYTES}")
    return np.memmap(path, dtype="<i4", mode="r") if n_tokens else np.empty(0, dtype="<i4")
