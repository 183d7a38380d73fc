"""Settings of CUDA's allocator: those that break plans are refused by name, all are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offmate
from offmate.cli.doctor import _device_words
from offmate.machines import allocator

CARD = torch.device("cuda:0")
USUAL = {
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
}
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card's allocator that runs with some settings, and an environment that has them."""

    def runs_with(
        text: str | None = None, backend: str = "native", variable: str = VARIABLES[0], **settings: Any
    ) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(variable, text)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": USUAL | settings})

    return runs_with


DIVIDED = {str(1 << i): 4 if i in (8, 9) else 0 for i in range(16)}


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("max_split_size_mb:128", {"max_split_size": 128 << 20}, "max_split_size_mb:128"),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": dict.fromkeys(DIVIDED, 4)}, "divisions:4"),
        ("roundup_power2_divisions:[256:4,512:4]", {"roundup_power2_divisions": DIVIDED}, r"divisions:\[256:4,512:4\]"),
        ("garbage_collection_threshold:0.6", {"garbage_collection_threshold": 0.6}, "threshold:0.6"),
        ("expandable_segments:True", {"expandable_segments": True}, "expandable_segments:True"),
        ("large_segment_size_mb:40", {}, "large_segment_size_mb:40"),
        ("backend:cudaMallocAsync", {"backend": "cudaMallocAsync"}, "backend:cudaMallocAsync"),
    ],
)
def test_a_setting_that_breaks_plans_is_refused_by_name(card, text, settings, words):
    card(text, **settings)
    with pytest.raises(
        offmate.DeviceError, match=rf"cuda:0 runs with \S*{words}\. .* without PYTORCH_CUDA_ALLOC_CONF\."
    ):
        allocator.check_allocator(CARD)
    assert text in allocator.allocator_words(CARD)


def test_the_remedy_keeps_the_other_settings(card):
    card("max_split_size_mb:128, pinned_use_background_threads:True", max_split_size=128 << 20)
    with pytest.raises(offmate.DeviceError, match="only PYTORCH_CUDA_ALLOC_CONF=pinned_use_background_threads:True"):
        allocator.check_allocator(CARD)
    assert allocator.allocator_words(CARD) == "max_split_size_mb:128, pinned_use_background_threads:True"


def test_a_setting_made_in_the_program_is_refused(card):
    card(None, expandable_segments=True)
    with pytest.raises(offmate.DeviceError, match=r"expandable_segments:True\. .* Leave out the call that sets this"):
        allocator.check_allocator(CARD)


def test_an_allocator_that_keeps_nothing_is_refused(card):
    card("", variable="PYTORCH_NO_CUDA_MEMORY_CACHING")
    with pytest.raises(offmate.DeviceError, match="without PYTORCH_NO_CUDA_MEMORY_CACHING"):
        allocator.check_allocator(CARD)


def test_what_changes_no_plan_is_accepted_and_reported(card):
    card(None)
    allocator.check_allocator(CARD)
    assert allocator.allocator_words(CARD) == "defaults"
    card("large_segment_size_mb:20,pinned_num_register_threads:4", variable="PYTORCH_ALLOC_CONF")
    allocator.check_allocator(CARD)
    assert allocator.allocator_words(CARD) == "pinned_num_register_threads:4"
    found = {"name": "a card", "allocator": "defaults", "link": "lost"}
    assert _device_words(found) == "a card: allocator: defaults; copies not measured: lost"


def test_other_devices_have_no_such_settings():
    allocator.check_allocator(None)
    allocator.check_allocator(torch.device("cpu"))
    assert allocator.allocator_words(torch.device("cpu")) == ""


def test_compile_looks_at_them(card, monkeypatch):
    card("expandable_segments:True", expandable_segments=True)
    monkeypatch.setattr("offmate.arguments.device_kind", lambda device: "cuda:0")
    with pytest.raises(offmate.DeviceError, match="expandable_segments"):
        offmate.compile(torch.nn.Linear(2, 2), "1GiB", device="cuda")
