"""The user's optimizer once its updates are planned: the same object, but the plan makes its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import ProtocolError
from ..optim.masters import maker_of
from ..optim.updater import PLAIN, plain_class
from ..runtime.torch_names.modules import marked_as_scheduled, note_step, step_hooks


class PlannedOptimizer:
    """An optimizer whose updates are planned: the same instance with the same state, but the plan makes its steps.

    A mixin for the optimizer's own class; `_offmate` is the session that runs its updates.
    """

    _offmate: Any

    @property
    def state(self) -> Any:
        """The current states of all parameters; changes there take effect, as in plain PyTorch."""
        self._offmate.read_states()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self._offmate.read_states()
        self.__dict__["state"] = value

    def step(self, closure: Any = None) -> None:
        """Declare the planned updates done; those still under way finish before their parameter is read."""
        if closure is not None:
            raise ProtocolError(
                "optimizer.step(closure) would run the model again in the middle of an update. Call the model and "
                "backward() yourself, then optimizer.step()"
            )
        note_step(self)
        if self._offmate.updates.assigned.params:
            self._offmate.updates.step_assigned(self)
            return
        before, after = step_hooks(self)
        for hook in before:
            hook(self, (), {})
        found_inf = getattr(self, "found_inf", None)  # a scaler sets it for the time of a step
        if found_inf is not None and bool(found_inf):
            self._offmate.updates.skip()
        else:
            self._offmate.updates.step()
        for hook in after:
            hook(self, (), {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients from outside the plan and those behind a gate; the plan has consumed the others."""
        self._offmate.updates.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's current state, as plain PyTorch does."""
        self._offmate.read("optimizer.state_dict()")
        self._offmate.truth.warn_if_torn()
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved with or without offmate."""
        self._offmate.end_iteration()
        with _at_home(self._offmate.updater.names):
            super().load_state_dict(state_dict)  # type: ignore[misc]
        self._offmate.truth.adopt_states()
        self._offmate.truth.reloaded("optimizer")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the plain optimizer with current values, for copies and pickles."""
        self._offmate.read("a copy of the optimizer")
        # Pickle refuses the usual way, since this object is not of the plain class.
        return *maker_of(self._offmate.updater.base), super().__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ProtocolError: the plan covers only the groups that existed at compile time."""
        raise ProtocolError(
            "a parameter group was added after offmate.compile. Add all groups first, then compile the model"
        )


@contextlib.contextmanager
def _at_home(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let parameters report the device of their memory inside the body: torch sends loaded states there."""
    kinds = {param: type(param) for param in params}
    for param in kinds:
        param.__class__ = torch.nn.Parameter
    try:
        yield
    finally:
        for param, kind in kinds.items():
            param.__class__ = kind


def take_over(optimizer: torch.optim.Optimizer, session: Any) -> None:
    """Turn the optimizer, in place, into one whose updates the session runs."""
    plain = plain_class(optimizer)
    optimizer.__class__ = type(f"Offmate{plain.__name__}", (PlannedOptimizer, plain), {PLAIN: plain})
    optimizer._offmate = session  # type: ignore[attr-defined]
    # A scheduler made earlier has put its own wrapper of the old step on the instance.
    wrapped = optimizer.__dict__.pop("step", None)
    if wrapped is not None:

        def step(*args: Any, **kwargs: Any) -> None:
            return PlannedOptimizer.step(optimizer, *args, **kwargs)  # type: ignore[arg-type]

        optimizer.step = marked_as_scheduled(step)  # type: ignore[method-assign]
