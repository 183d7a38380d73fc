"""Autograd's view of a planned iteration."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .errors import ProtocolError


class Iteration:
    """One forward and the backward that it waits for.

    State: `graph`, dead once nothing can call backward() through this forward any more.
    """

    def __init__(self) -> None:
        self.graph: weakref.ref[Any] | None = None

    @property
    def given_up(self) -> bool:
        """Whether the user has let go of everything that leads to a backward."""
        return self.graph is None or self.graph() is None


class Replay(torch.autograd.Function):
    """One node from all trainable parameters to the outputs."""

    @staticmethod
    def forward(
        ctx: Any, session: Any, variant: Any, iteration: Iteration, tensors: Any, anchor: Any, *params: Any
    ) -> Any:
        """Run the forwards."""
        outputs = session.forward(variant, tensors)
        ctx.session, ctx.variant, ctx.iteration = session, variant, iteration
        iteration.graph = weakref.ref(ctx)
        ctx.anchor = anchor
        ctx.n_params = len(params)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the backwards; gradients go where the plan says, autograd gets none."""
        node = torch.autograd.graph.get_gradient_edge(ctx.anchor).node
        if not torch._C._will_engine_execute_node(node):
            raise ProtocolError(
                "torch.autograd.grad was asked for the gradients of parameters; the plan hands them to the optimizer "
                "or to .grad in backward(). Call backward()"
            )
        if torch.is_grad_enabled():
            raise ProtocolError("backward(create_graph=True) cannot be planned: the backward's own graph is not kept")
        ctx.session.backward(ctx.variant, ctx.iteration, grads)
        return (None,) * (5 + ctx.n_params)
