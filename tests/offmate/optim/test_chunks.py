"""Float32 copies are updated in chunks, with the bits of a whole update and without a float32 gradient."""

import contextlib
import inspect
import threading

import pytest
import torch

import offmate
from offmate.optim import chunks
from offmate.optim.rows import depends_on_threads, works_by_element
from offmate.optim.updater import Updater

CHUNK = 2**12
SHAPE = (3, CHUNK - 100)
FORMS = [{}, {"foreach": True}, {"fused": True}]
MORE = {
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.RMSprop: {"momentum": 0.9},
    torch.optim.AdamW: {"amsgrad": True},
}
CASES = [
    (kind, form)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and works_by_element(kind)
    for form in FORMS
    if form.keys() <= inspect.signature(kind).parameters.keys()
]


def trained(kind, form, chunk_elements, monkeypatch, steps=3):
    """A bfloat16 parameter and its state after some updates."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(chunks, "_memory", threading.local())
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(SHAPE).bfloat16())
    optimizer = offmate.with_master_weights(kind)([param], lr=0.01, **MORE.get(kind, {}), **form)
    for _ in range(steps):
        param.grad = torch.randn(SHAPE).bfloat16()
        optimizer.step()
    state = optimizer.state[param]
    return {"param": param.detach(), **{key: torch.as_tensor(value) for key, value in state.items()}}


@pytest.mark.parametrize(("kind", "form"), CASES, ids=lambda value: getattr(value, "__name__", None) or "-".join(value))
def test_chunks_have_the_bits_of_the_whole(kind, form, monkeypatch):
    cut = []
    in_chunks = chunks.step_in_chunks
    monkeypatch.setattr(
        "offmate.optim.masters.step_in_chunks", lambda *given, **named: (cut.append(1), in_chunks(*given, **named))
    )
    found = trained(kind, form, CHUNK, monkeypatch)
    assert len(cut) == 3
    whole = trained(kind, form, 10 * CHUNK, monkeypatch)
    assert len(cut) == 3 and found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) and found[key].dtype == whole[key].dtype for key in whole)
    assert found["master"].shape == SHAPE


def test_what_does_not_lie_in_one_piece_is_updated_whole(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 16)
    wide = torch.nn.Parameter(torch.randn(30, 40).bfloat16().T)
    wide.grad = torch.ones_like(wide)
    assert not chunks.may_be_cut(wide, wide.grad, wide.float(), {})
    tall = torch.nn.Parameter(torch.randn(30, 40).bfloat16())
    tall.grad = torch.ones_like(tall)
    assert chunks.may_be_cut(tall, tall.grad, tall.float(), {})
    assert not chunks.may_be_cut(tall, tall.grad, tall.float(), {"exp_avg": torch.zeros(30, 40).T.contiguous().T})
    assert not chunks.may_be_cut(tall, tall.grad, tall.float(), {"row": torch.zeros(30)})


def stepped(state, monkeypatch, chunk_elements, around=contextlib.nullcontext, momentum=0.9):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(chunks, "_memory", threading.local())
    torch.manual_seed(2)
    param = torch.nn.Parameter(torch.randn(1000).bfloat16())
    optimizer = offmate.with_master_weights(torch.optim.SGD)([param], lr=0.1, momentum=momentum)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    with around():
        for _ in range(4):
            param.grad = torch.randn(1000, dtype=torch.bfloat16, device="cpu")
            optimizer.step()
    return param.detach(), optimizer.state[param]


def test_a_state_that_is_there_in_part_is_completed(monkeypatch):
    loaded = {0: {"momentum_buffer": None}}
    (cut, state), (whole, expected) = (stepped(loaded, monkeypatch, elements) for elements in (64, 4096))
    assert torch.equal(cut, whole) and list(state) == list(expected)
    assert torch.equal(state["momentum_buffer"], expected["momentum_buffer"])


@contextlib.contextmanager
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("around", [bfloat16_by_default, lambda: torch.device("meta")], ids=["dtype", "device"])
def test_defaults_of_torch_do_not_matter(monkeypatch, around):
    assert torch.equal(stepped({}, monkeypatch, 64, around)[0], stepped({}, monkeypatch, 64)[0])


def test_a_subclass_may_do_something_else():
    class Centred(offmate.with_master_weights(torch.optim.AdamW)):
        """Reads all of a gradient."""

    assert works_by_element(offmate.with_master_weights(torch.optim.AdamW))
    assert not works_by_element(Centred)
    assert depends_on_threads(Centred, {}, torch.bfloat16)


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("elements", [CHUNK - 1, 3 * CHUNK + 7])
def test_clipping_inside_the_update_has_the_bits_of_clipping_before_it(low, elements, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(chunks, "_memory", threading.local())
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if low else torch.float32
    start, *grads = (torch.randn(elements, generator=generator).to(dtype) for _ in range(3))
    factor, found = torch.tensor(0.37), []
    for inside in (True, False):
        param = torch.nn.Parameter(start.clone())
        kind = offmate.with_master_weights(torch.optim.AdamW)
        updater, state = Updater(kind([param], lr=0.01, fused=True), {param: "weight"}), {}
        for given in grads:
            grad = given.clone()
            if not inside:
                grad.mul_(factor)
            updater("weight", param.data, grad, state, factor if inside else None)
            assert torch.equal(grad, given * factor)  # scaled once, also for who reads it afterwards
        found.append((param.detach(), *(torch.as_tensor(value) for value in state.values())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
