"""What fits a card: `offmate fits`, `offmate cards`, and `offmate plan` with an adapter, a card and RAM."""

import json
import logging

import pytest

pytest.importorskip("transformers")

import torch

import offmate
from offmate import cli
from offmate.api import outlooks
from offmate.cli.shapes import batch_for, build, optimizer_for
from offmate.machines.hardware import load, names
from offmate.plans.plan import load_plan
from offmate.sizes import parse_bytes


@pytest.fixture(autouse=True)
def quiet_logs():
    logging.getLogger("offmate").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(monkeypatch, cache, *argv: str, columns: int = 120) -> int:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", str(columns))
    return cli.main([*argv])


def words(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["4", "r=4,alpha=8,targets=q_proj+v_proj"])
def test_a_plan_with_an_adapter_is_that_of_pefts_model(monkeypatch, cache, tmp_path, capsys, setting):
    peft = pytest.importorskip("peft")
    target = tmp_path / "plan.json"
    argv = ("plan", "tiny-llama", "--lora", setting, "--gpu-budget", "12MiB", "--json", str(target))
    assert run(monkeypatch, cache, *argv) == 0
    layers = "all-linear" if setting == "4" else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=16 if setting == "4" else 8, target_modules=layers, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("tiny-llama", "bf16"), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    own = offmate.plan(
        model, "12MiB", example_inputs=batch_for(model, 4, 512), optimizer=torch.optim.AdamW(trained),
        hardware="rtx3060", config=offmate.Config(cache_dir=str(tmp_path / "cache")),
    )  # fmt: skip
    plan = load_plan(target)
    assert plan.schedule == own.schedule and plan.fingerprint == own.fingerprint
    assert "in bf16, LoRA of rank 4, adamw" in words(capsys)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--lora", "much"), "write 16 for a rank"),
        (("--lora", "0"), "lora r is 0"),
        (("--lora", "8", "--dtype", "bf16-master"), "leave --dtype out"),
    ],
)
def test_adapters_that_make_no_sense(monkeypatch, cache, capsys, argv, said):
    pytest.importorskip("peft")
    assert run(monkeypatch, cache, "plan", "tiny-llama", *argv) == 2
    assert said in capsys.readouterr().err


# -- the card and the RAM ---------------------------------------------------------------------------------------------


def test_a_plan_says_first_how_much_memory_it_needs(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "plan", "tiny-llama", "--card", "rtx3060", "--gpu-budget", "12MiB") == 0
    assert capsys.readouterr().out.startswith("fits: 12 MiB of GPU memory and ")
    assert run(monkeypatch, cache, "plan", "tiny-llama", "--ram", "1GiB", "--gpu-budget", "12MiB") == 0
    assert " of RAM, of 1 GiB" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("argv", [("--card", "t4", "--hardware", "l4"), ("--ram", "1GiB", "--cpu-budget", "1GiB")])
def test_two_names_of_one_option_are_not_given_together(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "tiny-llama", *argv])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_too_little_ram_is_said_first_with_what_fits(monkeypatch, cache, capsys, columns):
    argv = ("plan", "tiny-llama", "--gpu-budget", "10MiB", "--ram", "300KiB", "--batch", "4")
    assert run(monkeypatch, cache, *argv, columns=columns) == 1
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines())
    said = " ".join(text.split())
    assert said.startswith("does not fit: with 10 MiB of GPU memory, training needs about ")
    assert "of RAM, and there are 300 KiB" in said
    assert "--seq-len 256" in said or "256 tokens (needs" in said
    assert "optimizer states on an NVMe drive" in said


def test_no_more_gpu_memory_is_advised_than_the_card_has(monkeypatch, cache, capsys, tmp_path):
    from importlib import resources

    data = json.loads((resources.files("offmate") / "machines" / "rtx3060.json").read_text())
    data["device_memory_bytes"]["value"] = 6 << 20
    path = tmp_path / "small.json"
    path.write_text(json.dumps(data))
    assert run(monkeypatch, cache, "plan", "tiny-llama", "--card", str(path)) == 1
    said = words(capsys)
    assert said.startswith("does not fit: 5.62 MiB of GPU memory are not enough; the least that works is ")
    assert "the card has 6 MiB" in said and "--gpu-budget" not in said
    assert run(monkeypatch, cache, "plan", "tiny-llama", "--gpu-budget", "5MiB") == 1
    assert "raise --gpu-budget to that (the card has 12 GiB)" in words(capsys)


