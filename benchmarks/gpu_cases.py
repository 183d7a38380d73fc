"""The training loops of the competitors in `benchmarks.gpu`.

All train the same model from the same weights on the same batches with AdamW; parameters, gradients and the optimizer's
states have one dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import offmate
from offmate.cli import shapes
from offmate.machines import devices

SEED = 0
LEARNING_RATE = 1e-5
WEIGHT_STD = 0.02
WARM_UP_STEPS, STEPS = 2, 5

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model to train: a built-in shape of offmate's, and the batch of every step."""

    shape: str
    samples: int
    tokens: int


MODELS = {
    "7b": Model("llama2-7b", 4, 1024),
    "1b": Model("tinyllama-1.1b", 4, 1024),
    "tiny": Model("tiny-llama", 2, 64),
}


@dataclass(frozen=True)
class Case:
    """One training run.

    Parameters
    ----------
    model, way: names in MODELS and WAYS. dtype: "bf16" or "fp32". device: as `offmate.compile` takes it.
    budget_bytes: most bytes that the allocator may reserve; None for the whole card. seconds: time limit.
    """

    model: str
    dtype: str
    budget_bytes: int | None
    way: str
    device: str
    seconds: float

    @property
    def kind(self) -> str:
        """The device with its index, or "emulated"."""
        return devices.device_kind(self.device)

    @property
    def where(self) -> torch.device:
        """The torch device on which operators run."""
        return devices.accelerator(self.kind) or torch.device("cpu")


@dataclass(frozen=True)
class Training:
    """A model ready to train.

    Parameters
    ----------
    step: runs one iteration and returns its loss. finish: waits for work under way.
    found: returns figures that only this way reports, once it has trained.
    watched: runs one more iteration and returns what it was seen to do.
    """

    step: Callable[[Batch], float]
    finish: Callable[[], object] = lambda: None
    found: Callable[[], dict[str, Any]] = dict
    watched: Callable[[Batch], dict[str, Any]] = lambda batch: {}


@dataclass(frozen=True)
class Way:
    """A competitor.

    Parameters
    ----------
    words: its name in tables. make: builds a training from a model without memory.
    device_copies, host_copies: the least memory that it needs on the device and on the host, in multiples of the
        parameters' bytes.
    needs: the package that it comes from.
    """

    words: str
    make: Callable[[Any, Case], Training]
    device_copies: int
    host_copies: int
    needs: str = "torch"


# -- the competitors --------------------------------------------------------------------------------------------------


def _offmate(model: Any, case: Case) -> Training:
    with_weights(model, torch.device("cpu"), case.where)
    optimizer = _adamw(model)
    budget = "auto" if case.budget_bytes is None else case.budget_bytes
    model = offmate.compile(model, budget, optimizer=optimizer, device=case.device)

    def found() -> dict[str, Any]:
        plan = model.offmate.plan
        return {
            "predicted_step_s": plan.predicted_step_s,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_host_bytes": plan.host_bytes,
            "lower_bound_s": plan.lower_bound_s,
            "plan_s": plan.plan_s,
            "ledger_peak_bytes": model.offmate.peak_bytes,
            # If there is an allocator, the bytes that it reserved replace this figure.
            "peak_device_bytes": model.offmate.peak_bytes,
        }

    step = _stepper(model, optimizer)

    def watched(batch: Batch) -> dict[str, Any]:
        with model.offmate.record():
            step(batch)
        trace = model.offmate.trace
        return {"recorded_step_s": trace.step_s, "launch_s": trace.launch_s, "stall_s": trace.stall_s}

    return Training(step, model.offmate.sync, found, watched)


def _plain(model: Any, case: Case) -> Training:
    with_weights(model, case.where, case.where)
    return Training(_stepper(model, _adamw(model)))


def _checkpointing(model: Any, case: Case) -> Training:
    model.gradient_checkpointing_enable()
    return _plain(model, case)


