"""The errors that offmate raises on purpose; each says what happened, with which values, and what to try."""

from __future__ import annotations


class OffmateError(RuntimeError):
    """Base class of all errors below; `except OffmateError` catches everything that offmate refuses to do."""


class ArgumentValueError(OffmateError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(OffmateError, TypeError):
    """An argument has a type that is not allowed."""


class InfeasibleBudget(OffmateError):
    """No plan stays within the budgets.

    Raised before training. Also raised before the second iteration of a kind, if the first one showed that the user's
    own code holds more on the device between forward and backward() than the budget allows. Never raised inside an
    iteration.

    Parameters
    ----------
    message: what does not fit, the values, and remedies.
    budget_bytes: the device budget that was asked for.
    least_budget_bytes: the smallest device budget that works, None if none does (too little host memory).
    block: name of the block that is the bottleneck at the least budget, None if no block is.
    step: the step of the iteration that is the bottleneck, None if no step is.
    place: that block and step in words, None if there are none.
    """

    def __init__(
        self,
        message: str,
        budget_bytes: int,
        least_budget_bytes: int | None = None,
        block: str | None = None,
        step: int | None = None,
        place: str | None = None,
    ) -> None:
        # All values go into `args`, so that the error survives pickling on its way out of another process.
        super().__init__(message, budget_bytes, least_budget_bytes, block, step, place)
        self.budget_bytes = budget_bytes
        self.least_budget_bytes = least_budget_bytes
        self.block = block
        self.step = step
        self.place = place

    def __str__(self) -> str:
        return str(self.args[0])


class LibraryError(OffmateError, ImportError):
    """A library is not installed or does not load; names it, what it does here, and the line for pip."""


class CaptureError(OffmateError):
    """The model cannot be captured as a graph; the message names the construct and what to try."""


class ProtocolError(OffmateError):
    """The training loop did something that the plan cannot follow; nothing has been computed wrongly."""


class PlanFileError(OffmateError):
    """A saved plan cannot be read, or belongs to another model, batch, device or version."""


class SolverError(OffmateError):
    """A solver of plans is not installed, or its process ended; the message names it and what to try."""


class DeviceError(OffmateError):
    """The device is absent, cannot do what is asked, or failed; parameters and states all belong to one update."""


class UnknownDevice(DeviceError, ArgumentValueError):
    """No device of this machine has the name that was given."""


class BudgetExceeded(DeviceError):
    """The device's ledger would exceed its limit; the allocation was refused and the budget kept."""


class StorageError(OffmateError):
    """A storage path or a file failed, or does not hold the bytes that were written; the message says what to try."""


class LeftOutError(OffmateError, AttributeError):
    """An output was read that `Config(outputs=...)` leaves out. It is an AttributeError too, for `hasattr`."""
