"""Stock models whose numbers were once others than plain PyTorch's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offmate
from offmate.capture import batch_decisions as decisions
from offmate.programs.programs import ClassGraph

from ..parity import AMPLE_BYTES, HALF, HOST_BYTES, LEAST, Case, check, same_bits
from ..replayed import check_replay, traced

transformers = pytest.importorskip("transformers")


# -- looking at what the model decides from a batch writes nothing --------------------------------------------------


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    model: nn.Module = transformers.ResNetForImageClassification(config)
    return model


def mobilevit() -> nn.Module:
    config = transformers.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[4, 8, 8, 8, 8, 8, 16], num_attention_heads=2,
        num_labels=4,
    )  # fmt: skip
    model: nn.Module = transformers.MobileViTForImageClassification(config)
    return model


def pictures() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(4, 3, 64, 64, generator=generator), "labels": torch.tensor([0, 1, 2, 3])}
        for _ in range(2)
    ]


def test_batches_are_counted_once(cache_dir: str) -> None:
    run = check(Case("resnet", resnet, pictures), HALF, cache_dir)
    counted = [value for name, value in run.state.items() if name.endswith("num_batches_tracked")]
    assert counted and all(value == 5 for value in counted)


def test_decisions_count_no_batch() -> None:
    model = mobilevit().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    decisions.record(model, (), pictures()[0])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Writing(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """Writes into a buffer, and into its batch."""

    config_class = transformers.PretrainedConfig

    def __init__(self) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.mul_(2)


def test_decisions_leave_buffers_and_batch_alone() -> None:
    model, x = Writing(), torch.ones(3)
    # Of transformers' own classes only; this stands for one.
    Writing.__module__ = "transformers.models"
    assert decisions.record(model, (x,), {}) == ()
    assert model.calls == 0
    assert torch.equal(x, torch.ones(3))


# -- layers that keep a state compute by another formula where they have a cache ------------------------------------

HYBRID = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "Jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "Zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16,
        "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "Bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}  # fmt: skip


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (2, 20), generator=generator) for _ in range(3)]
    return [{"input_ids": one, "labels": one} for one in ids]


def trained_and_evaluated(name: str, cache_dir: str | None) -> list[torch.Tensor]:
    """Losses of three steps, an evaluation, parameters and optimizer states; plain without a folder for plans."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**HYBRID | HYBRIDS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if cache_dir is not None:
        settings = offmate.Config(cache_dir=cache_dir)
        model = offmate.compile(
            model, AMPLE_BYTES, optimizer=optimizer, device="emulated", cpu_budget=HOST_BYTES, config=settings
        )
    found = []
    for batch in texts():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    model.eval()
    with torch.no_grad():
        found.append(model(**texts()[0]).logits.clone())
    found += [value.clone() for value in model.state_dict().values()]
    states = optimizer.state_dict()["state"]
    return found + [value.clone() for key in sorted(states) for value in states[key].values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_state_space_models(name: str, cache_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offmate"):
        run = trained_and_evaluated(name, cache_dir)
    same_bits(name, trained_and_evaluated(name, None), run)
    said = [r.getMessage() for r in caplog.records if "use_cache" in r.getMessage()]
    assert said == ["use_cache has no effect: the cache is dropped from the model's outputs"]


# -- what is written in place keeps its strides: kernels round by them ----------------------------------------------


class Recurrent(nn.Module):
    """A GRU computes in place in slices of its gates."""

    def __init__(self, kind: type[nn.Module], size: int) -> None:
        super().__init__()
        self.inner = kind(12, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        return (output[0] if isinstance(output, tuple) else output) * 1.5


@pytest.mark.parametrize("size", [12, 33])
@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTM, nn.RNN])
def test_recurrent_layers_of_any_size(kind: type[nn.Module], size: int) -> None:
    torch.manual_seed(0)
    check_replay(Recurrent(kind, size), torch.randn(5, 12) if kind is nn.GRUCell else torch.randn(4, 5, 12))


class BatchFirst(nn.Module):
    """A GRU turns its result around in place: that writes no value, and the strides change."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.inner(x)[0]).pow(2).mean()
        return loss


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_batch_first(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check_replay(BatchFirst(kind), torch.randn(3, 5, 8))


def test_recurrent_layer_within_a_budget(cache_dir: str) -> None:
    def batches() -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [{"x": torch.randn(5, 12, generator=generator)} for _ in range(2)]

    case = Case("gru-cell", lambda: Recurrent(nn.GRUCell, 33), batches, loss=lambda output, batch: output.sum())
    check(case, LEAST, cache_dir)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.inner(x)[0]).pow(2).mean()
        return loss


def sequences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, 5, 8, generator=generator)} for _ in range(2)]


def test_lstm_within_a_budget(cache_dir: str) -> None:
    check(Case("lstm", Remembering, sequences, loss=lambda output, batch: output), LEAST, cache_dir)


# -- a kernel may leave out a gradient that nobody wants, where its fake kernel makes it ----------------------------


class NormFirst(nn.Module):
    """Normalises what needs no gradient: the batch, or what a frozen layer makes of it."""

    def __init__(self, norm: nn.Module, frozen: bool) -> None:
        super().__init__()
        self.before = nn.Conv2d(4, 4, 1).requires_grad_(False) if frozen else nn.Identity()
        self.norm, self.head = norm, nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.norm(self.before(x)).relu().flatten(1)).pow(2).mean()
        return loss


def images() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(5, 4, 6, 6, generator=generator)} for _ in range(2)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_whose_input_needs_no_gradient(norm: type[nn.Module], frozen: bool, cache_dir: str) -> None:
    name = f"{norm.__name__}-first-{frozen}"
    case = Case(name, lambda: NormFirst(norm(4, affine=True), frozen), images, loss=lambda output, batch: output)
    check(case, LEAST, cache_dir)


# -- grad modes and autocast regions in any order -------------------------------------------------------------------


def bfloat16(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Modes(nn.Module):
    """Two layers, one of which is also used where nothing has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class NoGradInAutocast(Modes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            with torch.no_grad():
                t = self.a(x)
            return (self.b(x) + t).pow(2).mean()


class AutocastInNoGrad(Modes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            with bfloat16():
                t = self.a(x)
                with torch.enable_grad():
                    t = t + self.a(x)
                with bfloat16(False):
                    t = t + self.b(x)
            t = t + self.b(x)
        return (self.b(x) + t).pow(2).mean()


class Nested(Modes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            with torch.no_grad(), bfloat16(False):
                t = self.a(x)
                with torch.enable_grad():
                    t = t + self.a(x)
            t = t + self.b(x)
        return (self.a(x) + t).pow(2).mean()


class GradOffAcrossAutocast(Modes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            torch.set_grad_enabled(False)
            t = self.a(x)
        t = t + self.a(x)
        torch.set_grad_enabled(True)
        return (self.b(x) + t).pow(2).mean()


@pytest.mark.parametrize("model", [NoGradInAutocast, AutocastInNoGrad, Nested, GradOffAcrossAutocast])
def test_grad_modes_and_autocast_regions(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check_replay(model(), torch.randn(3, 4))


# -- a custom function under autocast -------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Runs under its caller's autocast, and so returns bfloat16 there."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            t = Product.apply(x, self.weight)
        loss: torch.Tensor = self.head(t.float()).pow(2).mean()
        return loss


def test_custom_function_under_autocast() -> None:
    torch.manual_seed(0)
    check_replay(UnderAutocast(), torch.randn(3, 4))


# -- operators that return their very argument ----------------------------------------------------------------------


class Twice(nn.Module):
    """A spectrally normalised layer in two blocks: `flatten(1)` of its weight is the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.between = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(torch.relu(self.shared(x)))
        loss: torch.Tensor = self.between(self.shared(hidden)).pow(2).mean()
        return loss


class Itself(nn.Module):
    """Several uses in a block of a weight that every block uses."""

    def __init__(self, same: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.same = nn.Parameter(torch.randn(8, 8) / 3), same
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight = self.same(self.weight)
            x = layer(torch.relu(x @ (weight / weight.pow(2).sum().sqrt())))
        return x.pow(2).mean()


def test_spectral_norm_in_two_blocks() -> None:
    torch.manual_seed(0)
    check_replay(Twice(), torch.randn(3, 8))


SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": lambda w: w.flatten(1), "contiguous": lambda w: w.contiguous(), "positive": lambda w: +w,
    "dropout": lambda w: nn.functional.dropout(w, 0.0), "to": lambda w: w.to(torch.float32),
    "view": lambda w: w.view(8, 8), "none": lambda w: w,
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_gradients_add_up_in_eagers_order(name: str) -> None:
    torch.manual_seed(0)
    check_replay(Itself(SAME[name]), torch.randn(3, 8))


# -- buffers that the forward writes in place ------------------------------------------------------------------------

Write = Callable[["Written", torch.Tensor], object]


def writes_a_view(model: Written, value: torch.Tensor) -> None:
    model.count = model.count + model.mean[2:5].add_(value[2:5]).sum()


def reads_what_it_wrote(model: Written, value: torch.Tensor) -> None:
    model.mean.add_(value)
    model.count.add_(model.mean.sum())


def writes_out(model: Written, value: torch.Tensor) -> None:
    torch.mul(model.mean, 0.9, out=model.mean).add_(value)


WRITES: dict[str, Write] = {
    "add_": lambda m, v: m.mean.add_(v),
    "two": lambda m, v: m.mean.mul_(0.9).add_(v, alpha=0.1),
    "lerp_": lambda m, v: m.mean.lerp_(v, 0.1),
    "copy_": lambda m, v: m.mean.copy_(v),
    "scalar": lambda m, v: m.count.add_(v.sum()),
    "index_add_": lambda m, v: m.mean.index_add_(0, torch.tensor([1]), v[:1]),
    "view": writes_a_view, "read again": reads_what_it_wrote, "out=": writes_out,
}  # fmt: skip


class Written(nn.Module):
    """Goes on with a buffer that it has written, in another block."""

    def __init__(self, write: Write, late: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.write, self.late = write, late
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not self.late:
            self.write(self, hidden.detach().mean(0))
        loss: torch.Tensor = self.last(torch.tanh(hidden - self.mean - self.count)).pow(2).mean()
        if self.late:
            self.write(self, hidden.detach().mean(0))
        return loss


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_buffers_are_written_once_and_in_order(name: str, late: bool) -> None:
    torch.manual_seed(0)
    found = check_replay(Written(WRITES[name], late), torch.randn(3, 8))
    # What reads a buffer that another block writes would read another value if it ran again in the backward.
    for block in found.blocks:
        changing = {n for i in block.joint.changing for n in block.joint.leaves[i]}
        again = ClassGraph(block.joint).recomputable
        assert not any(changing & set(node.all_input_nodes) for node in again)


# -- sparse gradients are refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(8, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(offmate.CaptureError, match=f"^0 is an nn.{kind.__name__} with sparse=True.*sparse=False"):
        traced(model, torch.tensor([[0, 1], [2, 3]]))


# -- batches and results that leave gaps in memory or repeat elements; numbers that are equal and differ -------------


class Applied(nn.Module):
    """Hands its arguments to a function, behind a layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, *args: Any) -> torch.Tensor:
        return self.function(self.layer, *args)


def check_calls(function: Callable[..., torch.Tensor], *calls: tuple[Any, ...], **settings: Any) -> None:
    """Assert that each call trains and evaluates with plain PyTorch's bits and strides, in the memory predicted."""
    config = offmate.Config(cache_dir=None, options_per_block=3)
    torch.manual_seed(0)
    plain, model = Applied(function), Applied(function)
    model.load_state_dict(plain.state_dict())
    offmate.compile(model, 1 << 30, device="emulated", cpu_budget=HOST_BYTES, **{"config": config} | settings)
    for training in (True, False):
        for args in calls:
            with torch.set_grad_enabled(training):
                ours, theirs = model(*args), plain(*args)
            assert ours.stride() == theirs.stride()
            same_bits("output", [theirs.detach()], [ours.detach()])
            if training:
                (ours.sin().sum() + theirs.sin().sum()).backward()
                assert len(calls) > 1 or model.offmate.peak_bytes == model.offmate.plan.predicted_peak_bytes
        same_bits("gradient", [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


ROW, WIDE = torch.linspace(-1, 1, 24).reshape(3, 8), torch.linspace(-1, 1, 48).reshape(3, 16)
LAYOUTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "expanded mask": (lambda a, x, k: a(x).masked_fill(k, 0), (ROW, (ROW[:, :1] > 0).expand(3, 8))),
    "expanded batch": (lambda a, x: a(x).tanh(), (ROW[:1].expand(3, 8),)),
    "expanded twice": (lambda a, x: a(x.exp()) * x, (ROW[:1, :1].expand(3, 8),)),
    "expanded result": (lambda a, x: a(x).expand(2, 3, 8), (ROW,)),
    "returned": (lambda a, x, k: (a(x) * 2) + k, (ROW, ROW[:1].expand(3, 8))),
    "sliced": (lambda a, x: a(x) if x.is_contiguous() else a(x) * 2, (WIDE[:, :8],)),
    "strides": (lambda a, x: a(x * x.stride(0)), (WIDE.view(6, 8)[::2],)),
    "overlapping": (lambda a, x: a(x) + x, (torch.linspace(-1, 1, 10).unfold(0, 8, 1),)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_eagers(name: str) -> None:
    check_calls(LAYOUTS[name][0], LAYOUTS[name][1])


@pytest.mark.parametrize("numbers", [(0.0, -0.0, 0.0), (1, 1.0, True, 1)])
def test_numbers_that_are_equal_and_differ(numbers: tuple[Any, ...]) -> None:
    def scaled(layer: nn.Module, x: torch.Tensor, number: Any) -> torch.Tensor:
        by_type = {int: 1.0, float: 2.0, bool: 3.0}[type(number)]
        scaled: torch.Tensor = layer(x) * (1 / torch.full((), number)).clamp(-2, 3) * by_type
        return scaled

    check_calls(scaled, *((ROW, number) for number in numbers))


def test_a_number_that_is_none_is_planned_once() -> None:
    captures: list[float] = []

    def filled(layer: nn.Module, x: torch.Tensor, number: float) -> torch.Tensor:
        captures.append(number)
        return layer(x) * torch.nan_to_num(torch.full((), number), 2.0)

    model = Applied(filled)
    config = offmate.Config(cache_dir=None, options_per_block=3)
    offmate.compile(model, 1 << 30, device="emulated", cpu_budget=HOST_BYTES, config=config)
    for _ in range(2):
        model(ROW, float("nan")).sum().backward()
        seen = len(captures)
    model(ROW, float("nan"))
    assert len(captures) == seen
