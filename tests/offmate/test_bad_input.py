import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

import offmate
from offmate import CaptureError, Config, DeviceError, InfeasibleBudget, OffmateError, PlanFileError
from offmate.errors import ArgumentTypeError
from offmate.lowering.frozen_files import FrozenFiles

from .loops import AMPLE, CPU_BUDGET, adamw, batch, plain, plan, tiny, trained

NO_CACHE = Config(cache_dir=None)


def planned(model=None, gpu_budget=AMPLE, optimizer=adamw, cpu_budget=CPU_BUDGET, inputs=None, **settings):
    model = model or tiny()
    return offmate.plan(
        model,
        gpu_budget,
        example_inputs=inputs or batch(0),
        optimizer=optimizer(model) if optimizer else None,
        device="emulated",
        cpu_budget=cpu_budget,
        config=NO_CACHE,
        **settings,
    )


def refuses(match, model, error=OffmateError, **settings):
    """Compiling raises, and leaves the model and its optimizer as they were."""
    kind = type(model)
    optimizer = settings.get("optimizer")
    with pytest.raises(error, match=match):
        offmate.compile(model, **{"gpu_budget": AMPLE, "device": "emulated", "config": NO_CACHE, **settings})
    assert type(model) is kind
    if isinstance(optimizer, torch.optim.Optimizer):
        assert not type(optimizer).__name__.startswith("Offmate")


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_files_of_another_machine_on_this_one():
    """What a forecast knows of a checkpoint's files there; no type of the implementation is named."""
    files = FrozenFiles(frozenset({"weight"}), 1e9, 0)
    with pytest.raises(ArgumentTypeError, match=r"only a plan with hardware= takes; .* name folders as text") as caught:
        planned(storage=[files])
    assert "Frozen" not in str(caught.value)
    refuses("only a plan with hardware= takes", model := tiny(), optimizer=adamw(model), storage=[files])


