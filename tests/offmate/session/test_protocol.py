import copy
import logging
import pickle
import re
import time
from collections.abc import Callable

import pytest
import torch
from offmate.runtime.devices.emulated import EmulatedDevice
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offmate
from offmate import OffmateError, ProtocolError

from ...accelerator.loops import on_sim
from ..loops import (  # fmt: skip
    AMPLE,
    CPU_BUDGET,
    Loop,
    adamw,
    assert_same,
    batch,
    checkpoint,
    compiled,
    plain,
    tensors,
    tiny,
    trained,
)

BUDGETS = ("ample", "middle", "least")


def goes_on(loop, done: int, upto: int = 4) -> None:
    """After `done` whole steps the loop continues as plain PyTorch does."""
    reference = plain(done)
    assert loop.steps(done, upto) == reference.steps(done, upto)
    assert_same(loop, reference)


def refused(match: str):
    return pytest.raises(ProtocolError, match=match)


@pytest.mark.parametrize("budget", BUDGETS)
def test_parity(budget):
    ours, reference = trained(budget), plain()
    assert ours.steps(0, 5) == reference.steps(0, 5)
    assert_same(ours, reference)
    assert ours.model.offmate.peak_bytes == ours.model.offmate.plan.predicted_peak_bytes


@pytest.mark.parametrize("retain", [False, True])
def test_second_backward(retain):
    loop = trained(steps=1)
    loss = loop.forward(1)
    loss.backward(retain_graph=retain)
    with refused(r"second backward.*retain_graph"):
        loss.backward()
    loop.optimizer.step()
    with refused(r"second backward"):
        loss.backward()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_forward_after_backward_without_step():
    loop = trained(steps=1)
    loop.forward(1).backward()
    with refused(r"without optimizer.step\(\).*accumulation"):
        loop.forward(2)
    with torch.no_grad(), refused(r"without optimizer.step"):
        loop.forward(2)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_second_forward_before_backward():
    """The first one is given up; one without gradients leaves it as it is."""
    loop = trained(steps=1)
    loop.forward(1)
    loss, reference = loop.forward(1), plain(1)
    with torch.no_grad():
        assert loop.forward(2).item() == reference.forward(2).item()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


@pytest.mark.parametrize("planned", [True, False])
def test_a_forward_that_nobody_follows_is_given_up(planned):
    loop = trained(steps=1, planned=planned)
    loop.forward(7)
    loop.forward(8)
    goes_on(loop, 1)


def test_step_without_backward():
    loop = trained(steps=1)
    with refused(r"step\(\) without a backward.*forward"):
        loop.optimizer.step()
    loss = loop.forward(1)
    with refused(r"step\(\) without a backward.*backward\(\)"):
        loop.optimizer.step()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_hyperparameters_changed_before_step():
    loop = trained(steps=1)
    loop.forward(1).backward()
    (group,) = loop.optimizer.param_groups
    group["lr"] = 0.5
    with refused(r"lr changed from 0.01 to 0.5 between backward\(\) and optimizer.step\(\)"):
        loop.optimizer.step()
    group["lr"] = 0.01
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_scheduler(budget, as_tensor):
    def run(loop):
        if as_tensor:
            loop.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
        losses = []
        for i in range(4):
            losses.append(loop.step(i))
            scheduler.step()
        return losses

    ours, reference = compiled(budget), plain()
    assert run(ours) == run(reference)
    assert_same(ours, reference)


def test_consumed_gradient():
    loop = trained(steps=1)
    loop.forward(1).backward()
    weight = loop.model.last.weight
    for use in (
        lambda: weight.grad,
        lambda: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(loop.model.parameters(), 1.0),
    ):
        with refused(r"taken.*max_grad_norm="):
            use()
    with refused(r"assigned"):
        weight.grad = torch.ones_like(weight)
    with refused(r"cleared between backward\(\) and optimizer.step\(\)"):
        loop.optimizer.zero_grad()
    with refused(r"cleared between"):
        loop.model.zero_grad()
    loop.optimizer.step()
    with refused(r"taken.*max_grad_norm="):
        _ = weight.grad
    loop.optimizer.zero_grad()
    assert weight.grad is None
    goes_on(loop, 2)


def test_consumed_gradient_where_the_plan_clips():
    model = tiny()
    optimizer, config = adamw(model), offmate.Config(cache_dir=None)
    offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", config=config, max_grad_norm=1.0)
    model(**batch(0))["loss"].backward()
    with refused(r"taken.*remove clip_grad_norm_ .model.offmate.grad_norm is the norm.*without optimizer="):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_gradients_that_plain_pytorch_would_add_up():
    loop = trained(steps=1)
    loop.forward(1).backward()
    loop.optimizer.step()
    loss = loop.forward(2)
    with refused(r"not cleared.*zero_grad\(\)"):
        loss.backward()
    loop.optimizer.zero_grad()
    loss.backward()
    loop.optimizer.step()
    for param in loop.model.parameters():
        param.grad = None
    goes_on(loop, 3)


