"""The rows of a problem: options and blocks, parameter groups, values, and outputs, with their bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Rows = tuple[int, int]
"""Rows of a tensor as a half-open range (first, end)."""

Side = Literal["any", "host", "device"]
"""The place of a group's update: as the program decides ("any", in parts), all on the host, or all on the device."""


@dataclass(frozen=True)
class Launched:
    """A block's seconds with a device that runs on its own: on the device, and for the host to launch the operators."""

    forward_device_s: float
    backward_device_s: float
    forward_launch_s: float
    backward_launch_s: float


@dataclass(frozen=True)
class Option:
    """One way to run a block: keep, recompute or offload each value that its forward makes for its backward.

    Parameters
    ----------
    name: a word for tables, such as "keep" or "recompute".
    saved_bytes: bytes kept on the device between the block's forward and its backward.
    offloaded_bytes: bytes that leave after the forward and return before the backward.
    forward_s, backward_s: compute seconds; recomputation is part of the backward. Where `launched` tells the device's
        seconds and the host's apart, the larger ones.
    forward_peak_bytes: the most bytes that the forward holds at one time of tensors that it makes itself (saved,
        offloaded, interfaces, outputs, temporaries); parameters, its inputs and shared values are not counted.
    backward_peak_bytes: the most bytes that the backward holds at one time: saved, brought back, incoming gradients,
        gradients that it makes, recomputed, temporaries; parameters, input values, shared values and gradient
        accumulators that exist already are not counted.
    """

    name: str
    saved_bytes: int
    offloaded_bytes: int
    forward_s: float
    backward_s: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    launched: Launched | None = None

    @property
    def launch_bound_s(self) -> float:
        """Seconds by which launching makes the block's computes longer than the device needs for them."""
        if self.launched is None:
            return 0.0
        return self.forward_s - self.launched.forward_device_s + self.backward_s - self.launched.backward_device_s


@dataclass(frozen=True)
class Block:
    """A block of the chain and the options it can run with; blocks of one class share their options."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class TensorSize:
    """One parameter tensor: bytes of its compute copy, its gradient and its optimizer state (0 if frozen).

    Parameters
    ----------
    rows: number of rows into which its state can be cut; 1 if it leaves the device, and returns, whole.
    piece_rows: rows of each piece in which its state leaves and returns if the device updates it, or comes from files
        if the host does; the last piece may have fewer.
    """

    name: str
    param_bytes: int
    grad_bytes: int = 0
    state_bytes: int = 0
    rows: int = 1
    piece_rows: int = 1

    @property
    def pieces(self) -> tuple[Rows, ...]:
        """The rows of every piece of its state, as half-open ranges."""
        return tuple((row, min(row + self.piece_rows, self.rows)) for row in range(0, self.rows, self.piece_rows))

    def passing_bytes(self, with_values: bool) -> int:
        """Return the bytes of the largest piece of its state, with or without the parameter's own rows."""
        first, end = self.pieces[0]
        return self.piece_bytes((first, end)) + self.param_bytes * (end - first) // self.rows * with_values

    @property
    def log_bytes(self) -> int:
        """Bytes of the old values that undo an update of it."""
        return self.param_bytes + self.state_bytes

    def piece_bytes(self, rows: Rows) -> int:
        """Return the bytes of the state of these rows."""
        return self.state_bytes // self.rows * (rows[1] - rows[0])


