"""Autograd's view of a planned iteration."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ProtocolError
from ..guards.surroundings import AUTOCAST_KINDS
from ..runtime.torch_names.autograd import will_run, without_torch_function
from ..runtime.torch_names.tensors import gradient_hooks, version_of
from .gradients import alone_first

_GRAD_REFUSED = (
    "torch.autograd.grad cannot return the gradients of parameters, since the plan passes them to the optimizer or to "
    ".grad in backward(). Call backward() instead"
)


def _values_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return what changes if a buffer is written into, or given other memory."""
    with without_torch_function():
        return version_of(buffer), buffer.data_ptr()


class Iteration:
    """A forward, and the backward that it waits for.

    State: `graph`, dead once nothing can call backward() through this forward any more; `dropped`, whether the model
    was called again before that; `_outputs`, the outputs that the user was given, by name, with their versions at that
    time; `_read`, the memory of outputs that the backward reads; `_used`, outputs that the model itself uses further;
    `_buffers_then`, buffers that the backward may read, with their versions and addresses.

    Parameters
    ----------
    params: the parameters that autograd knows of, by name. ordered: whether it delivers their gradients in plain
        PyTorch's order, which only hooks can observe.
    """

    def __init__(self, params: dict[str, torch.nn.Parameter], ordered: bool) -> None:
        self.params, self.ordered = params, ordered
        self.graph: weakref.ref[Any] | None = None
        self.dropped = False
        self._outputs: dict[str, tuple[torch.Tensor, int]] = {}
        self._read: set[int] = set()
        self._used: dict[str, weakref.ref[torch.Tensor]] = {}
        self._buffers_then: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}

    @property
    def runs_now(self) -> bool:
        """Return whether the backward() under way goes through this forward."""
        node = self.graph() if self.graph is not None else None
        return node is not None and will_run(node)

    @property
    def is_over(self) -> bool:
        """Return whether nothing can call backward() through this forward any more."""
        return self.graph is None or self.graph() is None

    def returns(
        self, outputs: dict[str, torch.Tensor], read: list[torch.Tensor], used: dict[str, torch.Tensor]
    ) -> None:
        """Note the user's outputs, those whose memory the backward reads, and those that the model uses further."""
        self._used = {name: weakref.ref(out) for name, out in used.items()}
        self._outputs = {name: (out.detach(), version_of(out)) for name, out in outputs.items()}
        self._read = {out.untyped_storage().data_ptr() for out in read}

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The outputs that the user was given."""
        return [out for out, _ in self._outputs.values()]

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs' memory."""
        storages = [out.untyped_storage() for out in self.outputs]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def reads(self, buffers: dict[str, torch.Tensor] | None = None) -> None:
        """Note buffers that the backward may read in their present version; None renews the versions of known ones."""
        known = {name: buffer for name, (buffer, _) in self._buffers_then.items()} if buffers is None else buffers
        self._buffers_then = {name: (buffer, _values_of(buffer)) for name, buffer in known.items()}

    def edited_buffers(self) -> list[str]:
        """Return the buffers that the user has written into since then."""
        return [name for name, (buffer, values) in self._buffers_then.items() if _values_of(buffer) != values]

    def asked_gradients(self) -> list[str]:
        """Return outputs that the model uses further and whose whole gradient the user has asked for."""
        alive = {name: out for name, ref in self._used.items() if (out := ref()) is not None}
        return [name for name, out in alive.items() if out.retains_grad or gradient_hooks(out)]

    def changed_outputs(self) -> list[str]:
        """Return the outputs that the backward reads and that the user has written into since then."""
        return [
            name
            for name, (out, version) in self._outputs.items()
            if version_of(out) != version and out.untyped_storage().data_ptr() in self._read
        ]

    def ends(self) -> None:
        """Release the outputs."""
        self._outputs = {}

    def is_left_out(self) -> None:
        """Release the outputs, through which no gradient comes."""
        self._outputs, self._used = {}, {}


class _Passed(torch.autograd.Function):
    """The identity of a parameter and its gradient: the extra node gives the gradient a turn in autograd's order."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def in_order(params: dict[str, torch.nn.Parameter], order: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Make stand-ins of parameters whose gradients autograd delivers one after the other.

    Autograd runs the node first that was made last.

    Parameters
    ----------
    order: the parameters' names, in the order in which plain PyTorch delivers their gradients.
    """
    made = {name: _Passed.apply(params[name]) for name in reversed(order) if name in params}
    return {name: made.get(name, param) for name, param in params.items()}


class Replay(torch.autograd.Function):
    """A single autograd node from all trainable parameters to the outputs."""

    @staticmethod
    def forward(
        ctx: Any, session: Any, variant: Any, iteration: Iteration, tensors: Any, names: Any, anchor: Any, *params: Any
    ) -> Any:
        """Run the forwards."""
        outputs = session.forward(variant, tensors)
        ctx.session, ctx.variant, ctx.iteration, ctx.names = session, variant, iteration, names
        iteration.graph = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backwards.

        Gradients that a planned optimizer takes go where the plan says, and autograd gets none. Without a planned
        optimizer, autograd gets them all, adds them to gradients from elsewhere, and calls the parameters' hooks.
        """
        if any(map(torch.is_autocast_enabled, AUTOCAST_KINDS)):
            raise ProtocolError(
                "backward() inside torch.autocast would also run in lower precision, but the plan's backward was "
                "captured outside it. Leave the autocast region before backward(), as PyTorch recommends"
            )
        (anchor, _), *edges = ctx.next_functions
        leaves = dict(zip(ctx.names, (node for node, _ in edges), strict=True))
        wanted = None if will_run(anchor) else _wanted(leaves)
        if torch.is_grad_enabled():
            raise ProtocolError(
                "backward(create_graph=True) cannot be planned, since the plan keeps no graph of the backward. Call "
                "backward() without it"
            )
        gradients = ctx.session.backward(ctx.variant, ctx.iteration, grads, wanted)
        for name in ctx.variant.prepared.arrivals.summed & gradients.keys():
            alone_first(name, ctx.iteration.params[name], gradients[name].data_ptr())
        return (*(None,) * 6, *map(gradients.get, ctx.names))


def _wanted(leaves: dict[str, Any]) -> frozenset[str]:
    """Return the parameters that backward(inputs=...) names. Raises: ProtocolError under torch.autograd.grad."""
    try:
        wanted = frozenset(name for name, node in leaves.items() if will_run(node))
    except RuntimeError as error:  # raised for a leaf whose gradient is to be returned
        raise ProtocolError(_GRAD_REFUSED) from error
    if not wanted:
        raise ProtocolError(_GRAD_REFUSED)
    return wanted


def alive(iterations: Iterable[Iteration]) -> list[Iteration]:
    """Return the iterations through which backward() could still be called."""
    return [iteration for iteration in iterations if not iteration.is_over]
