"""Each rule of capture has a test that fails if the rule is broken, and constructs that are refused are named."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.capture import as_in_eager
from offmate.capture import batch_decisions as decisions
from offmate.capture import model as traced_phase
from offmate.capture.captured import Captured
from offmate.capture.chain import partition
from offmate.capture.effects import is_random
from offmate.capture.export import capture
from offmate.capture.model import Traced, trace_model
from offmate.config import Config
from offmate.errors import CaptureError
from offmate.lowering.options import class_options
from offmate.programs.programs import ClassGraph, NodeCost

from ..parity import AMPLE, AMPLE_BYTES, HOST_BYTES, Case, adamw, check
from ..training.test_parity_language import TINY, language_model, text_batches
from ..training.test_parity_models import Decoder, convolutions, pictures, token_batches, vector_batches, vector_case

transformers = pytest.importorskip("transformers")


def traced(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Traced:
    return trace_model(model.train(), args, kwargs or {}, Config(cache_dir=None), True, lambda phase, share: None)


def targets(captured: Captured) -> list[str]:
    return [str(n.target) for n in captured.graph.nodes if n.op == "call_function"]


def llama(layers: int = 2, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = TINY | {"num_hidden_layers": layers, "use_cache": False} | more
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).train()


# -- rule 1: what eager decides from data, capture decides alike ----------------------------------------------------


def attention_masks(captured: Captured) -> set[str]:
    attends = [n for n in captured.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert attends
    return {"mask" if (len(n.args) > 3 and n.args[3] is not None) or n.kwargs.get("attn_mask") is not None else "causal"
            for n in attends}  # fmt: skip


def test_decisions_are_held_whatever_the_version_of_transformers_has(monkeypatch: pytest.MonkeyPatch) -> None:
    early = SimpleNamespace(_ignore_causal_mask_sdpa=lambda *given: False)
    monkeypatch.setattr(decisions, "masking", lambda: early)
    with decisions.hold((decisions.Decision("_ignore_causal_mask_sdpa", True, None),)):
        assert early._ignore_causal_mask_sdpa()
    assert not early._ignore_causal_mask_sdpa()


@pytest.mark.parametrize(("mask", "expected"), [("no_mask", "causal"), ("ones", "causal"), ("padding", "mask")])
def test_mask_is_built_where_eager_builds_it(mask: str, expected: str) -> None:
    assert attention_masks(capture(llama(), (), text_batches(mask)[0])) == {expected}


def test_all_ones_mask_that_equals_another_tensor_is_told_apart() -> None:
    """Labels of ones look like the mask; only the mask decides."""
    batch = text_batches("ones")[0]
    batch["labels"] = torch.ones_like(batch["labels"])
    captured = capture(llama(), (), batch)
    changed = {name: torch.zeros_like(batch[name]) for name in ("attention_mask", "labels")}
    for name, outcome in (("attention_mask", False), ("labels", True)):
        others = decisions.ask_again(captured.taken, list({**batch, name: changed[name]}.values()))
        assert set(others) == {outcome}
    assert attention_masks(captured) == {"causal"}


def test_another_outcome_gets_a_second_plan(cache_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ones, padding = text_batches("ones"), text_batches("padding")
    case = Case("llama-alternating", lambda: language_model("llama"), lambda: [ones[0], padding[0], ones[1]])
    captures: list[bool] = []
    original = traced_phase.capture

    def counting(*args: Any, **kwargs: Any) -> Captured:
        found = original(*args, **kwargs)
        captures.append(all(d.outcome for d in found.taken if d.decider == "_ignore_causal_mask_sdpa"))
        return found

    monkeypatch.setattr(traced_phase, "capture", counting)
    check(case, AMPLE, cache_dir)
    assert captures == [True, False]


# -- rule 2: the backward is what eager runs ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "backward"), [(nn.SiLU, "silu_backward"), (nn.GELU, "gelu_backward")])
def test_backward_is_one_operator_as_in_eager(kind: type[nn.Module], backward: str) -> None:
    model = nn.Sequential(nn.Linear(24, 32), kind(), nn.Linear(32, 5))
    found = traced(model, (vector_batches()[0]["x"],))
    names = [str(n.target) for b in found.blocks for n in b.joint.backward]
    assert any(backward in name for name in names)
    assert not any("sigmoid" in name or "erf" in name or "tanh" in name for name in names)


# -- rule 3: one leaf per use ---------------------------------------------------------------------------------------


class Reused(nn.Module):
    """A value and a weight that later blocks use twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(24, 33), nn.Linear(33, 33)
        self.between = nn.Sequential(*(nn.Linear(33, 33) for _ in range(12)))
        self.last = nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.first(x))
        hidden = torch.tanh(self.shared(memory))
        for layer in self.between:
            hidden = torch.tanh(layer(hidden)) * memory + torch.sin(memory) * self.shared(hidden) + self.shared(memory)
        return self.last(hidden)


