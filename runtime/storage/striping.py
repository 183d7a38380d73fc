"""Which path each chunk of a tensor goes to, so that all paths are busy in given proportions."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
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

    def deal(
        self,
        sizes: Sequence[int],
        proportions: Sequence[float] | None,
        lie: Sequence[int] | None = None,
        stay: Collection[int] = (),
    ) -> list[int]:
        """Return the path of each chunk.

        Parameters
        ----------
        sizes: bytes of the chunks. proportions: by path, of the bytes that it is to get; None for equal ones.
        lie: by chunk, the path that it lies on, where it stays unless another one is behind by half a chunk more; None
            for chunks that lie nowhere yet. stay: the chunks that stay in any case.

        Raises: ArgumentValueError for proportions that are not one for each path, negative, or all zero.
        """
        shares = _shares(proportions, len(self._behind_bytes))
        while self._taken_back:
            self._count_back(*self._taken_back.popleft())
        dealt = []
        for chunk, size in enumerate(sizes):
            self._behind_bytes = [behind + share * size for behind, share in zip(self._behind_bytes, shares)]
            path = max((k for k, share in enumerate(shares) if share), key=lambda k: self._behind_bytes[k])
            if lie is not None and (chunk in stay or self._is_as_far_behind(lie[chunk], path, size)):
                path = lie[chunk]
            self._behind_bytes[path] -= size
            dealt.append(path)
        return dealt

    def _is_as_far_behind(self, path: int, most: int, size: int) -> bool:
        return self._behind_bytes[path] >= self._behind_bytes[most] - Fraction(size, 2)

    def take_back(self, sizes: Sequence[int], dealt: Sequence[int], proportions: Sequence[float] | None) -> None:
        """Count chunks no longer. It may be called on any thread, and while chunks are dealt out.

        Parameters
        ----------
        sizes, proportions: as they were given to `deal`. dealt: what it returned.
        """
        self._taken_back.append((sizes, dealt, _shares(proportions, len(self._behind_bytes))))

    def count(self, sizes: Sequence[int], paths: Sequence[int], proportions: Sequence[float] | None) -> None:
        """Count chunks that lie on given paths as if they had been dealt out."""
        shares = _shares(proportions, len(self._behind_bytes))
        self._count_back([-size for size in sizes], paths, shares)

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
