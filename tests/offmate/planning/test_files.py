"""Plans that read frozen parameters from files: on another machine by its drive's rate, here by what is mapped."""

import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import offmate
from offmate import cli
from offmate.planning import files
from offmate.plans.plan import load_plan

from ..session.test_checkpoint_files import (
    CPU_BUDGET,
    GPU_BUDGET,
    batch,
    checkpoint,  # noqa: F401
    mapped,
    small_requests,  # noqa: F401
    train,
)

TIGHT = ("--lora", "4", "--batch", "1", "--seq-len", "64", "--gpu-budget", "40MiB", "--ram", "88MiB")
"""For 98 MiB of parameters: GPU and RAM together have room for all of them, but not for what else is there."""


@pytest.fixture(autouse=True)
def quiet_logs():
    logging.getLogger("offmate").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model with wide layers, and few of them."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=500, n_embd=1024, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    return folder


def run(monkeypatch, cache, *argv: object) -> int:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "120")
    return cli.main(["plan", *map(str, argv)])


def test_a_drive_makes_up_for_ram(model, monkeypatch, cache, tmp_path, capsys):
    """What does not fit fits with a drive, and the slower the drive, the longer the step; the screen says how busy."""
    assert run(monkeypatch, cache, model, *TIGHT) == 1
    capsys.readouterr()
    seconds = []
    for rate in ("1GB/s", "100MB/s"):
        target = tmp_path / "plan.json"
        assert run(monkeypatch, cache, model, *TIGHT, "--storage", rate, "--json", str(target)) == 0
        said, plan = " ".join(capsys.readouterr().out.split()), load_plan(target)
        assert f"storage {plan.read_words}" in said and "of frozen parameters are read from the checkpoint" in said
        assert plan.schedule.homes and plan.host_bytes <= 88 << 20
        assert plan.read_bytes == sum(
            plan.schedule.item_bytes[a.item] for a in plan.schedule.actions if a.name in plan.schedule.homes
            and a.kind.value == "prefetch"
        )  # fmt: skip
        assert plan.read_words in plan.explain()
        seconds.append(plan.predicted_step_s)
    assert seconds[1] > seconds[0]
    assert plan.read_bytes / 100e6 <= seconds[1] <= 1.3 * plan.read_bytes / 100e6


@pytest.mark.parametrize("rate", ["fast", "3GB", "-1GB/s", "0"])
def test_a_rate_that_is_none(model, monkeypatch, cache, capsys, rate):
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, cache, model, *TIGHT, "--storage", rate)
    assert left.value.code == 2
    assert "--storage" in capsys.readouterr().err


def test_a_rate_without_its_machine(checkpoint):  # noqa: F811
    model, optimizer = mapped(checkpoint)
    with pytest.raises(offmate.OffmateError, match=r"storage='3GB/s' is a rate, and training needs a folder"):
        offmate.plan(model, GPU_BUDGET, example_inputs=(batch(0),), optimizer=optimizer, device="emulated",
                     storage="3GB/s")  # fmt: skip


def test_ram_that_has_room():
    sizes = {"base": 100, "adapter": 10}
    assert not files.ram_is_short(sizes, {"base"}, 215)  # 150 bytes in seven tenths of it
    assert files.ram_is_short(sizes, {"base"}, 214)
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    assert files.files_elsewhere(model, 1e9, 1 << 20) is None
    found = files.files_elsewhere(model, 1e9, 10)
    assert found is not None and found.names == {"weight", "bias"} and found.tier.path.in_bytes_per_s == 1e9
    assert files.files_elsewhere(torch.nn.Linear(4, 4), 1e9, 10) is None


def test_a_plan_made_ahead_is_the_compiled_models(checkpoint: Path, tmp_path: Path):  # noqa: F811
    """A plan from mapped parameters can be saved, and a model that is mapped as it was trains by it."""
    settings = {"cpu_budget": CPU_BUDGET, "device": "emulated", "config": offmate.Config(cache_dir=None)}
    model, optimizer = mapped(checkpoint)
    plan = offmate.plan(model, GPU_BUDGET, example_inputs=(batch(0),), optimizer=optimizer, **settings)
    assert plan.schedule.homes
    plan.save(tmp_path / "plan.json")
    known = offmate.load_plan(tmp_path / "plan.json")
    assert known.schedule == plan.schedule
    offmate.compile(model, GPU_BUDGET, optimizer=optimizer, plan=known, **settings)
    plain = mapped(checkpoint)
    assert train(model, optimizer, range(3)) == train(*plain, range(3))
    assert model.offmate.plan.schedule == plan.schedule


def test_a_plan_for_files_is_refused_without_them(checkpoint: Path):  # noqa: F811
    """A plan that reads from files is none for a model in memory of its own."""
    settings = {"cpu_budget": CPU_BUDGET, "device": "emulated", "config": offmate.Config(cache_dir=None)}
    model, optimizer = mapped(checkpoint)
    plan = offmate.plan(model, GPU_BUDGET, example_inputs=(batch(0),), optimizer=optimizer, **settings)
    other, its = mapped(checkpoint)
    for param in other.parameters():
        param.data = param.data.clone()
    offmate.compile(other, GPU_BUDGET, optimizer=its, plan=plan, **settings)
    with pytest.raises(offmate.OffmateError):
        train(other, its, range(1))