def test_a_value_used_twice_has_a_leaf_per_use() -> None:
    found = traced(Reused(), (vector_batches()[0]["x"],))
    leaves = [e.leaves for b in found.blocks for e in b.spec.externals if e.differentiable and e.accumulates]
    assert max(leaves, default=0) >= 2


@pytest.mark.parametrize("budget", [AMPLE, "least"])
def test_gradients_are_added_in_reverse_program_order(budget: str, cache_dir: str) -> None:
    check(vector_case("reused", Reused), budget, cache_dir)


# -- rule 4: grad mode is part of the graph -------------------------------------------------------------------------


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            scale = hidden.abs().mean()
        return self.second(hidden / scale)


def test_no_grad_region_is_detached() -> None:
    captured = capture(Stopped(), (vector_batches()[0]["x"],), {})
    mean = next(n for n in captured.graph.nodes if "mean" in str(n.target))
    assert not mean.meta["region"].grad
    chain = partition(captured, frozenset(captured.params))
    assert not any(chain.facts[mean].requires_grad)
    assert not any("wrap_with" in name for name in targets(captured))


class InPlace(nn.Module):
    """Writes in place and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden.mul_(0.5)
        hidden.relu_()
        out = torch.zeros_like(hidden)
        out[:, :16] = hidden[:, 16:] * 2
        out[:, 16:].add_(hidden[:, :16])
        return self.second(out)


def test_in_place_operators_become_functional() -> None:
    found = traced(InPlace(), (vector_batches()[0]["x"],))
    for block in found.blocks:
        for node in block.joint.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable, node


@pytest.mark.parametrize("budget", [AMPLE, "least"])
@pytest.mark.parametrize("build", [InPlace, Stopped])
def test_writes_and_regions_train_alike(build: type[nn.Module], budget: str, cache_dir: str) -> None:
    check(vector_case(build.__name__, build), budget, cache_dir)


def test_casts_of_autocast_are_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = traced(model, (vector_batches()[0]["x"],))
    nodes = [n for b in found.blocks for n in b.joint.forward]
    products = [n for n in nodes if str(n.target).startswith(("aten.addmm", "aten.mm"))]
    assert products
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in products)


# -- cut points and classes -----------------------------------------------------------------------------------------


def test_two_blocks_per_layer_and_one_class_of_each() -> None:
    small, large = (traced(llama(layers), kwargs=text_batches()[0]) for layers in (3, 6))
    assert len(large.blocks) - len(small.blocks) == 2 * 3
    assert len({b.key for b in large.blocks}) == len({b.key for b in small.blocks})


def test_hidden_states_do_not_change_the_cuts() -> None:
    batch = text_batches()[0]
    plain = traced(llama(4), kwargs=batch)
    shown = traced(llama(4), kwargs={**batch, "output_hidden_states": True})
    assert len(shown.blocks) == len(plain.blocks)


def test_written_buffers_are_written_by_one_block_each() -> None:
    found = traced(convolutions(), (pictures()[0]["x"],))
    written = [b.spec.externals[i].node.name for b in found.blocks for i in b.joint.writes]
    assert sorted(written) == sorted(found.captured.buffers)


@torch.library.custom_op("offmate_tests::counted", mutates_args=())
def counted(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Writes without saying so, as cuDNN's batch normalisation does."""
    seen.add_(1)
    return x.clone()