def test_budget_that_cannot_work():
    least = plan("ample").least_budget_bytes
    with pytest.raises(InfeasibleBudget, match=r"too small; the least.*block \d+.*Raise gpu_budget") as caught:
        planned(gpu_budget=least * 3 // 4)
    assert caught.value.least_budget_bytes == least
    assert caught.value.budget_bytes == least * 3 // 4
    assert caught.value.block is not None and caught.value.step is not None


class Words(torch.nn.Module):
    """A loss over many words, which takes more memory than all else."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(2000, 4), torch.nn.Linear(4, 2000)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def test_the_block_of_the_loss_is_named_as_such():
    ids = torch.arange(48).reshape(4, 12)
    with pytest.raises(InfeasibleBudget, match=r"tightest point is the loss \(48 × 2,000 logits\), block") as caught:
        planned(Words(), gpu_budget="200KiB", inputs=(ids,))
    assert caught.value.place in str(caught.value) and caught.value.block in caught.value.place


def test_refused_in_the_loop_nothing_is_lost():
    model = tiny()
    optimizer = adamw(model)
    offmate.compile(model, 10_000, optimizer=optimizer, device="emulated", cpu_budget=CPU_BUDGET, config=NO_CACHE)
    for _ in range(2):
        with pytest.raises(InfeasibleBudget):
            model(**batch(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny().parameters(), strict=True))
    model.state_dict()


def test_budget_smaller_than_what_is_fixed():
    with pytest.raises(InfeasibleBudget, match=r"raise gpu_budget"):
        planned(gpu_budget=4)


def test_host_memory_too_small():
    with pytest.raises(InfeasibleBudget, match=r"20 KiB of RAM is not enough.*needs \S+ [KM]iB.*Raise cpu_budget"):
        planned(optimizer=None, cpu_budget="20KiB")


def test_both_budgets_tight():
    """With little host memory states stay on the device; the message says that more of it would help, and how much."""
    least = plan("ample").least_budget_bytes
    with pytest.raises(InfeasibleBudget, match=r"With more RAM than the 40 KiB of cpu_budget, .* is enough") as caught:
        planned(gpu_budget=least, cpu_budget="40KiB")
    assert caught.value.least_budget_bytes > least


@pytest.mark.parametrize("inputs", [torch.ones(2, 16), [torch.ones(2, 16)], None])
def test_inputs_that_are_no_batch(inputs):
    model = tiny()
    words = rf"example_inputs is a {type(inputs).__name__}; it must be a tuple of positional arguments, such as \(x,\)"
    with pytest.raises(OffmateError, match=words):
        offmate.plan(model, AMPLE, example_inputs=inputs, device="emulated", config=NO_CACHE)
    with pytest.raises(OffmateError, match=words):
        offmate.cast_weights(model, example_inputs=inputs)


def test_a_hardware_file_may_be_a_path(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text((Path(offmate.__file__).parent / "machines" / "rtx3060.json").read_text())
    settings = {"example_inputs": batch(0), "config": NO_CACHE, "cpu_budget": "1GiB"}
    by_path, by_name = (offmate.plan(tiny(), AMPLE, hardware=name, **settings) for name in (path, "rtx3060"))
    assert by_path.predicted_step_s == by_name.predicted_step_s


@pytest.mark.parametrize(
    "size",
    ["12Gb", "lots", "-1GiB", "0", "1.5.2GiB", "12 XB", "", "12", 0, -5, True, 1.5, float("nan"), torch.ones(2), []],
)
@pytest.mark.parametrize("which", ["gpu_budget", "cpu_budget"])
def test_malformed_sizes(size, which):
    refuses(r"12GiB", tiny(), **{which: size})


@pytest.mark.parametrize(
    ("device", "match"),
    [("cuda:7", r"cuda:7.*emulated"), ("tpu", r"'tpu' is not known"), (torch.device("cuda"), "cuda")],
)
def test_devices(device, match):
    refuses(match, tiny(), error=DeviceError, device=device)


# -- models -----------------------------------------------------------------------------------------------------------


class Asks(torch.nn.Module):
    """Decides by what it computes, which no graph can."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, x, y):
        h = self.linear(x)
        return (h if h.sum().item() > 0 else -h).pow(2).mean()


def test_model_that_does_not_export():
    with pytest.raises(CaptureError, match=r"h\.sum\(\)\.item\(\).*reads a Python number"):
        planned(Asks())


def test_a_configuration_of_another_kind():
    refuses("config= is a dict; it must be an offmate.Config", tiny(), config={"outputs": ("loss",)})


def test_budgets_of_a_sweep_are_written_as_elsewhere():
    known = plan("ample")
    (of_text,), (of_bytes,) = (list(offmate.sweep(known, [budget])) for budget in ("64KiB", 64 * 1024))
    assert of_text == of_bytes
    with pytest.raises(ValueError, match="is not a size"):
        list(offmate.sweep(known, ["plenty"]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, ["1GiB"]), "None is a NoneType, not a plan; offmate.plan"),
        ((..., "4MiB"), r"budgets is '4MiB'; it must be a list of sizes"),
        ((..., 3), r"budgets is 3; it must be a list"),
        ((..., ["12"]), "did you mean 12GiB"),
        ((..., ["1GiB"], "long"), "time_limit_s is 'long'; it must be in seconds"),
        ((..., ["1GiB"], float("nan")), "time_limit_s is nan"),
    ],
)
def test_arguments_of_a_sweep(arguments, words):
    known, *rest = arguments
    with pytest.raises(OffmateError, match=words):
        list(offmate.sweep(plan("ample") if known is ... else known, *rest))


