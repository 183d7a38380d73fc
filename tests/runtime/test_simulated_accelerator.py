"""The equipment itself: the simulated accelerator computes the CPU's bits and orders things as streams do."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch

DIM = 64


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(model: torch.nn.Module, ids: torch.Tensor, n_steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(n_steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("max_delay_us", [0, 100])
def test_a_model_trains_to_the_bits_of_the_cpu(sim: ModuleType, max_delay_us: int) -> None:
    on_cpu = llama()
    on_device = copy.deepcopy(on_cpu).to("sim")
    ids = torch.randint(0, 128, (2, 96))
    sim.set_delays(0, max_delay_us)
    assert train(on_device, ids.to("sim")) == train(on_cpu, ids)
    for (name, expected), actual in zip(on_cpu.named_parameters(), on_device.parameters(), strict=True):
        assert actual.device == torch.device("sim:0")
        assert torch.equal(expected, actual.cpu()), name


def test_it_is_the_accelerator(sim: ModuleType) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.get_device_module("sim") is sim
    assert torch.empty(8, pin_memory=True).is_pinned()
    stream = torch.Stream(device="sim")
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() != stream


def test_operands_on_two_devices_are_refused(sim: ModuleType) -> None:
    on_cpu = torch.ones(3, 3)
    on_device = on_cpu.to("sim")
    assert torch.equal((on_device * torch.tensor(2.0)).cpu(), 2 * on_cpu)  # a single number may come from the host
    for refused in (lambda: on_device + on_cpu, lambda: on_device @ on_cpu, lambda: on_cpu.add_(on_device)):
        with pytest.raises(RuntimeError, match="same device"):
            refused()


def test_a_copy_waits_for_the_event_it_is_given(sim: ModuleType) -> None:
    sim.set_delays(1, 20_000)
    host, back = torch.ones(DIM, pin_memory=True), torch.zeros(DIM, pin_memory=True)
    device = torch.zeros(DIM, device="sim")
    bring, send = torch.Stream(device="sim"), torch.Stream(device="sim")
    torch.accelerator.synchronize()
    with bring:
        device.copy_(host, non_blocking=True)
        arrived = bring.record_event()
    with send:
        send.wait_event(arrived)
        back.copy_(device, non_blocking=True)
        done = send.record_event()
    assert not done.query() and not back.any()
    done.synchronize()
    assert back.all()


def test_without_pinned_memory_a_copy_is_waited_for(sim: ModuleType) -> None:
    sim.set_delays(1, 20_000)
    device = torch.zeros(DIM, device="sim")
    device.copy_(torch.ones(DIM), non_blocking=True)
    back = torch.zeros(DIM)
    back.copy_(device, non_blocking=True)
    assert back.all()


def test_the_device_draws_from_its_own_generator(sim: ModuleType) -> None:
    torch.manual_seed(5)
    on_cpu, on_device = torch.randn(DIM), torch.randn(DIM, device="sim")
    assert torch.equal(on_cpu, on_device.cpu())
    with torch.random.fork_rng(device_type="sim"):
        inside = torch.nn.functional.dropout(torch.ones(DIM, device="sim"))
    assert torch.equal(inside, torch.nn.functional.dropout(torch.ones(DIM, device="sim")))
    assert not torch.equal(inside, torch.nn.functional.dropout(torch.ones(DIM, device="sim")))
