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

    _name: str
    _kept: tuple[str, ...]

    def __init__(self, name: str, kept: tuple[str, ...]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_kept", kept)

    def __repr__(self) -> str:
        return f"<{self._name}: left out by Config(outputs={self._kept!r})>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # protocols that are looked for, such as those of copies
            raise AttributeError(attribute)
        self._refuse()

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
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


# What Python looks up in the class: operators with this output on either side, conversions, and items.
_BOTH_SIDES = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_OTHERS = (
    "getitem setitem delitem contains iter reversed len bool float int complex index array round neg pos abs invert "
    "eq ne lt le gt ge"
)
for _operator in [*_OTHERS.split(), *(f"{side}{name}" for name in _BOTH_SIDES.split() for side in ("", "r", "i"))]:
    setattr(LeftOut, f"__{_operator}__", LeftOut._refuse)
LeftOut.__hash__ = object.__hash__  # type: ignore[method-assign]
