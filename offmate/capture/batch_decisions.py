"""Rule 1 of capture: decisions that eager mode takes from data are the same in capture.

transformers looks at the batch ("is nothing padded?", "is this a packed sequence?") and picks other kernels for it.
Under tracing it cannot look. So those decisions are recorded on the real batch, fixed while the model is exported, and
taken again for every batch: another outcome needs another capture.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CaptureError
from ..runtime.torch_names import trees as pytree
from ..runtime.torch_names.tracing import FakeTensor, FakeTensorMode
from ..transformers_names import DECIDERS, PACKED, deciders_replaced, experts_as_in_export, masking, masks_as_in_eager
from .data_dependent import named
from .foreseen import Foreseen
from .known import VALUES, Lists, Sources, fixed_leaves, values_of
from .recipes import Recipe, Recipes


@dataclass(frozen=True)
class Decision:
    """A decision that eager mode took from data.

    Parameters
    ----------
    decider: name of the function that decided; `VALUES` for Python code that takes numbers out of a tensor.
    outcome: True if it found nothing special (no mask is needed, nothing is packed); the numbers in the tensor.
    source: how the tensor that it looked at is computed from the batch, None if it is not; for `VALUES` the index of
        the tensor, in flattening order.
    args: its other arguments, kept to call it again.
    """

    decider: str
    outcome: Any
    source: Recipe | int | None
    args: tuple[Any, ...] = ()


def record(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fixes_values: bool = False
) -> tuple[Decision, ...]:
    """Run the model once with fake parameters and the real batch, and note what it decides from the batch.

    Everything that depends on a parameter is fake and costs nothing; everything that depends on the batch alone is
    computed as in eager mode.

    Parameters
    ----------
    fixes_values: whether the values of tensors out of which the forward takes numbers or sizes are decisions, too.

    Returns: the decisions in the order in which they were taken; without `fixes_values` empty where transformers is
    absent.
    """
    values = _fixed_values(model, args, kwargs) if fixes_values else ()
    module = masking()
    if module is None or not _may_decide(model):
        return values
    with contextlib.ExitStack() as stack:
        if fixes_values:
            stack.enter_context(Lists(Sources([])))
            stack.enter_context(Foreseen(checks=False))
        return values + _recorded(module, model, args, kwargs)


def _fixed_values(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Decision, ...]:
    fixed = fixed_leaves(_run_on_fakes, model, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return tuple(Decision(VALUES, values_of(leaves[i]), tensors.index(i)) for i in fixed)


def _recorded(
    module: Any, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Decision, ...]:
    decisions: list[Decision] = []
    args, kwargs = pytree.tree_map(_own, (args, kwargs))
    recipes = Recipes([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])

    def listen(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*call_args: Any, **call_kwargs: Any) -> Any:
            bound = inspect.signature(original).bind(*call_args, **call_kwargs)
            bound.apply_defaults()
            looked_at, *rest = bound.arguments.values()
            if isinstance(looked_at, FakeTensor):
                raise CaptureError(
                    "an attention mask depends on parameters, so the model can decide what to skip only while the "
                    "batch runs; pass the mask as an input, or use attn_implementation='eager'"
                )
            source = None if looked_at is None else recipes.recipe(looked_at)
            result = original(*call_args, **call_kwargs)
            decisions.append(Decision(name, _outcome(name, result), source, tuple(rest) if source else ()))
            return result

        return wrapper

    with deciders_replaced(module, listen), recipes:
        _run_on_fakes(model, args, kwargs)
    return tuple(decisions)


def _run_on_fakes(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Run the model on fake parameters, and on real buffers and the real batch."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    state: dict[str, torch.Tensor] = {
        name: tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor)
        for name, tensor in model.named_parameters()
    }
    # Clones, since a forward may write into buffers and into its batch.
    state |= {name: _own(tensor) for name, tensor in model.named_buffers()}
    args, kwargs = pytree.tree_map(_own, (args, kwargs))
    with contextlib.ExitStack() as stack:
        stack.enter_context(experts_as_in_export())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(named())
        torch.func.functional_call(model, state, args, kwargs, tie_weights=True)


def _own(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _outcome(decider: str, result: Any) -> bool:
    return result is None if decider == PACKED else bool(result)


def _may_decide(model: torch.nn.Module) -> bool:
    return any(type(m).__module__.startswith("transformers.") for m in model.modules())


def ask_again(decisions: tuple[Decision, ...], batch: list[torch.Tensor]) -> tuple[Any, ...]:
    """Take the decisions again for another batch of the same shapes.

    Parameters
    ----------
    batch: the batch's tensors, in flattening order.

    Returns: one outcome per decision.
    """
    module = masking()
    outcomes: list[Any] = []
    for decision in decisions:
        if decision.source is None:
            outcomes.append(decision.outcome)
            continue
        if not isinstance(decision.source, Recipe):
            outcomes.append(values_of(batch[decision.source]))
            continue
        result = getattr(module, decision.decider)(decision.source.made_of(batch), *decision.args)
        outcomes.append(_outcome(decision.decider, result))
    return tuple(outcomes)


@contextlib.contextmanager
def hold(decisions: tuple[Decision, ...]) -> Iterator[None]:
    """Let the deciders give during export the answers that they gave on the real batch, in the same order."""
    module = masking()
    if module is None or all(decision.decider == VALUES for decision in decisions):
        yield
        return
    queues = {name: iter([d for d in decisions if d.decider == name]) for name in DECIDERS}

    def answer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            decision = next(queues[name], None)
            if decision is None:
                raise CaptureError(f"the model called {name} more often during export than on the real batch")
            if name != PACKED:
                return decision.outcome
            return None if decision.outcome else original(*args, **kwargs)

        return wrapper

    with deciders_replaced(module, answer), masks_as_in_eager(module):
        yield
