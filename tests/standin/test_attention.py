"""Kernels of attention and convolution return the layouts that their fakes promise, by which a trace is replayed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.timeout(120)

CHOSEN_BY_DEFAULT = {86: "flash", 90: "cudnn"}
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_BATCH, _HEADS, _WIDTH = 2, 4, 64


def architecture() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


class Layouts(TorchDispatchMode):
    """Compare what each operator returns with what its fake kernel promises.

    State: `operators`, names of those that ran; `differing`, a sentence for each one that returned other strides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.differing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = func(*args, **(kwargs or {}))
        if "attention" in str(func) or "convolution" in str(func):
            self.operators.append(str(func))
            self._compare(str(func), real, _faked(func, args, kwargs or {}))
        return real

    def _compare(self, name: str, real: Any, fake: Any) -> None:
        pairs = zip(real, fake) if isinstance(real, (tuple, list)) else [(real, fake)]
        for got, promised in pairs:
            # A result that was not asked for is left out.
            if not isinstance(got, torch.Tensor) or not isinstance(promised, torch.Tensor):
                continue
            if (got.shape, steps(got)) != (promised.shape, steps(promised)):
                self.differing.append(
                    f"{name} returned {tuple(got.shape)} with strides {got.stride()}, its fake kernel promised "
                    f"{tuple(promised.shape)} with {promised.stride()}"
                )


def _faked(func: Any, args: Any, kwargs: Any) -> Any:
    from torch._subclasses import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode()
    given = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        return func(*given[0], **given[1])


def steps(tensor: torch.Tensor) -> list[int]:
    """Strides of dimensions whose size is not 1; the others may have any."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]


def heads_first(length: int) -> torch.Tensor:
    return torch.zeros(_BATCH, _HEADS, length, _WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def heads_last(length: int) -> torch.Tensor:
    """As projections of tokens leave them."""
    return heads_first(length).detach().view(_BATCH, length, _HEADS, _WIDTH).requires_grad_().transpose(1, 2)


def watched(work: Callable[[], torch.Tensor]) -> Layouts:
    with Layouts() as layouts:
        work().sum().backward()
    assert layouts.operators, "no kernel of attention or convolution ran, so that this test shows nothing"
    return layouts


def kinds() -> Iterator[Any]:
    for kernel, layout, length in itertools.product(ATTENTION, (heads_first, heads_last), (31, 96, 128)):
        yield pytest.param(kernel, layout, length, id=f"{kernel}-{layout.__name__}-{length}")


@pytest.mark.parametrize("kernel, layout, length", kinds())
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_attention_returns_the_promised_layouts(kernel, layout, length, masked):
    if kernel == "flash" and masked:
        pytest.skip("flash attention takes no mask")
    mask = torch.zeros(_BATCH, 1, length, length, device="cuda", dtype=torch.bfloat16) if masked else None

    def work() -> torch.Tensor:
        query, key, value = (layout(length) for _ in range(3))
        with sdpa_kernel(ATTENTION[kernel]):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=not masked)

    assert not (differing := watched(work).differing), "\n".join(differing)


def test_the_kernel_that_is_chosen_by_default():
    """Each architecture has its own, so that both are tested."""
    layouts = watched(lambda: torch.nn.functional.scaled_dot_product_attention(*(heads_first(96) for _ in range(3))))
    wanted = CHOSEN_BY_DEFAULT[architecture()]
    assert wanted in layouts.operators[0], f"attention ran as {layouts.operators[0]}, not as {wanted}"


FIRST_ATTENTION = """
import torch
from offmate.guards.surroundings import kernel_settings
torch.cuda.init()
before = kernel_settings()
heads = torch.zeros(1, 2, 32, 64, device="cuda", dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
assert kernel_settings() == before, (kernel_settings(), before)
"""


def test_the_first_attention_of_a_process_changes_no_settings_of_kernels():
    """A second batch would be planned again otherwise, since the order in which kernels are tried is one of them."""
    ended = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2}, {"groups": 8}, {"dilation": 2}, {"kernel_size": 1}],
    ids=["usual", "strided", "by_channel", "dilated", "pointwise"],
)
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d], ids=["convolution", "transposed"])
def test_convolutions_return_the_promised_layouts(kind, settings, layout):
    module = kind(8, 8, **{"kernel_size": 3, **settings}).to("cuda", memory_format=layout)
    pixels = torch.zeros(2, 8, 16, 16, device="cuda").to(memory_format=layout).requires_grad_()
    assert not (differing := watched(lambda: module(pixels)).differing), "\n".join(differing)
