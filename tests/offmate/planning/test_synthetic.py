"""The synthetic problems of the published tables beside problems captured from models of the same shape."""

from __future__ import annotations

import pytest
import torch
from offmate.solver.instances.synthetic import Shape, Speeds, llama
from offmate.solver.problem import Problem, Rates
from offmate.solver.solve import least_budget

import offmate
from offmate.machines.hardware import load

transformers = pytest.importorskip("transformers")

SHAPE = Shape(layers=3, hidden=512, intermediate=1376, vocab=4000, batch=4, sequence=128)
MACHINE = "rtx3060"


def captured() -> Problem:
    config = transformers.LlamaConfig(
        num_hidden_layers=SHAPE.layers,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        vocab_size=SHAPE.vocab,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.ones(SHAPE.batch, SHAPE.sequence, dtype=torch.long)
    plan = offmate.plan(
        model,
        "4GB",
        example_inputs={"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW(model.parameters()),
        hardware=MACHINE,
        config=offmate.Config(cache_dir=None),
    )
    assert plan.problem is not None
    return plan.problem


def test_a_synthetic_problem_is_needs_what_a_captured_one_needs_and_no_less() -> None:
    machine, real = load(MACHINE), captured()
    speeds = Speeds(
        machine.flops_per_s("float32"),
        machine.memory_bytes_per_s,
        machine.cpu_update_bytes_per_s,
        machine.device_update_bytes_per_s,
        Rates(machine.in_bytes_per_s, machine.out_bytes_per_s, machine.both_bytes_per_s),
    )
    synthetic = llama(SHAPE, speeds, real.device_budget_bytes, real.host_budget_bytes)
    ratio = least_budget(synthetic).bytes / least_budget(real).bytes
    assert 1.0 <= ratio <= 1.3, ratio
