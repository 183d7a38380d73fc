"""What a compiled model and its parameters become: the same objects, of a class that knows the plan."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .errors import ProtocolError
from .plans import Plan


class Handle:
    """`model.offmate`: the plan, what was measured, and `sync()`."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def plan(self) -> Plan | None:
        """The plan of the training iteration; None before the first batch unless one was given."""
        return self._session.plan

    @property
    def peak_bytes(self) -> int:
        """The most bytes that have been on the device since the last `reset_peak`."""
        return self._session.peak_bytes

    def reset_peak(self) -> None:
        """Start counting the peak anew."""
        self._session.reset_peak()

    def sync(self) -> None:
        """Wait for updates and copies under way; afterwards parameters and optimizer states read current."""
        self._session.sync()

    def __repr__(self) -> str:
        plan = self.plan
        return f"<offmate: {plan.explain()}>" if plan is not None else "<offmate: planned at the first batch>"


class PlannedParameter(torch.nn.Parameter):
    """A parameter whose gradient the plan consumes; reading a consumed gradient raises."""

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        session = self.__dict__.get("_offmate")
        if session is not None and session.grads_consumed():
            raise ProtocolError(
                "the planned optimizer has consumed this gradient during backward(); to clip by global norm pass "
                "max_grad_norm= to offmate.compile, to work on .grad yourself compile without optimizer="
            )
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        copy = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class PlannedModule:
    """Mixed into the model's own class; `offmate` is the handle, `_offmate_session` what stands behind it."""

    offmate: Handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; with a planned optimizer none is left."""
        session = self.__dict__["_offmate_session"]
        if session.updater is None:
            super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state, current."""
        session = self.__dict__["_offmate_session"]
        session.sync()
        session.warn_if_torn()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state; it is used from the next forward on."""
        session = self.__dict__["_offmate_session"]
        session.bring_home()
        result = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        session.host.updates.clear()
        session.torn = ()
        return result


def take_over(model: torch.nn.Module, session: Any) -> None:
    """Turn the model, in place, into one that runs as planned; it stays an instance of its own class."""
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_offmate_session"].call(args, kwargs)

    members = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    model.__class__ = type(f"Offmate{base.__name__}", (PlannedModule, base), members)
    model.__dict__["_offmate_session"] = session
    model.__dict__["offmate"] = Handle(session)
    if session.updater is not None:
        for param in session.updater.names:
            param.__class__ = PlannedParameter
            param.__dict__["_offmate"] = session
