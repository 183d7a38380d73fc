"""The equipment itself: the simulated accelerator computes the CPU's bits and orders things as streams do."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


def test_the_two_devices_have_streams_and_memory_of_their_own(sim: ModuleType) -> None:
    first, second = (torch.ones(DIM, device=f"sim:{index}") for index in range(2))
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    with sim.held(torch.accelerator.current_stream("sim:0")):
        assert torch.equal((second + 1).cpu(), torch.full((DIM,), 2.0))
    assert [torch.accelerator.memory_allocated(index) for index in range(2)] == [512, 512]
    sim.set_limit_bytes(1, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(DIM << 20, device="sim:1")
    with torch.Stream(device="sim:1"):
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.equal(second.to("sim:0"), first)


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
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        inside = torch.nn.functional.dropout(torch.ones(DIM, device="sim"))
    assert torch.equal(inside, torch.nn.functional.dropout(torch.ones(DIM, device="sim")))
    assert not torch.equal(inside, torch.nn.functional.dropout(torch.ones(DIM, device="sim")))


def test_a_recomputation_draws_again_what_was_drawn(sim: ModuleType) -> None:
    values = torch.ones(DIM, device="sim", requires_grad=True)
    dropped = checkpoint(torch.nn.Dropout(), values, use_reentrant=False)
    dropped.sum().backward()
    assert torch.equal(dropped, values.grad)


def test_autocast_computes_in_the_lower_precision(sim: ModuleType) -> None:
    matrix = torch.eye(DIM, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        assert torch.softmax(matrix, -1).dtype == torch.float32


def test_kernels_without_a_formula_of_their_own_give_the_bits_of_the_cpu(sim: ModuleType) -> None:
    image, weight, table = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(9, 5)

    def outputs(image: torch.Tensor, weight: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        convolved = torch.conv2d(image, weight, padding=1)
        return [
            convolved,
            torch.nn.functional.batch_norm(image, None, None, training=True),
            torch.nn.functional.layer_norm(table, (5,)),
            torch.nn.functional.scaled_dot_product_attention(image, image, image, is_causal=True),
            table[table[:, 0] > 0],
            torch.stack(torch._foreach_mul(list(convolved.unbind()), 3.0)),
            image.unfold(2, 4, 2),
        ]

    expected = outputs(image, weight, table)
    for max_delay_us in (0, 50):
        sim.set_delays(0, max_delay_us)
        actual = outputs(*(tensor.to("sim") for tensor in (image, weight, table)))
        for a, b in zip(actual, expected, strict=True):
            assert a.stride() == b.stride() and torch.equal(a.cpu(), b)


# -- what goes wrong on a device goes wrong here ----------------------------------------------------------------------


@pytest.fixture
def late(sim: ModuleType) -> ModuleType:
    """Kernels run when their stream comes to them."""
    sim.set_delays(0, 1)
    return sim


def compute_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.mark.parametrize("waits", [False, True])
def test_a_result_that_leaves_before_it_is_computed(late: ModuleType, waits: bool) -> None:
    device, back = torch.ones(DIM, device="sim"), torch.zeros(DIM, pin_memory=True)
    send = torch.Stream(device="sim")
    torch.accelerator.synchronize()
    with late.held(compute_stream()):
        device.mul_(2)
        if waits:
            send.wait_event(compute_stream().record_event())
        with send:
            back.copy_(device, non_blocking=True)
        if not waits:
            send.synchronize()
    torch.accelerator.synchronize()
    assert bool((back == 2).all()) is waits


@pytest.mark.parametrize("waits", [False, True])
def test_an_argument_that_is_overwritten_before_it_is_read(late: ModuleType, waits: bool) -> None:
    weight, host = torch.ones(DIM, device="sim"), torch.zeros(DIM, pin_memory=True)
    bring = torch.Stream(device="sim")
    torch.accelerator.synchronize()
    with late.held(compute_stream()):
        result = weight + 1
        if waits:
            bring.wait_event(compute_stream().record_event())
        with bring:
            weight.copy_(host, non_blocking=True)
        if not waits:
            bring.synchronize()
    torch.accelerator.synchronize()
    assert bool((result == 2).all()) is waits


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_freed_before_its_copy_has_read_it(sim: ModuleType, waits: bool) -> None:
    device, back = torch.ones(DIM, device="sim"), torch.zeros(DIM, pin_memory=True)
    send = torch.Stream(device="sim")
    with sim.held(send):
        with send:
            back.copy_(device, non_blocking=True)
        if waits:
            compute_stream().wait_event(send.record_event())
        del device
        if not waits:
            compute_stream().synchronize()
    torch.accelerator.synchronize()
    assert bool((back == 1).all()) is waits
    assert waits or back.isnan().all()


def test_a_kernel_that_fails_is_reported_by_whoever_waits(late: ModuleType) -> None:
    table, indices = torch.zeros(3, DIM, device="sim"), torch.tensor([7], device="sim")
    with pytest.raises(IndexError):
        torch.index_select(table, 0, indices)
        torch.accelerator.synchronize()


def test_memory_named_by_record_stream_is_not_used_before(sim: ModuleType) -> None:
    device, other = torch.ones(DIM, device="sim"), torch.Stream(device="sim")
    before = device.data_ptr()
    with sim.held(other):
        device.record_stream(other)
        del device
        assert torch.empty(DIM, device="sim").data_ptr() != before
    other.synchronize()
    assert torch.empty(DIM, device="sim").data_ptr() == before


def test_pinned_memory_is_not_used_before_its_copy_has_read_it(sim: ModuleType) -> None:
    device, host = torch.zeros(DIM, device="sim"), torch.ones(DIM, pin_memory=True)
    before = host.data_ptr()
    with sim.held(compute_stream()):
        device.copy_(host, non_blocking=True)
        del host
        other = torch.empty(DIM, pin_memory=True)
        assert other.data_ptr() != before
    torch.accelerator.synchronize()
    assert torch.empty(DIM, pin_memory=True).data_ptr() == before


def test_a_lost_device_refuses_everything(sim: ModuleType) -> None:
    device = torch.ones(DIM, device="sim")
    sim.lose()
    for refused in (lambda: device + 1, device.cpu, torch.accelerator.synchronize, lambda: torch.empty_like(device)):
        with pytest.raises(torch.AcceleratorError, match="lost"):
            refused()


# -- memory -----------------------------------------------------------------------------------------------------------

KIB, MIB = 2**10, 2**20


def reserve(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="sim")


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (513, KIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of a large segment is split off only if it is larger than a MiB
        (12 * MIB + 512, 12 * MIB + 512, 14 * MIB),
    ],
)
def test_sizes_are_rounded_as_on_cuda(
    sim: ModuleType, size_bytes: int, allocated_bytes: int, reserved_bytes: int
) -> None:
    held = reserve(size_bytes)
    assert (sim.memory_allocated(), sim.memory_reserved()) == (allocated_bytes, reserved_bytes), held.shape


def test_the_smallest_block_that_fits_is_used_and_neighbours_merge(sim: ModuleType) -> None:
    blocks = [reserve(size * MIB) for size in (2, 4, 2, 3, 2)]
    addresses = [block.data_ptr() for block in blocks]
    assert sim.memory_reserved() == 20 * MIB
    blocks[1] = blocks[3] = torch.empty(0)
    small = reserve(3 * MIB)
    assert small.data_ptr() == addresses[3]
    del small
    blocks[2] = torch.empty(0)  # joins 4 + 2 + 3
    large = reserve(9 * MIB)
    assert large.data_ptr() == addresses[1]
    assert sim.memory_reserved() == 20 * MIB


def test_segments_lie_at_the_lowest_address_that_is_free(sim: ModuleType) -> None:
    blocks = [reserve(12 * MIB) for _ in range(3)]
    addresses = [block.data_ptr() for block in blocks]
    assert addresses == sorted(addresses)
    blocks[1] = torch.empty(0)
    sim.empty_cache()
    assert reserve(10 * MIB).data_ptr() == addresses[1]


def test_streams_have_memory_of_their_own(sim: ModuleType) -> None:
    held = reserve(KIB)
    with torch.Stream(device="sim"):
        other = reserve(KIB)
    assert sim.memory_reserved() == 4 * MIB, (held.shape, other.shape)


def test_a_limit_gives_cached_memory_back_and_then_refuses(sim: ModuleType) -> None:
    sim.set_limit_bytes(32 * MIB)
    del_me = reserve(24 * MIB)
    del del_me
    assert sim.memory_reserved() == 24 * MIB
    held = reserve(30 * MIB)  # the cached segment makes room
    assert sim.memory_reserved() == 30 * MIB == sim.max_memory_reserved()
    with pytest.raises(torch.OutOfMemoryError, match=r"may reserve 32\.00 MiB"):
        reserve(10 * MIB)
    assert sim.memory_stats()["num_ooms"] == 1
    del held
    sim.empty_cache()
    assert sim.memory_reserved() == 0 == sim.memory_allocated()


def test_the_fraction_is_of_the_whole_card(sim: ModuleType) -> None:
    sim.set_total_bytes(64 * MIB)
    sim.set_per_process_memory_fraction(0.25)
    held = reserve(16 * MIB)
    assert sim.mem_get_info() == (48 * MIB, 64 * MIB), held.shape
    with pytest.raises(torch.OutOfMemoryError):
        reserve(1)


def test_what_others_hold_is_not_free(sim: ModuleType) -> None:
    sim.set_total_bytes(64 * MIB)
    sim.set_others_bytes(50 * MIB)
    assert sim.mem_get_info() == (14 * MIB, 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="others hold 50"):
        reserve(16 * MIB)


def test_matrix_products_keep_a_workspace(sim: ModuleType) -> None:
    sim.set_workspace_bytes(8 * MIB)
    matrix = torch.eye(DIM, device="sim")
    before_bytes = sim.memory_allocated()
    for _ in range(2):
        product = matrix @ matrix
        assert sim.memory_allocated() == before_bytes + 8 * MIB + matrix.nbytes
        del product


def test_host_memory_that_may_not_be_pinned_is_refused(sim: ModuleType) -> None:
    torch.empty(MIB + 1, dtype=torch.uint8, pin_memory=True)
    sim.set_pinned_limit_bytes(0)
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
