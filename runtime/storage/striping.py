"""Which path each chunk of a tensor goes to, so that all paths are busy in given proportions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ...errors import ArgumentValueError


class Striping:
    """Deals chunks out to paths, evenly within a tensor and over all tensors.

    State: `behind_bytes`, by path, by how many bytes it has got fewer than its share. Who takes chunks back restores
    it.

    Parameters
    ----------
    n_paths: number of paths.
    """

    def __init__(self, n_paths: int) -> None:
        self.behind_bytes = [Fraction(0)] * n_paths

    def deal(self, sizes: Sequence[int], proportions: Sequence[float] | None) -> list[int]:
        """Return the path of each chunk.

        Parameters
        ----------
        sizes: bytes of the chunks. proportions: by path, of the bytes that it is to get; None for equal ones.

        Raises: ArgumentValueError for proportions that are not one for each path, negative, or all zero.
        """
        shares = _shares(proportions, len(self.behind_bytes))
        dealt = []
        for size in sizes:
            self.behind_bytes = [behind + share * size for behind, share in zip(self.behind_bytes, shares)]
            path = max((k for k, share in enumerate(shares) if share), key=lambda k: self.behind_bytes[k])
            self.behind_bytes[path] -= size
            dealt.append(path)
        return dealt


def _shares(proportions: Sequence[float] | None, n_paths: int) -> list[Fraction]:
    given = [1.0] * n_paths if proportions is None else list(proportions)
    if len(given) != n_paths or not all(0 <= value < float("inf") for value in given) or not sum(given):
        raise ArgumentValueError(
            f"proportions={given} do not fit {n_paths} paths: give one for each path, none negative and not all zero"
        )
    total = sum(map(Fraction, given))
    return [Fraction(value) / total for value in given]
