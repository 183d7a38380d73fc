"""What operators are timed on in place of gradients: numbers that differ, indices that exist, in any layout."""

from __future__ import annotations

import pytest
import torch

from offmate.profile.operators import _like

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "size, stride", [((64, 8), (8, 1)), ((8, 64), (1, 8)), ((16, 16), (1, 1)), ((), ()), ((0,), (1,))]
)
def test_floating_numbers_differ_and_are_finite(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    made = _like(torch.empty_strided(size, stride, dtype=dtype, device="meta"), CPU)
    assert made.shape == torch.Size(size) and made.stride() == stride and made.dtype == dtype
    assert made.isfinite().all()
    if made.numel() > 1:
        assert len(made.double().unique()) > 8
        assert made.double().abs().max() < 1.0


def test_a_gradient_that_repeats_one_row_is_drawn_too() -> None:
    made = _like(torch.empty_strided((64, 16), (0, 1), device="meta"), CPU)
    assert made.stride() == (0, 1) and torch.equal(made[0], made[63]) and len(made[0].unique()) > 8


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64])
def test_whole_numbers_are_zero_which_every_table_has(dtype: torch.dtype) -> None:
    assert not _like(torch.empty(4, dtype=dtype, device="meta"), CPU).any()


def test_narrow_floating_numbers_of_which_none_can_be_drawn_are_small() -> None:
    made = _like(torch.empty(4, dtype=torch.float8_e5m2, device="meta"), CPU)
    assert 0 < made.float().max() < 0.01
