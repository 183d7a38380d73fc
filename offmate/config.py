"""Settings that few users need to change."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import ArgumentTypeError, ArgumentValueError
from .solver.problem import MOST_TURN_AROUND_STEPS
from .split import Split, Updates

# An option frontier always contains keep-all, recompute-all and offload-with-cheap-recompute.
_LEAST_OPTIONS = 3
_LEAST_TURN_AROUND_STEPS = 2
_SOLVERS = ("highs", "cbc", None)
_BACKENDS = ("eager", "inductor")
_ORDERS = ("auto", "by batch", "by block")
_UPDATES = ("auto", "host", "device")


def default_cache_dir() -> str:
    """Return the cache folder: `OFFMATE_CACHE_DIR`, else `offmate` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    own = os.environ.get("OFFMATE_CACHE_DIR")
    if own:
        return str(Path(own).expanduser())
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is invalid and must be ignored.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return str(folder / "offmate")


def _asked_to_measure() -> bool:
    return os.environ.get("OFFMATE_MEASURE_AGAIN") == "1"


@dataclass(frozen=True)
class Config:
    """Settings of planning and running, all with good defaults.

    Parameters
    ----------
    solver_time_limit_s: seconds after which the search for a faster plan ends; the best one found is used.
    solver_gap: the search also ends when the plan is proven to be within this fraction of the fastest.
    options_per_block: the planner chooses from at most this many ways to run a block (keep, recompute, offload).
    outputs: names of the model outputs that a training forward returns; reading another one raises an error. "all"
        returns all of them. ("loss",) does not keep the logits and saves memory, since their gradient can take their
        place; for a model that returns a tuple, it means the first output if that is a single number. A forward
        without gradients returns all outputs.
    gradients_into: names of the outputs that receive a gradient from backward(); "auto" takes a scalar output (the
        loss) if there is one, otherwise every output that can have a gradient.
    gradient_layouts: how the gradients of outputs arrive if the loss is computed outside of the model: for each
        output's name, the dimensions from the outermost in memory to the innermost. {"0": (0, 2, 1)} is for a loss of
        output.transpose(1, 2). Leave out dimensions along which a gradient repeats one element, as the gradient of a
        sum does. A gradient in another layout is copied, and a warning names that layout.
    cache_dir: folder of cached plans and profiles; None disables caching.
    measure_again: measure operators, updates and copies again instead of taking cached figures. The new figures, and
        the plans that follow from them, replace the cached ones. This takes as long as the first time, and is meant for
        one run on an idle machine. The default is whether `OFFMATE_MEASURE_AGAIN` is 1 in the environment.
    solver: "highs" or "cbc"; None takes HiGHS if it is installed, otherwise CBC.
    turn_around_steps: steps without compute between the last backward and the next forward, for updates. None takes as
        many as they need: three, or more if updates wait for clipping or accumulation and the GPU makes many of them.
    accumulation_order: how the micro-batches of an update run (`accumulation_steps=`). "by batch": one after the other.
        "by block": each block runs for all of them in turn, so that its parameters are copied to the GPU once per
        update; the loop has to announce its batches (`model.offmate.batches`). "auto": the order that is predicted to
        be faster, if the batches are announced; `offmate.plan` takes it for "by batch". Both have the same numbers.
    micro_batches_per_pass: how many micro-batches each block runs for in turn, before the next block. Parameters are
        copied to the GPU once for so many, and what lies between the blocks is kept for so many. The last pass of an
        update runs what is left. 1 is "by batch", as many as the update has is "by block", and a number between them
        needs announced batches, too. None leaves it to the planner: all with "by block", the fastest with "auto".
    measure_grad_norm: measure the norm of all gradients (`model.offmate.grad_norm`) without clipping. Nothing waits for
        it, unlike `max_grad_norm=float("inf")`, which makes updates wait for the step.
    shape_buckets: ascending sizes. A batch reuses the decisions of the plan for a larger one, without a search, if in
        every dimension both sizes lie between the same two of these. An empty tuple always allows this. Batches are
        never padded, since that would change numbers.
    max_plans: how many plans are kept in memory, separately for training and for evaluation; the least recently used
        one is dropped.
    backend: what runs the blocks. "eager": PyTorch's own operators, one by one, bit for bit. "inductor": each class of
        blocks is compiled with torch's Inductor, unless that needs more memory than planned. Its numbers differ from
        plain PyTorch's by rounding, and the plan still predicts the seconds of eager execution.
    updates: which side makes the planned updates. "auto": the planner decides for each parameter; "host" (the CPU) or
        "device" (the GPU): that side makes all of them; a `Split`, such as `plan.split`: each parameter is updated on
        the same side as in an earlier plan. On the emulated device, this changes no bits. On a GPU, it does, since CPU
        and GPU kernels round differently: numbers are the same bit for bit if the split is the same.
    speculate: whether the CPU may make updates before it is known that gradients need no clipping and that no scaler
        skips the step. It keeps the old values, in RAM or in files, and undoes what is wrong, so that no bits change.
        A step that clips nothing is faster then, and one that clips is slower. "auto": both ways are planned, and
        training begins with updates that wait. It changes to the other way, and back, by how many steps clip. Without
        clipping, accumulation or a scaler, updates wait for nothing, and this has no effect.
    low_copies: whether float32 weights that torch.autocast casts to a lower precision may be cast on the CPU, once per
        update, so that they are copied in that precision, as their gradients are. This changes no bits. A plan without
        such copies is made, too, and the faster one is used. Planned updates can have them, unless they run several
        micro-batches block by block.

    Raises: ArgumentTypeError, ArgumentValueError naming the field, its value and the values that are allowed.
    """

    solver_time_limit_s: float = 60.0
    solver_gap: float = 0.01
    options_per_block: int = 8
    outputs: Literal["all"] | tuple[str, ...] = "all"
    gradients_into: Literal["auto"] | tuple[str, ...] = "auto"
    gradient_layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cache_dir: str | None = field(default_factory=default_cache_dir)
    measure_again: bool = field(default_factory=_asked_to_measure, repr=False)  # not shown: no plan depends on it
    solver: Literal["highs", "cbc"] | None = None
    turn_around_steps: int | None = None
    accumulation_order: Literal["auto", "by batch", "by block"] = "auto"
    micro_batches_per_pass: int | None = None
    measure_grad_norm: bool = False
    shape_buckets: tuple[int, ...] = ()
    max_plans: int = 16
    backend: Literal["eager", "inductor"] = "eager"
    updates: Updates | Split = "auto"
    speculate: bool | Literal["auto"] = False
    low_copies: bool = True
    # When this was made: one run measures a model once, although it may plan for it more often.
    _made_s: float = field(default_factory=time.monotonic, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("solver_time_limit_s", self.solver_time_limit_s)
        _require(
            self.solver_time_limit_s > 0,
            "solver_time_limit_s",
            self.solver_time_limit_s,
            "more than 0 seconds",
        )
        _check_number("solver_gap", self.solver_gap)
        _require(0 <= self.solver_gap < 1, "solver_gap", self.solver_gap, "from 0 up to 1, such as 0.01 for 1 %")
        _check_count("options_per_block", self.options_per_block, _LEAST_OPTIONS)
        if self.turn_around_steps is not None:
            _check_count("turn_around_steps", self.turn_around_steps, _LEAST_TURN_AROUND_STEPS)
            most = f"at most {MOST_TURN_AROUND_STEPS:,}"
            _require(
                self.turn_around_steps <= MOST_TURN_AROUND_STEPS, "turn_around_steps", self.turn_around_steps, most
            )
        _check_count("max_plans", self.max_plans, 1)
        _check_buckets(self.shape_buckets)
        _require(self.solver in _SOLVERS, "solver", self.solver, "'highs', 'cbc' or None")
        _require(self.backend in _BACKENDS, "backend", self.backend, "'eager' or 'inductor'")
        orders = "'auto', 'by batch' or 'by block'"
        _require(self.accumulation_order in _ORDERS, "accumulation_order", self.accumulation_order, orders)
        if self.micro_batches_per_pass is not None:
            _check_count("micro_batches_per_pass", self.micro_batches_per_pass, 1)
            contradicts = {"by batch": self.micro_batches_per_pass > 1, "by block": self.micro_batches_per_pass == 1}
            _require(
                not contradicts.get(self.accumulation_order, False),
                "micro_batches_per_pass",
                self.micro_batches_per_pass,
                f"{'1' if self.accumulation_order == 'by batch' else 'at least 2'} or None with "
                f"accumulation_order={self.accumulation_order!r}",
            )
        known = isinstance(self.updates, Split) or self.updates in _UPDATES
        _require(known, "updates", self.updates, "'auto', 'host', 'device' or a Split, such as plan.split")
        for name in ("measure_again", "measure_grad_norm", "low_copies"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.speculate, bool) and self.speculate != "auto":
            raise ArgumentTypeError(f"speculate is {self.speculate!r}; it must be True, False or 'auto'")
        _check_names("outputs", self.outputs, "all")
        _check_names("gradients_into", self.gradients_into, "auto")
        _check_layouts(self.gradient_layouts)
        if self.cache_dir is not None and (not isinstance(self.cache_dir, str) or not self.cache_dir):
            raise ArgumentTypeError(
                f"cache_dir is {self.cache_dir!r}; it must be the path of a folder as text, or None"
            )

    @property
    def named_order(self) -> Literal["auto", "by batch", "by block"]:
        """The order of micro-batches that is named, in words or by the number per pass; "auto" if none is."""
        if self.micro_batches_per_pass is None:
            return self.accumulation_order
        return "by batch" if self.micro_batches_per_pass == 1 else "by block"

    @property
    def figures_since_s(self) -> float | None:
        """The time of `time.monotonic` since when figures count; None if those of earlier runs count, too."""
        return self._made_s if self.measure_again else None


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ArgumentValueError(f"{name} is {value!r}; it must be {expected}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a number")
    _require(math.isfinite(value), name, value, "a finite number")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} is {value!r}; it must be a whole number")
    _require(value >= least, name, value, f"at least {least}")


def _check_names(field_name: str, value: object, word: str) -> None:
    names = isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)
    if value != word and not (names and value):
        raise ArgumentTypeError(
            f'{field_name} is {value!r}; it must be "{word}" or a tuple of names, such as ("loss", "logits")'
        )


def _check_layouts(layouts: object) -> None:
    pairs = layouts.items() if isinstance(layouts, Mapping) else [(None, None)]
    for name, dims in pairs:
        if not (isinstance(name, str) and isinstance(dims, tuple) and all(type(dim) is int for dim in dims)):
            raise ArgumentTypeError(
                f"gradient_layouts is {layouts!r}; it must map names of outputs to tuples of dimensions, such as "
                '{"logits": (0, 2, 1)}'
            )


def _check_buckets(buckets: object) -> None:
    sizes = isinstance(buckets, tuple) and all(type(size) is int and size > 0 for size in buckets)
    ascending = sizes and list(buckets) == sorted(set(buckets))  # type: ignore[call-overload]
    _require(ascending, "shape_buckets", buckets, "a tuple of ascending sizes, such as (256, 1024)")