def test_autograd_grad_and_create_graph():
    loop = trained(steps=1)
    loss = loop.forward(1)
    with refused(r"torch.autograd.grad"):
        torch.autograd.grad(loss, list(loop.model.parameters()))
    with refused(r"create_graph=True"):
        loss.backward(create_graph=True)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_closure_and_new_group():
    loop = compiled(steps=1)
    with refused(r"closure"):
        loop.optimizer.step(lambda: loop.forward(1))
    with refused(r"group was added after offmate.compile"):
        loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(loop.optimizer.param_groups) == 1
    goes_on(loop, 1)


Between = Callable[[Loop], object]


def scaled(loop: Loop, by: float = 0.5) -> None:
    loop.model.load_state_dict({name: value * by for name, value in loop.model.state_dict().items()})


def swapped(loop: Loop) -> None:
    """As weights of an average are evaluated."""
    own = {name: value.clone() for name, value in loop.model.state_dict().items()}
    scaled(loop, 0.0)
    with torch.no_grad():
        loop.forward(9)
    loop.model.load_state_dict(own)


def misloaded(loop: Loop) -> None:
    with pytest.raises(RuntimeError, match="Unexpected key"):
        loop.model.load_state_dict({**loop.model.state_dict(), "unknown": torch.ones(1)})


def replaced(loop: Loop) -> None:
    for param in loop.model.parameters():
        param.data = param.data * 0.5


def vector(loop: Loop) -> None:
    params = list(loop.model.parameters())
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(params) * 0.5, params)


BETWEEN: dict[str, Between] = {
    "loaded": scaled, "swapped": swapped, "misloaded": misloaded, "replaced": replaced, "vector": vector,
    "optimizer": lambda loop: loop.optimizer.load_state_dict(loop.optimizer.state_dict()),
}  # fmt: skip


