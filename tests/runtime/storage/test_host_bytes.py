"""Memory that the system transfers past its page cache."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from offmate.runtime.storage.host_bytes import AlignedBytes, empty_aligned

from .forked import forked

PAGE, HUGE = 1 << 12, 1 << 21
SIZES = [0, 1, PAGE, HUGE - 1, HUGE, 2 * HUGE + PAGE + 3]


@pytest.mark.parametrize("offset", [0, 100, 5 * PAGE + 7])
@pytest.mark.parametrize("n_bytes", SIZES)
def test_tensors_lie_within_a_page_as_asked_and_own_their_memory(n_bytes: int, offset: int) -> None:
    tensors = [empty_aligned(n_bytes, offset).fill_(number) for number in range(3)]
    gc.collect()
    for number, tensor in enumerate(tensors):
        assert tensor.numel() == n_bytes and tensor.is_contiguous()
        assert not n_bytes or (tensor.data_ptr() - offset) % PAGE == 0
        assert bool((tensor == number).all())


@pytest.mark.parametrize("n_bytes", SIZES)
def test_all_of_the_memory_can_be_used(n_bytes: int) -> None:
    memory = AlignedBytes(n_bytes)
    assert memory.address % PAGE == 0 and len(memory.view(0, n_bytes)) == n_bytes
    memory.fill(bytes([7]) * n_bytes)
    assert bytes(memory.view(0, n_bytes)) == bytes([7]) * n_bytes
    with pytest.raises(IndexError, match=f"{n_bytes + 1} bytes from 0 are not within {n_bytes}"):
        memory.view(0, n_bytes + 1)


def advised(first: int, end: int) -> list[tuple[int, int, list[str]]]:
    """Return the stretches of addresses that the system tells apart between two, and its flags for each."""
    found, here = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if "-" in name and not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            here = (max(start, first), min(stop, end))
        elif name == "VmFlags:" and here[0] < here[1]:
            found.append((*here, words))
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_whole_huge_pages_are_asked_for_and_no_more() -> None:
    memory = AlignedBytes(2 * HUGE + 3 * PAGE)
    end = memory.address + 2 * HUGE
    assert memory.address % HUGE == 0
    huge = [(first, stop) for first, stop, flags in advised(memory.address, end + HUGE) if "hg" in flags]
    assert huge[0] == (memory.address, end), "the two that are whole"
    assert all(first >= end + 3 * PAGE for first, _ in huge[1:]), "what else is there is not this memory"


def test_a_forked_process_shares_none_of_it() -> None:
    memory = AlignedBytes(HUGE + PAGE)
    memory.fill(bytes([9]) * memory.n_bytes)

    def all_zero() -> None:
        assert not any(bytes(memory.view(0, memory.n_bytes)))

    assert forked(all_zero) == 0
    assert bytes(memory.view(0, memory.n_bytes)) == bytes([9]) * memory.n_bytes
