"""Custom autograd functions: their own backward runs, or they are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offmate.errors import CaptureError

from ..parity import LEAST, Case, check
from ..replayed import check_replay, traced

Use = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Uses a function between two layers; `use` is handed the net, the hidden values and the batch."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.frozen = nn.Parameter(torch.randn(12, 12), requires_grad=False)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.first(x).sin(), x).cos() * 1.5


class Reversal(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Itself(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
        ctx.limits = low, high
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.clamp(*ctx.limits), None, None


class Scaled(Function):
    """In the form with a context of its own, and a default."""

    @staticmethod
    def forward(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale * 1.5, None


class SineAndCosine(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
        return sine * ctx.saved_tensors[0] + cosine * 2


class Largest(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, places = x.max(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.size = x.shape[-1]
        return values, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        empty = grad.new_zeros(*grad.shape, ctx.size)
        return empty.scatter(-1, ctx.saved_tensors[0][..., None], 3 * grad[..., None])


class PartlyDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        fixed = x * 3
        ctx.mark_non_differentiable(fixed)
        return x * 2, fixed, None, 7

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> torch.Tensor:
        return 5 * grad


class Affine(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = 2 * grad.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


class TutorialReLU(Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        return input.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (input,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[input < 0] = 0
        return grad_input


relu = TutorialReLU.apply


class OwnDropout(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(1 - p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0] * 2, None


class NoGradientOfTheSecond(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return TutorialReLU.apply(x) * others[0] + others[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 0.3 * grad, None


class DifferentiatesAgain(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.sin()
        return 2 * torch.autograd.grad(y, x, grad)[0]


class InFullPrecision(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def product(values: Any) -> torch.Tensor:
    result: torch.Tensor = values[0] * values[1]
    return result


def under_autocast(net: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Reversal.apply(InFullPrecision.apply(net.second(h))).float()


def without_gradients(net: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fixed = StraightThrough.apply(h)
    return h * fixed


USES: dict[str, Use] = {
    "gradient reversal": lambda net, h, x: Reversal.apply(h),
    "argument returned": lambda net, h, x: Itself.apply(h),
    "straight through": lambda net, h, x: StraightThrough.apply(h),
    "clipped gradients": lambda net, h, x: Clipped.apply(h, -0.1, 0.1),
    "setup_context": lambda net, h, x: Scaled.apply(h) + Scaled.apply(h, 3.0),
    "two outputs": lambda net, h, x: product(SineAndCosine.apply(h)),
    "one of two outputs": lambda net, h, x: SineAndCosine.apply(h)[1],
    "indices": lambda net, h, x: product(Largest.apply(h)),
    "outputs without gradients": lambda net, h, x: product(PartlyDifferentiable.apply(h)),
    "parameters handed over": lambda net, h, x: Affine.apply(h, net.second.weight, net.second.bias),
    "a frozen parameter": lambda net, h, x: Affine.apply(h, net.frozen, net.second.bias),
    "a parameter handed over twice": lambda net, h, x: Affine.apply(
        Affine.apply(h, net.second.weight, net.second.bias), net.second.weight, net.second.bias
    ),
    "the tutorial's idiom": lambda net, h, x: relu(net.second(relu(h))),
    "random draws": lambda net, h, x: F.dropout(OwnDropout.apply(F.dropout(h, 0.2), 0.3), 0.1),
    "no gradient": lambda net, h, x: NoGradientOfTheSecond.apply(h, net.second(h)),
    "one tensor twice": lambda net, h, x: NoGradientOfTheSecond.apply(h, h),
    "a function within, tensors in a list": lambda net, h, x: Nested.apply(h, [net.second(h), x]),
    "a gradient in the backward": lambda net, h, x: DifferentiatesAgain.apply(h),
    "autocast": under_autocast,
    "no_grad": without_gradients,
    "written afterwards": lambda net, h, x: StraightThrough.apply(h).mul_(2),
    "of the batch alone": lambda net, h, x: h * StraightThrough.apply(x),
    "asked whether it requires a gradient": lambda net, h, x: h * (2 if StraightThrough.apply(h).requires_grad else 3),
    "reentrant checkpoint": lambda net, h, x: checkpoint(
        lambda y: F.dropout(net.second(y), 0.3).sin(), h, use_reentrant=True
    ),
    "reentrant checkpoint of the batch": lambda net, h, x: h + checkpoint(net.second, x, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use", USES)
def test_their_own_backward_runs(use: str) -> None:
    torch.manual_seed(0)
    check_replay(Net(USES[use]), torch.randn(5, 12))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + relu(OwnDropout.apply(layer(Clipped.apply(x, -0.1, 0.1)), 0.2))
        return F.cross_entropy(self.head(Reversal.apply(x)), torch.arange(8) % 5)


def vectors() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 24, generator=generator)} for _ in range(2)]


def test_a_model_of_functions_trains_within_the_least_budget(cache_dir: str) -> None:
    run = check(Case("functions", Layers, vectors, loss=lambda output, batch: output), LEAST, cache_dir)
    assert run.plan is not None


def test_blocks_with_one_function_are_one_class() -> None:
    keys = [block.key for block in traced(Layers(), vectors()[0]["x"]).blocks]
    assert len(set(keys)) < len(keys)


def test_a_class_knows_the_function_its_arguments_and_its_code() -> None:
    def keys(use: Use) -> list[str]:
        torch.manual_seed(0)
        return [block.key for block in traced(Net(use), torch.ones(5, 12)).blocks]

    def written(body: str) -> Use:
        names: dict[str, Any] = {"Function": Function, "__name__": "written"}
        code = (
            "class Own(Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x): return x * 1\n"
            "    @staticmethod\n"
            f"    def backward(ctx, grad): return {body}\n"
        )
        exec(code, names)
        return lambda net, h, x: names["Own"].apply(h)

    clipped = keys(lambda net, h, x: Clipped.apply(h, -0.1, 0.1))
    assert clipped == keys(lambda net, h, x: Clipped.apply(h, -0.1, 0.1))
    assert clipped != keys(lambda net, h, x: Clipped.apply(h, -0.1, 0.2))
    assert keys(USES["gradient reversal"]) != keys(USES["argument returned"])
    assert keys(written("grad * 2")) != keys(written("grad * 3"))


def test_reentrant_checkpointing_is_said_to_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offmate"):
        traced(Net(USES["reentrant checkpoint"]), torch.randn(5, 12))
    assert "gradient checkpointing of the model is ignored" in caplog.text


# -- what cannot be kept is refused -----------------------------------------------------------------------------------


class Refused(Function):
    """Whatever `does` and `undoes` do."""

    does: Callable[..., Any] = staticmethod(lambda x: x * 2)
    undoes: Callable[..., Any] = staticmethod(lambda grad: grad)

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, *others: Any) -> Any:
        return cls.does(x)

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        return cls.undoes(grads[0])


class MarkedDirty(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def doing(does: Callable[..., Any]) -> Use:
    function = type("Doing", (Refused,), {"does": staticmethod(does)})
    return lambda net, h, x: function.apply(h * 1)


def undoing(undoes: Callable[..., Any]) -> Use:
    function = type("Undoing", (Refused,), {"undoes": staticmethod(undoes)})
    return lambda net, h, x: function.apply(h)


def reading_a_parameter(net: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return doing(lambda y: y * net.second.weight.sum())(net, h, x)


CONSTANT = torch.tensor(3.0)
REFUSED: dict[str, tuple[Use, str]] = {
    "mark_dirty": (lambda net, h, x: MarkedDirty.apply(h * 1), "MarkedDirty changes an argument in place"),
    "argument written": (doing(lambda x: x.add_(1) * 2), "Doing changes an argument in place"),
    "gradient written": (undoing(lambda grad: grad.mul_(2)), "Undoing changes its incoming gradient in place"),
    "a module": (lambda net, h, x: Refused.apply(h, net.second), "Refused is given an object of Linear"),
    "a callable": (lambda net, h, x: Refused.apply(h, torch.sin), "Refused is given an object of builtin"),
    "a parameter read": (reading_a_parameter, "Doing reads a tensor that is not among its arguments"),
    "a constant read": (undoing(lambda grad: grad * CONSTANT), "Undoing reads a tensor that is not among its argum"),
    "data in the forward": (doing(lambda x: x * x.sum().item()), r"Doing does not trace .*\(no .item\(\)"),
    "data in the backward": (undoing(lambda grad: grad if grad.sum() > 0 else -grad), "Undoing does not trace"),
    "numpy": (doing(lambda x: torch.from_numpy(x.detach().numpy() * 2)), "Doing does not trace"),
    "draws in the backward": (undoing(lambda grad: grad * torch.rand_like(grad)), "Undoing draws random numbers"),
    "torch.bernoulli": (doing(lambda x: x * torch.bernoulli(x, 0.5)), "Doing draws with torch.bernoulli"),
    "a list returned": (doing(lambda x: (x * 2, [x])), "Doing returns an object of list"),
    "a gradient in the forward": (
        lambda net, h, x: torch.autograd.grad(Reversal.apply(h).sum(), h, create_graph=True)[0],
        "computes gradients inside its forward",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    use, words = REFUSED[case]
    with pytest.raises(CaptureError, match=words):
        traced(Net(use), torch.rand(5, 12))


def test_reformer_is_refused_for_its_function() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=32,
        attn_layers=["local"], is_decoder=True, axial_pos_embds=False, local_attn_chunk_length=16, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(3, 64, (2, 32))
    with pytest.raises(CaptureError, match="_ReversibleFunction is given an object of ModuleList"):
        traced(transformers.ReformerModelWithLMHead(config).train(), ids)