@dataclass(frozen=True)
class Group:
    """A parameter group w: the tensors read by exactly the same steps, wholly trainable or wholly frozen.

    Parameters
    ----------
    uses: steps whose compute reads the parameters, ascending (forwards and backwards).
    grad_steps: backward steps that contribute to the gradient, ascending; empty if frozen. The last one is g_w.
    cpu_update_s, device_update_s: seconds to update the whole group on the host and on the device.
    cpu_add_s, device_add_s: seconds to add one micro-batch's gradient of the whole group to its total on the host and
        on the device.
    norm_s: seconds to unscale its gradient and to take its norm, in the backward that completes it; 0 with several
        micro-batches, whose additions take it.
    side: where it is updated; without effect on frozen groups and on those that the user's own code updates.
    in_files: whether it is frozen, and every tier that holds frozen parameters holds it.
    cpu_log_s: seconds that an update of the whole group on the host takes longer if it keeps a log of the old values.
    in_pieces_on_host: whether the host, too, may update its tensors piece by piece of their states.
    has_copies: whether the state of each of its tensors has a copy of it in float32, of which the tensor is the rounded
        value after every update.
    """

    name: str
    tensors: tuple[TensorSize, ...]
    uses: tuple[int, ...]
    grad_steps: tuple[int, ...] = ()
    cpu_update_s: float = 0.0
    device_update_s: float = 0.0
    cpu_add_s: float = 0.0
    device_add_s: float = 0.0
    side: Side = "any"
    norm_s: float = 0.0
    in_files: bool = False
    cpu_log_s: float = 0.0
    in_pieces_on_host: bool = True
    has_copies: bool = False

    @property
    def trainable(self) -> bool:
        return bool(self.grad_steps)

    @property
    def is_tied(self) -> bool:
        """Whether several blocks add to its gradient."""
        return len(self.grad_steps) > 1

    @cached_property
    def param_bytes(self) -> int:
        return sum(t.param_bytes for t in self.tensors)

    @cached_property
    def grad_bytes(self) -> int:
        return sum(t.grad_bytes for t in self.tensors)

    @cached_property
    def state_bytes(self) -> int:
        return sum(t.state_bytes for t in self.tensors)

    @cached_property
    def param_copies(self) -> int:
        """Number of copies in which its compute copies move."""
        return sum(t.param_bytes > 0 for t in self.tensors)

    @cached_property
    def grad_copies(self) -> int:
        """Number of copies in which its gradients move."""
        return sum(t.grad_bytes > 0 for t in self.tensors)

    @cached_property
    def state_copies(self) -> int:
        """Number of copies in which its states move: one per piece."""
        return sum(len(t.pieces) for t in self.tensors if t.state_bytes)

    @property
    def log_bytes(self) -> int:
        """Bytes of the old values that undo an update: those of the parameters and of their states."""
        return self.param_bytes + self.state_bytes

    @property
    def param_log_s(self) -> float:
        """Seconds that such an update takes longer if its states are in files, so that the log has parameters alone."""
        return self.cpu_log_s * self.param_bytes / max(self.log_bytes, 1)

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes."""
        return self.param_bytes + self.grad_bytes + self.state_bytes

    @property
    def host_update_bytes(self) -> int:
        """Bytes of the host's memory that an update there moves: parameters and states are read and written."""
        return 2 * self.param_bytes + self.grad_bytes + 2 * self.state_bytes


def log_share(param_bytes: float, grad_bytes: float, state_bytes: float) -> float:
    """Return the seconds of keeping a log of an update on the host, in those of the update, if memory limits both.

    A copy reads the old values, and its target is read before it is written. Measured on two cores of an AMD EPYC: 1.42
    where this says 1.29 (float32), and 1.06 where it says 1.4 (float32 copies of bfloat16).
    """
    updated = 2 * param_bytes + grad_bytes + 2 * state_bytes
    return 3 * (param_bytes + state_bytes) / updated if updated else 0.0


@dataclass(frozen=True)
class Value:
    """An interface activation: made by one block, read by later ones, held until its last use.

    Parameters
    ----------
    made: forward step that makes it. During that step it is part of the block's forward peak.
    uses: later steps (forwards and backwards) whose compute reads it, ascending, `made` not among them.
    grad_bytes: bytes of its gradient, 0 if it has none.
    grad_steps: backward steps of the blocks that add to its gradient, ascending. The first makes it (part of that
        step's backward peak), later ones add in place; it is consumed in the backward of the block that made the
        value (and is part of that step's backward peak).
    """

    name: str
    bytes: int
    made: int
    uses: tuple[int, ...]
    grad_bytes: int = 0
    grad_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shared:
    """A value that depends on no parameter (batch, mask, rotary table), present from the first step to `last_step`.

    With several micro-batches every pass makes it anew; all passes but the last release it by their end.
    """

    name: str
    bytes: int
    last_step: int


@dataclass(frozen=True)
class Output:
    """A model output: held from the forward step `made` until the next pass's last forward step has ended.

    grad_bytes: bytes of the gradient that the user's backward hands in (0 if it has none). It is on the device from the
    first backward step to the backward of the block that made the output, where it is part of the peak.
    """

    name: str
    bytes: int
    made: int
    grad_bytes: int = 0