def test_the_least_ram_is_near_what_works():
    model = build("tiny-llama", "bf16")
    batch, optimizer = batch_for(model, 4, 512), optimizer_for(model, "adamw")

    def outlook(ram_bytes):
        asked = outlooks(
            model, "9600KiB", example_inputs=batch, optimizers=[optimizer], hardware="rtx3060", cpu_budget=ram_bytes
        )
        return next(asked)

    needed = outlook(1 << 30).least_host_bytes
    assert outlook(needed).fits and not outlook(int(0.9 * needed)).fits
    assert outlook(1 << 30).rough().host_bytes >= 0.9 * needed


# -- fits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_fits_is_a_table_of_models_and_ways(monkeypatch, cache, capsys, columns, tmp_path):
    pytest.importorskip("peft")
    path = tmp_path / "rows.json"
    argv = ("fits", "--only", "tiny-llama", "tiny-gpt2", "--seq-len", "128", "--ram", "1GiB", "--json", str(path))
    assert run(monkeypatch, cache, *argv, columns=columns) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines())
    for said in ("tiny-llama", "tiny-gpt2", "full bf16", "fp32 copies", "LoRA 16", "tokens/s"):
        assert said in text
    rows = json.loads(path.read_text())
    assert len(rows) == 6 and all(
        row["step_s"] > 0 and row["least_device_bytes"] <= row["device_bytes"] for row in rows
    )
    assert [row["tokens_per_s"] * row["step_s"] for row in rows] == pytest.approx([128] * 6)


def test_rows_are_kept(monkeypatch, cache, capsys):
    argv = ("fits", "--only", "tiny-llama", "--seq-len", "64")
    assert run(monkeypatch, cache, *argv) == 0
    first = capsys.readouterr().out
    assert "about 1 min on two idle cores" in first
    monkeypatch.setattr("offmate.api.outlooks", lambda *_, **__: pytest.fail("worked out again"))
    assert run(monkeypatch, cache, *argv) == 0
    again = capsys.readouterr().out
    assert "idle cores" not in again and again.splitlines()[-6:] == first.splitlines()[-6:]


def test_what_does_not_fit_says_what_it_needs(monkeypatch, cache, capsys):
    argv = (
        "fits",
        "--only",
        "tiny-llama",
        "--gpu-budget",
        "10MiB",
        "--ram",
        "100KiB",
        "--batch",
        "4",
        "--seq-len",
        "512",
    )
    hint = "--storage 7GB/s,5GB/s lets optimizer states lie on an NVMe drive"
    assert run(monkeypatch, cache, *argv) in (0, 1)
    said = words(capsys)
    assert "needs about" in said and hint in said
    assert run(monkeypatch, cache, *argv, "--storage", "7GB/s,5GB/s") in (0, 1)
    said = words(capsys)
    assert "the drive (7 GB/s read, 5 GB/s written)" in said and hint not in said
    assert run(monkeypatch, cache, "fits", "--only", "tiny-llama", "--gpu-budget", "1MiB", "--seq-len", "512") == 1
    said = words(capsys)
    assert "GPU memory" in said and hint not in said


def test_fits_refuses_what_it_does_not_know(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "fits", "--only", "llama-7b") == 2
    assert "Did you mean llama2-7b" in capsys.readouterr().err
    assert run(monkeypatch, cache, "fits", "--card", "rtx9999") == 2


# -- cards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_cards_lists_every_file_and_says_where_its_figures_are_from(monkeypatch, cache, capsys, columns, tmp_path):
    path = tmp_path / "cards.json"
    assert run(monkeypatch, cache, "cards", "--json", str(path), columns=columns) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines())
    assert "not said" not in text and "data sheets" in text
    assert {row["name"] for row in json.loads(path.read_text())} == set(names())
    for name in names():
        assert name in text
        line = next(line for line in text.splitlines() if line.split()[:1] == [name])
        basis = load(name).basis
        assert {"data sheets": "data sheets", "paper": "a paper", "measured": "measured"}[basis] in line


def test_a_card_without_bfloat16_says_so(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "fits", "--card", "t4", "--only", "tiny-llama", "--seq-len", "64") == 0
    assert "no matrix rate for bfloat16" in words(capsys)
    assert load("t4").flops_per_s("bfloat16") == load("t4").flops_per_s("float32") < load("t4").flops_per_s("float16")
    assert load("t4").device_memory_bytes == parse_bytes("15GiB")