def gated(micro: int = 1) -> Loop:
    model = tiny()
    optimizer = adamw(model)
    offmate.compile(
        model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, accumulation_steps=micro,
        max_grad_norm=float("inf"), config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    return Loop(model, optimizer)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", BETWEEN)
def test_gradients_behind_a_gate_outlive_what_is_loaded(name, micro):
    """Between micro-batches and before the step, as gradients in `.grad` would."""
    found = []
    for loop in (gated(micro), plain()):
        for step in range(3):
            for m in range(micro):
                loop.forward(step * micro + m).backward()
                BETWEEN[name](loop)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        found.append(tensors(loop))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_a_last_micro_batch_that_is_skipped():
    """Its forward is given up; the update is made of what there is."""
    ours, reference = gated(2), plain()
    for loop in (ours, reference):
        for step in range(2):
            loop.forward(step).backward()
            loop.forward(step + 5)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert_same(ours, reference)


def test_gradient_into_an_unplanned_output():
    loop = trained(steps=1)
    out = loop.model(**batch(1))
    with refused(r"'scores'.*planned without one.*gradients_into=\('scores',\)"):
        out["scores"].sum().backward()
    out["loss"].backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_gradient_into_an_output_that_was_left_out():
    model = tiny()
    config = offmate.Config(cache_dir=None, gradients_into=("scores",))
    offmate.compile(model, AMPLE, device="emulated", config=config)
    with refused(r"'loss', which Config\(gradients_into=\('scores',\)\) leaves out. .*gradients_into=\('loss',\)\)"):
        model(**batch(0))["loss"].backward()


@pytest.mark.parametrize("ask", ["retain_grad", "register_hook"])
def test_the_whole_gradient_of_an_output_inside_the_model(ask):
    """`hidden` is handed out, and the loss is made of it: only a part of its gradient would be seen."""

    class Handing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.first(x)
            scores = self.last(hidden)
            return {"loss": scores.pow(2).mean(), "hidden": hidden}

    torch.manual_seed(0)
    model = Handing()
    optimizer = adamw(model)
    offmate.compile(
        model, 1 << 30, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET,
        config=offmate.Config(cache_dir=None),
    )  # fmt: skip
    out = model(torch.ones(3, 8))
    getattr(out["hidden"], ask)(*([print] if ask == "register_hook" else []))
    with refused(r"'hidden' has retain_grad\(\) or a hook.*copy.deepcopy"):
        out["loss"].backward()
    out = model(torch.ones(3, 8))
    getattr(out["loss"], ask)(*([lambda grad: None] if ask == "register_hook" else []))
    out["loss"].backward()
    optimizer.step()


def test_a_batch_without_rows_is_said_to_have_none():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    offmate.compile(model, 1 << 30, device="emulated", cpu_budget=CPU_BUDGET, config=offmate.Config(cache_dir=None))
    scores = model(torch.zeros(0, 8))
    with refused(r"shape \(0, 4\), so it has no elements.*For such a batch, skip backward"):
        scores.pow(2).sum().backward()
    model(torch.ones(3, 8)).pow(2).sum().backward()


def test_torch_compile_of_a_compiled_model_runs_the_plan():
    ours, reference = compiled(), plain()
    called = torch.compile(ours.model, backend="eager")
    for step in range(3):
        called(**batch(step))["loss"].backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        reference.step(step)
    assert_same(ours, reference)


def test_input_that_requires_a_gradient():
    loop = trained(steps=1)
    given = batch(1)
    with refused(r"input of shape \(8, 16\) requires a gradient.*[Dd]etach"):
        loop.model(given["x"].requires_grad_(), given["y"])
    goes_on(loop, 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 needs optimizer=.*clip_grad_norm_"),
        ({"accumulation_steps": 4}, r"accumulation_steps=4 needs optimizer=.*add up"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm is 0.0; it must be .* above 0"),
        ({"max_grad_norm": float("nan")}, r"max_grad_norm is nan"),
        ({"accumulation_steps": 0}, r"accumulation_steps is 0; .*from 1 to 1,000,000"),
        ({"accumulation_steps": 2.0}, r"accumulation_steps is 2.0; .*whole number"),
    ],
)
def test_gates_that_make_no_sense(settings, match):
    model = tiny()
    with pytest.raises(OffmateError, match=match):
        offmate.compile(model, "1GiB", device="emulated", **settings)
    assert type(model) is type(tiny())


def test_frozen_and_trained_again_after_compile():
    loop, reference = compiled(steps=1), plain(1)
    for trains in (False, True):
        for each in (loop, reference):
            each.model.first.weight.requires_grad_(trains)
        done = 3 - 2 * (not trains)
        assert loop.steps(done, done + 2) == reference.steps(done, done + 2)
    assert_same(loop, reference)


def test_replaced_after_compile():
    loop = compiled(steps=1)
    own = loop.model.first.weight
    loop.model.first.weight = torch.nn.Parameter(own.detach().clone())
    with refused(r"first.weight was replaced"):
        loop.forward(1)
    loop.model.first.weight = own
    loop.model.extra = torch.nn.Linear(2, 2)
    with refused(r"extra.weight requires a gradient .*2 parameters.* not in the planned optimizer"):
        loop.forward(1)
    del loop.model.extra
    loop.model.double()
    with refused(r"float64.*Convert the model first"):
        loop.forward(1)
    loop.model.float()
    goes_on(loop, 1)


def test_memory_of_another_parameter_is_refused_until_it_is_given_back():
    """The device has memory for each, so that an update of one would no longer change the other."""
    loop = compiled(steps=1)
    first, second = loop.model.layers[0].weight, loop.model.layers[1].weight
    own = second.data
    for shared in (first.data, first.data.t(), first.data.flatten()[: own.numel()].view(own.shape)):
        second.data = shared
        for _ in range(2):
            with pytest.raises(offmate.OffmateError, match=r"layers.1.weight shares memory with layers.0.weight"):
                loop.forward(1)
    second.data = own
    first.data, second.data = first.data.clone(), second.data.clone()  # memory of their own counts
    goes_on(loop, 1)


def test_memory_of_another_parameter_is_refused_on_an_accelerator(sim, cache_dir):
    """Parameters are in RAM there, too, whatever their `device` says."""
    with on_sim(None, cache_dir=cache_dir, inputs=batch(0)) as loop:
        reference = plain(1)
        loop.steps(0, 1)
        first, second = loop.model.layers[0].weight, loop.model.layers[1].weight
        own = second.data
        second.data = first.data
        with pytest.raises(offmate.OffmateError, match=r"layers.1.weight shares memory with layers.0.weight"):
            loop.forward(1)
        second.data = own
        assert loop.steps(1, 3) == reference.steps(1, 3)


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("moment", ["start", "forward", "step", "cleared"])
def test_state_dicts_are_current(budget, moment):
    """At every point but between backward and step, where plain PyTorch has not updated yet."""
    loop, reference = trained(budget), plain()
    for i in range(3):
        losses = []
        for each in (loop, reference):
            loss = each.forward(i)
            if moment == "forward":
                losses.append(tensors(each))
            loss.backward()
            each.optimizer.step()
            if moment == "step":
                losses.append(tensors(each))
            each.optimizer.zero_grad()
            if moment == "cleared":
                losses.append(tensors(each))
        if losses:
            assert losses[0].keys() == losses[1].keys()
            assert all(torch.equal(losses[0][k], losses[1][k]) for k in losses[0])
    assert_same(loop, reference)


@pytest.mark.parametrize("budget", BUDGETS)
def test_state_dict_between_backward_and_step(budget, caplog):
    """One warning in every iteration."""
    loop = trained(budget, steps=1)
    with caplog.at_level(logging.WARNING, "offmate"):
        for step in (1, 2):
            loop.forward(step).backward()
            seen = {k: v.clone() for k, v in loop.model.state_dict().items()}
            assert all(torch.equal(param, seen[name]) for name, param in loop.model.named_parameters())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            after = plain(step + 1).model.state_dict()
            assert all(torch.equal(seen[k], after[k]) for k in after)
    said = [record.getMessage() for record in caplog.records if record.name == "offmate"]
    assert len(said) == 2
    assert re.match(
        r"state_dict\(\) between backward\(\) and optimizer.step\(\).*max_grad_norm=float\('inf'\)", said[0]
    )
    goes_on(loop, 3)


def test_updates_run_on_after_the_step(monkeypatch):
    """optimizer.step() returns while the host still updates; whoever reads gets the updates."""
    loop = trained("least", steps=1)
    start = EmulatedDevice.update_on_host

    def slow(self, work, *given):
        return start(self, lambda: (time.sleep(0.02), work())[1], *given)

    monkeypatch.setattr(EmulatedDevice, "update_on_host", slow)
    loop.step(1)
    under_way = [n for n, event in loop.executor._contents.written.items() if not event.done()]
    assert under_way
    own = dict(loop.model.named_parameters())
    expected = plain(2).model.state_dict()
    assert all(torch.equal(own[n], expected[n]) for n in expected)


@pytest.mark.parametrize("budget", BUDGETS)
def test_raw_reads(budget):
    loop, reference = trained(budget), plain()
    for i in range(3):
        loop.step(i)
        reference.step(i)
        ours, theirs = list(loop.model.parameters()), list(reference.model.parameters())
        if i == 0:
            loop.model.offmate.sync()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert [p.norm().item() for p in ours] == [p.norm().item() for p in theirs]
        assert torch.equal(ours[0].detach().flatten()[:3], theirs[0].data.flatten()[:3])


def test_replaying_reads_no_parameter(monkeypatch):
    loop = trained(steps=1)
    monkeypatch.setattr(loop.session, "read", lambda what: pytest.fail(what))
    assert loop.steps(1, 3) == plain(1).steps(1, 3)


# -- loading and editing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
def test_checkpoints_pass_both_ways(budget):
    ours, reference = trained(budget, steps=2), plain(2)
    saved = pickle.loads(pickle.dumps((ours.model.state_dict(), copy.deepcopy(ours.optimizer.state_dict()))))
    there, back = plain(), compiled(budget, steps=1)
    there.model.load_state_dict(saved[0])
    there.optimizer.load_state_dict(saved[1])
    back.model.load_state_dict(there.model.state_dict())
    back.optimizer.load_state_dict(copy.deepcopy(there.optimizer.state_dict()))
    expected = reference.steps(2, 4)
    assert there.steps(2, 4) == expected
    assert back.steps(2, 4) == expected
    assert ours.steps(2, 4) == expected
    assert_same(back, reference)


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_loading_ends_an_iteration(moment):
    loop = trained(steps=1)
    loss = loop.forward(1)
    if moment == "backward":
        loss.backward()
    model, optimizer = copy.deepcopy(checkpoint(2))
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    with refused(r"second backward|discarded"):
        loss.backward()
    with refused(r"without a backward"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def scale(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)


def scale_data(model):
    for p in model.parameters():
        p.data.mul_(0.9)


def scale_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def replace_data(model):
    for p in model.parameters():
        p.data = p.data * 0.9


def one_only(model):
    with torch.no_grad():
        model.layers[3].weight.clamp_(-0.1, 0.1)


def load(model):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("edit", [scale, scale_data, scale_foreach, replace_data, one_only, load])
def test_edits_between_steps_are_honoured(budget, edit):
    edits_are_honoured(trained(budget), edit)


@pytest.mark.parametrize("edit", [scale, replace_data])
def test_edits_without_an_optimizer_are_honoured(edit):
    edits_are_honoured(trained(planned=False), edit)


def edits_are_honoured(ours, edit):
    reference = plain()
    for i in range(3):
        assert ours.step(i) == reference.step(i)
        edit(ours.model)
        edit(reference.model)
    assert_same(ours, reference)
    assert ours.steps(3, 5) == reference.steps(3, 5)


def test_edit_between_forward_and_backward():
    loop = trained(steps=1)
    loss = loop.forward(1)
    scale(loop.model)
    with refused(r"edited between the forward and backward"):
        loss.backward()
    reference = plain(1)
    scale(reference.model)
    assert loop.steps(1, 3) == reference.steps(1, 3)


@pytest.mark.parametrize("budget", BUDGETS)
def test_edit_between_backward_and_step(budget):
    loop = trained(budget, steps=1)
    loop.forward(1).backward()
    scale(loop.model)
    with refused(r"edited between backward\(\) and optimizer.step\(\)"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    reference = plain(2)
    scale(reference.model)
    assert loop.steps(2, 4) == reference.steps(2, 4)
    assert_same(loop, reference)


def test_edit_through_an_older_reference():
    loop = trained(steps=1)
    kept = loop.model.state_dict()
    loop.step(1)
    with torch.no_grad():
        kept["last.weight"].mul_(2)
    with refused(r"last.weight was edited through an older reference.*sync\(\)"):
        loop.forward(2)
    loop.model.load_state_dict(plain(2).model.state_dict())
    goes_on(loop, 2)


def test_copies_are_plain():
    loop, reference = trained(steps=2), plain(2)
    for twin in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        assert type(twin) is type(reference.model) and "offmate" not in twin.__dict__
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), reference.model.parameters(), strict=True))
        assert all(type(p) is torch.nn.Parameter for p in twin.parameters())
    goes_on(loop, 2)


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_parameter_removed_from_the_groups(moment):
    loop = trained(steps=1)
    loss = loop.forward(1)
    if moment == "backward":
        loss.backward()
    params = loop.optimizer.param_groups[0]["params"]
    gone = params.pop(0)
    with refused(r"first.weight \(1 in all\) was removed from optimizer.param_groups.*lr=0"):
        (loss.backward if moment == "forward" else loop.optimizer.step)()
    params.insert(0, gone)
    if moment == "forward":
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    goes_on(loop, 2)