@counted.register_fake
def _(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Counting(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return (hidden + counted(hidden.detach(), self.seen)).sum()


def test_a_kernel_that_writes_without_saying_so_is_seen_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_in_eager, "_silent_writes", lambda target, args: (1,) if "counted" in str(target) else ())
    model = Counting()
    found = traced(model, (torch.randn(4, 8),))
    assert [b.spec.externals[i].node.name for b in found.blocks for i in b.joint.writes] == ["b_seen"]
    optimizer = adamw(model)
    offmate.compile(model, AMPLE_BYTES, optimizer=optimizer, device="emulated", config=offmate.Config(cache_dir=None))
    for _ in range(3):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.state_dict()["seen"].tolist() == [3.0, 3.0, 3.0]


def test_nothing_that_writes_or_draws_is_recomputed() -> None:
    for found in (
        traced(convolutions(), (pictures()[0]["x"],)),
        traced(Decoder(dropout=0.2), kwargs=token_batches()[0]),
    ):
        for block in found.blocks:
            graph = ClassGraph(block.joint)
            names = {str(n.target) for n in graph.recomputable}
            assert not any("dropout" in n or "bernoulli" in n or "batch_norm" in n for n in names)


def test_a_backward_of_fused_attention_draws_nothing() -> None:
    """It is given the seed from which its forward drew, and belongs to the block's backward."""
    heads = torch.empty(1, 1, 8, 8, device="meta")
    graph = torch.fx.Graph()
    bias_grads = [True, True, True, False]
    draws = graph.call_function(
        torch.ops.aten._scaled_dot_product_efficient_attention.default, (heads, heads, heads, None, True, 0.1)
    )
    draws_again = graph.call_function(
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
        (heads, heads, heads, heads, None, heads, heads, heads, heads, 0.1, bias_grads),
    )
    assert is_random(draws)
    assert not is_random(draws_again)


class Normed(nn.Module):
    """Keeps one number for its backward beside large values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(x @ self.weight, 0.5)
        return (hidden / hidden.norm()).tanh().sum()


def test_numbers_never_leave_the_device() -> None:
    leave = []
    for block in traced(Normed(), (torch.randn(64, 64),)).blocks:
        costs = {node.name: NodeCost(seconds=1.0) for node in block.joint.graph.nodes}
        found = class_options(block.joint, costs, 1e9, 16, False)
        leave += [found.graph.bytes[storage] for option in found.options for storage in option.offloaded]
    assert leave
    assert min(leave) >= 64 * 64


def test_a_tied_weight_is_one_parameter() -> None:
    captured = capture(Decoder(tied=True), (), token_batches()[0])
    assert "head.weight" not in captured.params.values()
    assert sum(name == "embed.weight" for name in captured.params.values()) == 1
    node = next(n for n in captured.graph.nodes if captured.params.get(n.name) == "embed.weight")
    assert len(node.users) == 2


# -- what is dropped, warned of and refused -------------------------------------------------------------------------


def compiled(model: nn.Module, cache_dir: str) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    offmate.compile(
        model, AMPLE_BYTES, optimizer=optimizer, device="emulated", cpu_budget=HOST_BYTES,
        config=offmate.Config(cache_dir=cache_dir),
    )  # fmt: skip
    return optimizer


def test_cache_and_checkpointing_are_dropped_with_one_line_each(
    cache_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(use_cache=True)
    model.gradient_checkpointing_enable()
    optimizer = compiled(model, cache_dir)
    with caplog.at_level(logging.INFO, "offmate"):
        for batch in text_batches():
            output = model(**batch)
            assert output.past_key_values is None
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("use_cache" in line for line in lines) == 1
    assert sum("gradient checkpointing" in line for line in lines) == 1
    assert model.is_gradient_checkpointing


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(self.linear(x))


def test_custom_autograd_function_is_one_node_of_the_captured_graph() -> None:
    captured = capture(Custom(), (vector_batches()[0]["x"],), {})
    assert targets(captured)[:2] == ["aten.linear.default", "offmate.function.default"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if y.sum() > 0 else -y


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))


class ThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.linear(x).detach().numpy())


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return self.linear(x)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Branching, "reads a Python number"),
        (ThroughNumpy, "does not export"),
        (Conditional, "higher-order operator cond"),
        (WritesParameter, "linear.weight"),
    ],
)
def test_refused_constructs_are_named(build: type[nn.Module], names: str) -> None:
    with pytest.raises(CaptureError, match=names):
        traced(build(), (vector_batches()[0]["x"],))