def _torchao(model: Any, case: Case) -> Training:
    from torchao.optim import CPUOffloadOptimizer

    with_weights(model, case.where, case.where)
    model.gradient_checkpointing_enable()
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LEARNING_RATE
    )
    return Training(_stepper(model, optimizer))


def _fsdp2(model: Any, case: Case) -> Training:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    kind = case.where.type
    backend = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}.get(kind, f"cpu:gloo,{kind}:gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(kind, (1,))
    policy = CPUOffloadPolicy(pin_memory=kind != "cpu")
    with_weights(model, torch.device("cpu"), case.where)
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return Training(_stepper(model, _adamw(model)))


def _zero_offload(model: Any, case: Case) -> Training:
    with_weights(model, torch.device("cpu"), case.where)
    return _deepspeed(model, case, {"stage": 2})


def _zero3_offload(model: Any, case: Case) -> Training:
    import deepspeed

    with_weights(model, torch.device("cpu"), case.where)
    model.model.rotary_emb.to(case.where)  # buffers are not moved with the partitioned parameters
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    # Otherwise the whole model would be on the device at some moment.
    deepspeed.init_distributed()
    deepspeed.zero.Init(module=model, config_dict_or_path=_deepspeed_config(case, zero))
    return _deepspeed(model, case, zero)


def _deepspeed(model: Any, case: Case, zero: dict[str, Any]) -> Training:
    import deepspeed

    model.gradient_checkpointing_enable()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_deepspeed_config(case, zero)
    )[0]

    def step(batch: Batch) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Training(step)


def _deepspeed_config(case: Case, zero: dict[str, Any]) -> dict[str, Any]:
    # States in bf16 for bf16 parameters, as with the others.
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {
        "train_micro_batch_size_per_gpu": MODELS[case.model].samples,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {**zero, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        **({"bf16": bf16} if case.dtype == "bf16" else {}),
    }


WAYS = {
    "offmate": Way("offmate", _offmate, 0, 0),
    "plain": Way("PyTorch", _plain, 4, 0),
    "checkpointing": Way("PyTorch, checkpointing", _checkpointing, 4, 0),
    "fsdp2": Way("FSDP2, CPUOffloadPolicy, checkpointing", _fsdp2, 0, 4),
    "torchao": Way("torchao CPUOffloadOptimizer, checkpointing", _torchao, 1, 4, "torchao"),
    "zero3": Way("DeepSpeed ZeRO-3 offload, checkpointing", _zero3_offload, 0, 4, "deepspeed"),
    "zero2": Way("DeepSpeed ZeRO-Offload, checkpointing", _zero_offload, 1, 4, "deepspeed"),
}


# -- common parts -----------------------------------------------------------------------------------------------------


@functools.cache
def parameter_bytes(model: str, dtype: str) -> int:
    """Return the bytes of the parameters of a model in MODELS."""
    built = shapes.build(MODELS[model].shape, dtype)
    return sum(param.numel() * param.element_size() for param in built.parameters())


def with_weights(model: Any, home: torch.device, maker: torch.device) -> None:
    """Give a Llama without memory its weights, tensor by tensor: drawn on one device, and stored on another.

    Drawing billions of numbers takes minutes on a CPU. The same seed gives every competitor the same weights.
    """
    torch.manual_seed(SEED)
    made: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in made:
                value = torch.empty(param.shape, dtype=param.dtype, device=maker)
                # Vectors are the norms' weights.
                value = value.normal_(std=WEIGHT_STD) if param.dim() > 1 else value.fill_(1)
                made[param] = torch.nn.Parameter(value.to(home))
            setattr(module, name, made[param])
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(home)


def batches(model: Model, vocabulary: int, device: torch.device) -> list[Batch]:
    """Return token ids and labels of shape (samples, tokens) for every step, drawn on the host, then moved."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (model.samples, model.tokens)
    drawn = [torch.randint(vocabulary, shape, generator=generator).to(device) for _ in range(WARM_UP_STEPS + STEPS)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def _adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _stepper(model: Any, optimizer: Any) -> Callable[[Batch], float]:
    def step(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