def test_copies_of_the_optimizer_are_plain():
    loop, reference = trained(steps=2), plain(2)
    for twin in (
        copy.deepcopy((loop.model, loop.optimizer)),
        pickle.loads(pickle.dumps((loop.model, loop.optimizer))),
    ):
        assert type(twin[1]) is torch.optim.AdamW
        again = Loop(*twin)
        assert again.steps(2, 4) == plain(2).steps(2, 4)
    assert type(copy.deepcopy(loop.optimizer)) is type(reference.optimizer)
    goes_on(loop, 2)


def test_a_copy_is_compiled_anew():
    """The way to go on after a change that offmate cannot see, as docs/training.md has it."""
    loop, reference = trained(steps=2), plain(2)
    with pytest.raises(OffmateError, match=r"this Tiny is already compiled by offmate.*copy.deepcopy\(model\)"):
        offmate.compile(loop.model, AMPLE, device="emulated")
    model = copy.deepcopy(loop.model)
    optimizer = adamw(model)
    optimizer.load_state_dict(loop.optimizer.state_dict())
    config = offmate.Config(cache_dir=None)
    again = Loop(offmate.compile(model, AMPLE, optimizer=optimizer, device="emulated", config=config), optimizer)
    assert again.steps(2, 4) == reference.steps(2, 4)
    assert_same(again, reference)


def test_step_hooks_run():
    loop = compiled(steps=1)
    seen = []
    loop.optimizer.register_step_pre_hook(lambda *a: seen.append("before"))
    loop.optimizer.register_step_post_hook(lambda *a: seen.append("after"))
    loop.step(1)
    assert seen == ["before", "after"]


def test_hooks_of_all_optimizers_run_once_a_step_with_the_users_optimizer():
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(("all before", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("all after", optimizer))),
    ]
    try:
        loop = compiled(steps=1)
        loop.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(("own before", optimizer)))
        loop.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(("own after", optimizer)))
        loop.step(1)
        loop.model.offmate.sync()
    finally:
        for handle in handles:
            handle.remove()
    words = ["all before", "all after", "all before", "own before", "own after", "all after"]
    assert [word for word, _ in seen] == words
    assert all(optimizer is loop.optimizer for _, optimizer in seen)
    assert_same(loop, plain(2))
