"""The log of what is allocated on the host counts its own memory, and no other."""

import torch

from offmate.machines.allocations import AllocationLog


def test_the_peak_is_what_is_held_at_once() -> None:
    with AllocationLog() as log:
        first = torch.empty(1000)
        del first
        second, third = torch.empty(600), torch.empty(700)
    del second, third
    assert log.peak_bytes() == 4 * 1300


def test_memory_of_an_earlier_log_hides_nothing_when_it_goes() -> None:
    with AllocationLog() as earlier:
        old = [torch.empty(1000)]
    with AllocationLog() as log:
        first = torch.empty(500)
        old.clear()
        second = torch.empty(800)
        log.stretch("backward", lambda: None)
        log.stretch("work", lambda: torch.empty(200))
    del first, second
    assert earlier.peak_bytes() == 4 * 1000
    assert log.peak_bytes() == 4 * 1500
    assert log.peak_bytes(until="backward") == 4 * 1300
    assert log.rise_bytes("work") == 4 * 200


def test_memory_at_the_address_of_freed_memory_counts() -> None:
    with AllocationLog():
        old = [torch.empty(1 << 20)]
    with AllocationLog() as log:
        old.clear()
        new = torch.empty(1 << 20)  # malloc most likely gives it the same address
        del new
        other = torch.empty(1 << 10)
    del other
    assert log.peak_bytes() == 4 << 20
