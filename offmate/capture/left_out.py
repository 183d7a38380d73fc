"""Stands where an output was left out, so that nobody takes it for None."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import LeftOutError


class LeftOut:
    """An output that a training forward does not return.

    Parameters
    ----------
    name: of the output. kept: names of those that are returned.
    """

    def __init__(self, name: str, kept: tuple[str, ...]) -> None:
        self._name, self._kept = name, kept

    def __repr__(self) -> str:
        return f"<{self._name}: left out by Config(outputs={self._kept!r})>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # protocols that are looked for, such as those of copies
            raise AttributeError(attribute)
        self._refuse()

    def _refuse(self, *given: Any) -> NoReturn:
        raise LeftOutError(
            f"the output {self._name} was read, which Config(outputs={self._kept!r}) leaves out of training forwards. "
            f'Add "{self._name}" to outputs, or read it from a forward under torch.no_grad()'
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        one = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls))
        one._refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse
    __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
