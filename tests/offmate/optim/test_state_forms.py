"""The forms of an optimizer's states are known before its first update."""

from __future__ import annotations

import pytest
import torch

import offmate
from offmate.optim.state_bytes import state_forms, state_parts
from offmate.optim.updater import Updater

MASTERS = offmate.with_master_weights(torch.optim.AdamW)
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "masters": lambda params: MASTERS(params, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_forms_are_those_of_a_real_first_update(kind, dtype, transposed):
    torch.manual_seed(0)
    value = torch.randn(12, 7, dtype=dtype)
    params = [torch.nn.Parameter(value.t() if transposed else value), torch.nn.Parameter(torch.randn(5, dtype=dtype))]
    optimizer = OPTIMIZERS[kind](params)
    updater = Updater(optimizer, {p: str(n) for n, p in enumerate(params)}, "emulated")
    forms = [state_forms(updater, p, updater.groups[str(n)]) for n, p in enumerate(params)]
    states = [{}, {}]
    for number, param in enumerate(params):
        updater(str(number), param.data, torch.ones_like(param), states[number])
    for param, form, state in zip(params, forms, states):
        real = {key: v for key, v in state.items() if isinstance(v, torch.Tensor) and v.dim()}
        assert form.keys() == real.keys()
        for key, like in form.items():
            assert like.device.type == "meta"
            assert (like.shape, like.stride(), like.dtype) == (real[key].shape, real[key].stride(), real[key].dtype)
        assert state_parts(updater, param, updater.groups["0"])[0] == [like.nbytes for like in form.values()]