def test_arguments_that_are_of_another_kind():
    refuses("3 is a int, not a plan", tiny(), plan=3)
    for settings, words in (
        ({"hardware": 3}, "hardware is 3; it must be a name"),
        ({"batch_size": 10**40}, "at most 16,777,216"),
        ({"batch_size": torch.ones(2)}, "batch_size is tensor"),
    ):
        with pytest.raises(OffmateError, match=words):
            planned(**settings)
    known = plan("ample")
    for use in (offmate.load_plan, known.save, known.save_trace):
        with pytest.raises(OffmateError, match="3 is a int, not the path of a file"):
            use(3)
    with pytest.raises(OffmateError, match="None is a NoneType, not a plan"):
        known.diff(None)
    with pytest.raises(OffmateError, match="plot_sweep is given a int; it takes a list"):
        offmate.plot_sweep(3)


def test_a_plan_that_is_not_known_to_be_fast_says_so():
    known = dataclasses.replace(plan("ample"), lower_bound_s=0.0)
    assert known.bound_words == "it is not known how much faster a plan can be"
    assert "faster than 0" not in known.explain()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OffmateError, match=r"plan\.json cannot be written: .*; choose another place") as caught:
        plan("ample").save(tmp_path / "file" / "plan.json")
    assert isinstance(caught.value.__cause__, OSError)


def test_not_a_module():
    with pytest.raises(OffmateError, match=r"takes a torch.nn.Module, not int"):
        offmate.compile(3)


def test_compiled_already():
    loop = trained()
    with pytest.raises(OffmateError, match=r"already compiled by offmate"):
        offmate.compile(loop.model, AMPLE)
    with pytest.raises(OffmateError, match=r"already compiled by offmate"):
        planned(loop.model, optimizer=None)


def test_torch_compile():
    refuses(r"torch.compile.*_orig_mod", torch.compile(tiny()))


def test_data_parallel():
    refuses(r"wrapped in DataParallel.*model.module", torch.nn.DataParallel(tiny()))


@pytest.mark.parametrize("name", ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"])
def test_other_wrappers(name):
    model = tiny()
    model.__class__ = type(name, (type(model),), {})
    refuses(r"DDP|FSDP", model)


def test_device_map():
    model = tiny()
    model.hf_device_map = {"first": 0, "last": "cpu"}
    refuses(r"spread over \['0', 'cpu'\] by device_map.*without device_map", model)


def test_quantised():
    model = tiny()
    model.quantization_method = "bitsandbytes"
    refuses(r"quantised \(bitsandbytes\).*without quantization", model)


def test_odd_parameters():
    class Int8Params(torch.nn.Parameter):
        pass

    for param, match in (
        (
            torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
            r"first.weight is of torch.complex64.*view_as_complex",
        ),
        (torch.nn.Parameter(torch.eye(2).to_sparse()), r"first.weight has layout torch.sparse_coo.*to_dense"),
        (Int8Params(torch.zeros(2)), r"first.weight is a Int8Params.*plain"),
    ):
        model = tiny()
        model.first.weight = param
        refuses(match, model)


def test_meta_model():
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(OffmateError, match=r"meta device.*hardware=.*rtx3060"):
        planned(model)
    offmate.compile(model, AMPLE, optimizer=adamw(model), device="emulated", config=NO_CACHE)
    with pytest.raises(OffmateError, match=r"16 parameters are on the meta device \(first.weight.*from_pretrained"):
        model(**batch(0))


def test_planning_changes_nothing():
    model = tiny()
    model.last.eval()
    before = [m.training for m in model.modules()], torch.get_rng_state()
    values = [p.clone() for p in model.parameters()]
    planned(model)
    assert [m.training for m in model.modules()] == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(model.parameters(), values, strict=True))


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_foreign_parameters():
    refuses(r"group 0.*shape \(32, 16\).*not a parameter of the model", tiny(), optimizer=adamw(tiny()))


def test_missing_parameters():
    model = tiny()
    some = torch.optim.SGD(model.last.parameters(), lr=0.1)
    refuses(r"14 parameters require a gradient.*\(first.weight.*requires_grad_\(False\)", model, optimizer=some)


def test_an_optimizer_that_has_not_been_made():
    refuses(r"optimizer= is the class SGD; make an instance", tiny(), optimizer=torch.optim.SGD)


