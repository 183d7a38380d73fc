"""Which path each chunk of a tensor goes to, so that all paths are busy in given proportions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from ...errors import ArgumentValueError


class Striping:
    """Deals chunks out to paths, evenly within a tensor and over all tensors.

    State: `_behind_bytes`, by path, by how many bytes it has got fewer than its share; `_taken_back`, chunks that are
    no longer there and that `_behind_bytes` still counts.

    Parameters
    ----------
    n_paths: number of paths.
    """

    def __init__(self, n_paths: int) -> None:
        self._behind_bytes = [Fraction(0)] * n_paths
        self._taken_back: deque[tuple[Sequence[int], Sequence[int], list[Fraction]]] = deque()

    def deal(self, sizes: Sequence[int], proportions: Sequence[float] | None) -> list[int]:
        """Return the path of each chunk.

        Parameters
        ----------
        sizes: bytes of the chunks. proportions: by path, of the bytes that it is to get; None for equal ones.

        Raises: ArgumentValueError for proportions that are not one for each path, negative, or all zero.
        """
        shares = _shares(proportions, len(self._behind_bytes))
        while self._taken_back:
            self._count_back(*self._taken_back.popleft())
        dealt = []
        for size in sizes:
            self._behind_bytes = [behind + share * size for behind, share in zip(self._behind_bytes, shares)]
            path = max((k for k, share in enumerate(shares) if share), key=lambda k: self._behind_bytes[k])
            self._behind_bytes[path] -= size
            dealt.append(path)
        return dealt

    def take_back(self, sizes: Sequence[int], dealt: Sequence[int], proportions: Sequence[float] | None) -> None:
        """Count chunks no longer. It may be called on any thread, and while chunks are dealt out.

        Parameters
        ----------
        sizes, proportions: as they were given to `deal`. dealt: what it returned.
        """
        self._taken_back.append((sizes, dealt, _shares(proportions, len(self._behind_bytes))))

    def _count_back(self, sizes: Sequence[int], dealt: Sequence[int], shares: list[Fraction]) -> None:
        total = sum(sizes)
        self._behind_bytes = [behind - share * total for behind, share in zip(self._behind_bytes, shares)]
        for size, path in zip(sizes, dealt):
            self._behind_bytes[path] += size


def _shares(proportions: Sequence[float] | None, n_paths: int) -> list[Fraction]:
    given = [1.0] * n_paths if proportions is None else list(proportions)
    if len(given) != n_paths or not all(0 <= value < float("inf") for value in given) or not sum(given):
        raise ArgumentValueError(
            f"proportions={given} do not fit {n_paths} paths: give one for each path, none negative and not all zero"
        )
    total = sum(map(Fraction, given))
    return [Fraction(value) / total for value in given]