def test_no_optimizer():
    refuses(r"optimizer= is of class object", tiny(), optimizer=object())


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plan_files(tmp_path):
    made = plan("middle")
    path = tmp_path / "folder" / "plan.json"
    made.save(path)
    read = offmate.load_plan(path)
    assert read == made and read.schedule == made.schedule
    assert read.predicted_peak_bytes == made.predicted_peak_bytes
    with pytest.raises(PlanFileError, match=r"no such file"):
        offmate.load_plan(tmp_path / "none.json")
    text = path.read_text()
    for damaged, match in (
        (text[:100], r"not a plan file"),
        ("[]", r"not a plan file: it holds a list"),
        (json.dumps({**json.loads(text), "format": 99}), r"plan format 99; this version reads"),
        (json.dumps({k: v for k, v in json.loads(text).items() if k != "schedule"}), r"damaged.*schedule"),
        (text.replace("compute F0", "compute G0"), r"damaged"),
    ):
        path.write_text(damaged)
        with pytest.raises(PlanFileError, match=match):
            offmate.load_plan(path)


def test_plan_of_another_model():
    class Wider(type(tiny())):
        def __init__(self):
            super().__init__(width=40)

    model = Wider()
    offmate.compile(model, plan=plan("middle"), optimizer=adamw(model), device="emulated", config=NO_CACHE)
    with pytest.raises(
        PlanFileError, match=r"does not match this model, batch, optimizer, budget.*\(fingerprint .*plan again"
    ):
        model(**batch(0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_grad_norm": 1.0}, "plan without max_grad_norm= or grad_scaler=, now with"),
        ({"accumulation_steps": 2}, "accumulation_steps=1 in the plan, 2 now"),
        ({"gpu_budget": AMPLE}, "budget .* in the plan, 1 GiB now"),
        ({"optimizer": None}, "plan with optimizer=, now without"),
        (
            {"config": dataclasses.replace(NO_CACHE, updates="host")},
            r"the plan updates parameters on a different side than Config\(updates=\) requires",
        ),
    ],
)
def test_plan_for_other_arguments(given, words):
    model = tiny()
    known = {"optimizer": adamw(model), "config": NO_CACHE, "cpu_budget": CPU_BUDGET}
    offmate.compile(model, plan=plan("middle"), device="emulated", **{**known, **given})
    sentence = rf"max_grad_norm, grad_scaler, accumulation_steps or Config \({words}; fingerprint"
    with pytest.raises(PlanFileError, match=sentence):
        model(**batch(0))


def test_a_plan_for_another_machine_is_not_to_train_with():
    model = tiny()
    optimizer = adamw(model)
    made = planned(model, optimizer=lambda _: optimizer, hardware="rtx3060")
    offmate.compile(model, plan=made, optimizer=optimizer, device="emulated", config=NO_CACHE)
    with pytest.raises(PlanFileError, match=r"plan for another machine \(hardware=\), now for emulated; .*plan again"):
        model(**batch(0))


def test_a_loaded_plan_trains(tmp_path):
    plan("middle").save(tmp_path / "plan.json")
    model = tiny()
    optimizer = adamw(model)
    offmate.compile(
        model,
        plan=offmate.load_plan(tmp_path / "plan.json"),
        optimizer=optimizer,
        device="emulated",
        cpu_budget=CPU_BUDGET,
        config=NO_CACHE,
    )
    model(**batch(0))["loss"].backward()
    optimizer.step()
    expected = plain(1).model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_deterministic():
    first, second = planned(gpu_budget=plan("middle").budget_bytes), planned(gpu_budget=plan("middle").budget_bytes)
    assert first.schedule == second.schedule == plan("middle").schedule


def test_default_device_is_said(caplog):
    with caplog.at_level(logging.INFO, "offmate"):
        offmate.compile(tiny(), AMPLE, config=NO_CACHE)
    assert caplog.text.count("device: emulated") == 1
