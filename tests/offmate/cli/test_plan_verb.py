"""`offmate plan` as a user meets it: shapes without weights, screens of any width, and what is refused."""

import json
import logging
import re

import pytest

pytest.importorskip("transformers")

import torch

import offmate
from offmate import cli
from offmate.cli import summary
from offmate.cli.arguments import OptionNames
from offmate.cli.shapes import batch_for, build, names, optimizer_for
from offmate.errors import OffmateError
from offmate.planning import storage
from offmate.plans import sweep as budgets
from offmate.plans.plan import load_plan
from offmate.sizes import parse_bytes

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bloom-3b": 3_002_557_440,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "tinyllama-1.1b": 1_100_048_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma2-2b": 2_614_341_888,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}  # as their makers' checkpoints hold them


@pytest.fixture(autouse=True)
def quiet_logs():
    logging.getLogger("offmate").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for the module: what was worked out for the tiny model serves every test."""
    return tmp_path_factory.mktemp("cache")


def run(monkeypatch, cache, *argv: str, columns: int = 80) -> int:
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", str(columns))
    return cli.main(["plan", *argv])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shapes_have_the_published_number_of_parameters(name):
    model = build(name, "bf16")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_shape_is_checked():
    assert set(names()) == PUBLISHED.keys() | {"tiny-llama", "tiny-gpt2"}


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_screen_holds_its_width_and_says_what_matters(monkeypatch, cache, capsys, columns):
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", columns=columns) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines())
    assert "…" not in text
    words = " ".join(text.split())
    for said in ("125 K parameters", "RTX 3060", "fits: ", "unlimited GPU memory", "is faster than", "limits"):
        assert said in words, said
    assert "class B" in words or "B" in words.split()
    assert "model.layers.*.mlp" in text.replace("\n", "")


def test_what_it_writes_can_be_shown(monkeypatch, cache, capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", "--quiet", "--json", str(path)) == 0
    assert capsys.readouterr().out == ""
    plan = load_plan(path)
    assert plan.budget_bytes == parse_bytes("12MiB") and plan.predicted_peak_bytes <= plan.budget_bytes
    assert cli.main(["show", str(path), "--what-if"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "would save" in words and "a link twice as fast" in words
    assert cli.main(["show", str(path), "--blocks"]) == 0


def test_a_plan_explains_what_limits_it_and_what_would_help(monkeypatch, cache, tmp_path):
    path = tmp_path / "plan.json"
    run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", "--quiet", "--json", str(path))
    plan = load_plan(path)
    assert "The backward takes" in plan.explain() and "would" not in plan.explain()
    assert "one more GiB of GPU memory" in plan.explain(offers=True).replace("One", "one")
    assert plan.endless_s == pytest.approx(plan.predicted_step_s, rel=0.2)


def test_a_budget_that_does_not_fit(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "1MiB") == 1
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith("does not fit: 1 MiB of GPU memory are not enough; the least that works is")
    assert "raise --gpu-budget" in words and "Config(" not in words and "gpu_budget" not in words
    assert "Looking for" not in words


@pytest.mark.parametrize(
    ("part", "words"),
    [(-0.09, "9.0 % faster than with unlimited"), (-0.0001, "0 % over unlimited"), (0.024, "+2.4 % over unlimited")],
)
def test_the_overhead_has_no_minus_sign(part, words):
    assert summary._overhead(part, "4 s").startswith(words)


def test_a_sweep_shows_the_curve(monkeypatch, cache, capsys, tmp_path):
    path = tmp_path / "curve.json"
    for columns in (40, 80):
        code = run(monkeypatch, cache, "tiny-llama", "--sweep", "4MiB:20MiB:8MiB", "--json", str(path), columns=columns)
        assert code == 0
        text = capsys.readouterr().out
        assert "too small" in text and "█" in text and "…" not in text
        assert all(len(line) <= columns for line in text.splitlines())
    points = json.loads(path.read_text())["points"]
    assert [point["budget_bytes"] >> 20 for point in points] == [4, 12, 20]
    assert points[0]["predicted_step_s"] is None
    assert points[1]["predicted_step_s"] >= points[2]["predicted_step_s"]
    assert all(point["predicted_peak_bytes"] <= point["budget_bytes"] for point in points[1:])


def test_a_sweep_agrees_with_plans(monkeypatch, cache, tmp_path):
    plans = []
    for budget in ("12MiB", "20MiB"):
        path = tmp_path / f"{budget}.json"
        run(monkeypatch, cache, "tiny-llama", "--gpu-budget", budget, "--quiet", "--json", str(path))
        plans.append(load_plan(path))
    tight, ample = plans
    solved, own = budgets.sweep(ample, [tight.budget_bytes, ample.budget_bytes])
    assert solved.predicted_step_s == pytest.approx(tight.predicted_step_s, rel=0.02)
    assert own.predicted_step_s == ample.predicted_step_s and own.predicted_peak_bytes == ample.predicted_peak_bytes
    assert solved.least_budget_bytes == own.least_budget_bytes == tight.least_budget_bytes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("llama-7b",), "Did you mean llama2-7b"),
        (("tiny-llama", "--hardware", "rtx3060ti"), "Did you mean rtx3060"),
        (("./nowhere",), "no such file or folder"),
        (("a/b/c",), "no such file or folder"),
        (("tiny-llama", "--seq-len", "100000"), "longer than the model's 512 positions"),
    ],
)
def test_names_and_sizes_that_make_no_sense(monkeypatch, cache, capsys, argv, said):
    assert run(monkeypatch, cache, *argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--gpu-budget", "12Gb"), "size in bits"),
        (("--batch", "0"), "from 1 to 1,000,000,000"),
        (("--batch", "9" * 5000), "from 1 to 1,000,000,000"),
        (("--gpu-budget", "12"), "did you mean 12GiB?"),
        (("--json", "a\0b"), "cannot be written"),
        (("--sweep", "6GiB"), "LOW:HIGH:STEP"),
        (("--sweep", "8GiB:6GiB:1GiB"), "starts above its end"),
        (("--sweep", "1GiB:2GiB:1MiB"), "more than 64 budgets"),
        (("--dtype", "int8"), "invalid choice"),
        (("--sweep", "1GiB:2GiB:1GiB", "--gpu-budget", "1GiB"), "not allowed with"),
    ],
)
def test_arguments_that_make_no_sense(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "tiny-llama", *argv])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_configurations_on_disk(tmp_path):
    model = build("tiny-gpt2", "fp32")
    model.config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        found = build(str(path), "fp32")
        assert type(found) is type(model)
        assert found.num_parameters() == model.num_parameters()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OffmateError, match=r"no config\.json"):
        build(str(empty), "bf16")
    (empty / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(OffmateError, match="not a language model"):
        build(str(empty), "bf16")
    (empty / "config.json").write_text("{")
    with pytest.raises(OffmateError, match="empty"):
        build(str(empty), "bf16")


def test_the_kind_of_language_model_follows_from_the_configuration(tmp_path):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    t5 = {
        "vocab_size": 32,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    expected = {
        "BertForMaskedLM": {"model_type": "bert", **sizes},
        "BertLMHeadModel": {"model_type": "bert", "is_decoder": True, **sizes},
        "T5ForConditionalGeneration": {"model_type": "t5", **t5},
        "LlamaForCausalLM": {"model_type": "llama", **sizes},
    }
    for name, config in expected.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert type(build(str(tmp_path), "fp32")).__name__ == name


def test_optimizers_and_batches():
    model = build("tiny-llama", "fp32")
    assert optimizer_for(model, "none") is None
    assert {type(optimizer_for(model, name)).__name__ for name in ("adamw", "adam", "sgd", "adafactor")} == {
        "AdamW", "Adam", "SGD", "Adafactor"
    }  # fmt: skip
    assert batch_for(model, 3, 5)["labels"].shape == (3, 5)


# -- what training will do --------------------------------------------------------------------------------------------

TRAININGS = {
    "--max-grad-norm 1.0": {"max_grad_norm": 1.0},
    "--accumulation 3 --optimizer sgd": {"accumulation_steps": 3},
    "--dtype bf16-master --max-grad-norm 1.0 --accumulation 2": {"max_grad_norm": 1.0, "accumulation_steps": 2},
    "--dtype fp32 --autocast": {},
    "--dtype fp32 --grad-scaler": {"grad_scaler": torch.amp.GradScaler("cpu")},
    "--dtype bf16-master --max-grad-norm 1.0 --speculate": {"max_grad_norm": 1.0},
}


@pytest.mark.parametrize("options", TRAININGS)
def test_a_plan_is_that_of_the_same_arguments_in_python(monkeypatch, cache, tmp_path, capsys, options):
    target, words = tmp_path / "plan.json", options.split()
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", "--json", str(target), *words) == 0
    dtype = words[words.index("--dtype") + 1] if "--dtype" in words else "bf16"
    model = build("tiny-llama", dtype)
    optimizer = optimizer_for(model, "sgd" if "sgd" in words else "adamw", dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled="--autocast" in words):
        own = offmate.plan(
            model, "12MiB", example_inputs=batch_for(model, 4, 512), optimizer=optimizer, hardware="rtx3060",
            config=offmate.Config(cache_dir=str(tmp_path / "cache"), speculate="--speculate" in words),
            **TRAININGS[options],
        )  # fmt: skip
    assert not own.from_cache
    plan = load_plan(target)
    assert plan.schedule == own.schedule and plan.fingerprint == own.fingerprint
    assert (plan.break_even is not None) == ("--speculate" in words)
    said = " ".join(capsys.readouterr().out.split())
    passes = TRAININGS[options].get("accumulation_steps", 1)
    assert f"{2048 * passes / own.predicted_step_s:,.0f} tokens/s" in said
    for option, text in {
        "--max-grad-norm": "gradients clipped to 1",
        "--grad-scaler": "losses scaled",
        "--accumulation": f"{passes} micro-batches of 4 × 512 tokens",
        "bf16-master": "bf16 with float32 copies",
        "--autocast": "fp32 under autocast to bf16",
        "--speculate": "before the gate",
    }.items():
        assert (text in said) == (option in words)


def test_autocast_for_a_card_is_planned_where_there_is_no_card():
    model = build("tiny-llama", "fp32")

    def made():
        batch = batch_for(model, 4, 512)
        return offmate.plan(
            model, "12MiB", example_inputs=batch, hardware="rtx3060", config=offmate.Config(cache_dir=None)
        )

    with torch.autocast("cpu", torch.bfloat16):
        expected = made()
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = made()
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert found.schedule == expected.schedule != made().schedule


@pytest.mark.parametrize("option", ["--max-grad-norm 1", "--grad-scaler", "--accumulation 2", "--dtype bf16-master"])
def test_what_needs_an_optimizer_is_refused_without_one(monkeypatch, cache, capsys, option):
    assert run(monkeypatch, cache, "tiny-llama", "--optimizer", "none", *option.split()) == 2
    said = capsys.readouterr().err
    assert option.split()[0] in said and "--optimizer none" in said and "Traceback" not in said


def test_speculation_is_for_updates_that_wait(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "tiny-llama", "--speculate") == 2
    assert "add --max-grad-norm, --grad-scaler or --accumulation, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("norm", ["0", "-1", "nan", "much"])
def test_a_norm_is_above_0(monkeypatch, cache, capsys, norm):
    with pytest.raises(SystemExit):
        run(monkeypatch, cache, "tiny-llama", f"--max-grad-norm={norm}")
    assert f"'{norm}' is not a number above 0" in capsys.readouterr().err


def test_many_micro_batches_are_planned_and_absurdly_many_refused(monkeypatch, cache, capsys):
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", "--accumulation", "1000000") == 0
    assert "1000000 micro-batches" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "12MiB", "--accumulation", "9" * 9)
    assert caught.value.code == 2
    assert "is not a whole number from 1 to 1,000,000" in capsys.readouterr().err


def test_the_micro_batches_of_a_pass(monkeypatch, cache, tmp_path, capsys):
    target, words = tmp_path / "plan.json", ["--accumulation", "5", "--micro-batches-per-pass", "2"]
    assert run(monkeypatch, cache, "tiny-llama", "--gpu-budget", "64MiB", "--json", str(target), *words) == 0
    plan = load_plan(target)
    assert (plan.accumulation_steps, plan.micro_batches_per_pass, plan.schedule.last_per_step) == (5, 2, 1)
    said = " ".join(capsys.readouterr().out.split())
    assert "5 micro-batches of 4 × 512 tokens, block by block, 2 at a time" in said
    assert "micro-batches run block by block, 2 at a time" in said
    for refused, message in (
        ("--micro-batches-per-pass 2", "--micro-batches-per-pass 2 is for several micro-batches per step"),
        ("--accumulation 5 --micro-batches-per-pass 2 --order by-batch", "is by-block, and --order is by-batch"),
    ):
        assert run(monkeypatch, cache, "tiny-llama", *refused.split()) == 2
        assert message in capsys.readouterr().err


def test_autocast_over_weights_in_lower_precision_is_refused(capsys):
    assert cli.main(["plan", "gpt2", "--autocast"]) == 2
    assert "--autocast casts float32 weights, and --dtype is bf16; for mixed precision" in capsys.readouterr().err


def test_a_scaler_for_weights_in_float16_is_refused(capsys):
    """As PyTorch refuses it, but at the first step of the run."""
    assert cli.main(["plan", "gpt2", "--dtype", "fp16", "--grad-scaler"]) == 2
    assert "--grad-scaler cannot unscale gradients of float16 weights" in capsys.readouterr().err


def test_a_card_without_a_rate_for_bfloat16_says_so(monkeypatch, cache, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for dtype, said in (("bf16", True), ("fp16", False), ("fp32", False)):
        assert run(monkeypatch, cache, "tiny-llama", "--card", "t4", "--dtype", dtype) == 0
        words = "has no matrix rate for bfloat16, so that products are planned with that of float32, 6.48 TFLOP/s"
        assert (words in " ".join(capsys.readouterr().out.split())) == said


def test_micro_batches_are_chosen_and_those_that_were_tried_are_shown(monkeypatch, cache, tmp_path, capsys):
    target = tmp_path / "plan.json"
    options = ["--gpu-budget", "12MiB", "--accumulation", "auto", "--json", str(target)]
    assert run(monkeypatch, cache, "tiny-llama", *options, columns=110) == 0
    said, plan = capsys.readouterr().out, load_plan(target)
    count = plan.accumulation_steps
    assert f"{count} micro-batches of 4 × 512 tokens" in " ".join(said.split()) or count == 1
    for trial in plan.accumulation:
        rate = f"{trial.rate * 2048:,.0f}" if trial.fits else "does not fit"
        assert any(line.split()[:1] == [str(trial.micro_batches)] and rate in line for line in said.splitlines())
    assert "1 % of tokens/s" in " ".join(said.split()) or "are the most" in " ".join(said.split())
    assert run(monkeypatch, cache, "tiny-llama", "--sweep", "8MiB:12MiB:4MiB", "--accumulation", "auto") == 2
    assert "another answer for each budget" in capsys.readouterr().err
    assert run(monkeypatch, cache, "tiny-llama", "--sweep", "8MiB:12MiB:4MiB", "--batch", "auto") == 2
    assert "--batch auto has another answer for each budget" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("more", [[], ["--accumulation", "2"], ["--accumulation", "auto"]])
def test_the_size_of_a_micro_batch_is_chosen(monkeypatch, cache, tmp_path, capsys, more):
    target = tmp_path / "plan.json"
    options = ["--gpu-budget", "12MiB", "--seq-len", "64", "--batch", "auto", *more, "--json", str(target)]
    assert run(monkeypatch, cache, "tiny-llama", *options) == 0
    plan, said = load_plan(target), " ".join(capsys.readouterr().out.split())
    sequences = int(re.search(r"(\d+) × 64 tokens", said).group(1))
    assert sequences != 4 and plan.about.tokens == plan.accumulation_steps * sequences * 64
    assert plan.accumulation_steps == 2 or "2" not in more
    assert run(monkeypatch, cache, "tiny-llama", "--batch", "auto", "--gpu-budget", "100KiB", "--ram", "1MiB") == 1
    assert "1 × 512 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_batch_is_a_number_or_auto(monkeypatch, cache, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, cache, "tiny-llama", "--batch", "many")
    assert "or auto" in capsys.readouterr().err


def test_drives_that_no_plan_needs_are_named(monkeypatch, cache, capsys):
    for drives, said in ((["--storage", "7GB/s,5GB/s"], True), ([], False)):
        assert run(monkeypatch, cache, "tiny-llama", "--batch", "1", "--seq-len", "16", *drives) == 0
        assert ("storage not used: this plan needs no files" in " ".join(capsys.readouterr().out.split())) == said


def test_a_step_that_takes_many_times_as_long_has_no_percentage():
    assert summary._overhead(0.2, "1 s").startswith("+20.0 % over unlimited GPU memory (1 s")
    assert summary._overhead(20.1, "1 s").startswith("21 times as long as with unlimited GPU memory (1 s")


def test_log_lines_name_options(caplog):
    log, options = logging.getLogger("offmate"), OptionNames()
    log.addFilter(options)
    try:
        log.error("raise %s, or name a folder on a drive with storage=, so that states go there", "cpu_budget")
    finally:
        log.removeFilter(options)
    assert caplog.messages == [
        "raise --cpu-budget, or name a folder on a drive with --storage, so that states go there"
    ]


def test_parameters_may_lie_on_drives_as_offmate_plan_has_it(monkeypatch, cache, tmp_path, capsys):
    for name, small in (("BUFFERS_BYTES", 0), ("N_THREADS", 2), ("REQUEST_BYTES", 1 << 14)):
        monkeypatch.setattr(storage, name, small)  # as the model is
    file = tmp_path / "plan.json"
    argv = ["tiny-llama", "--batch", "2", "--seq-len", "16", "--gpu-budget", "500KiB", "--ram", "60KiB", "--quiet"]
    argv += ["--storage", "7GB/s,5GB/s", "--json", str(file)]
    assert run(monkeypatch, cache, *argv) == 1, "states alone do not make enough room"
    assert run(monkeypatch, cache, *argv, "--storage-parameters") == 0
    said = load_plan(file)
    assert said.schedule.trained_homes
    model = build("tiny-llama", "bf16")
    plan = offmate.plan(
        model, "500KiB", example_inputs=batch_for(model, 2, 16), optimizer=optimizer_for(model, "adamw"),
        hardware="rtx3060", cpu_budget="60KiB", storage=offmate.StoragePath("d", "7GB/s", "5GB/s", parameters=True),
    )  # fmt: skip
    assert plan.schedule.actions == said.schedule.actions and plan.schedule.homes == said.schedule.homes
    capsys.readouterr()
    for refused, why in ((["--storage", "7GB/s"], "only the rate of reads is given, 7GB/s"), ([], "none is named")):
        assert run(monkeypatch, cache, "tiny-llama", *refused, "--storage-parameters") == 2
        assert why in " ".join(capsys.readouterr().err.split())


def test_where_micro_batches_do_not_fit_together_one_after_the_other_is_advised(monkeypatch, cache, capsys):
    """Other ways to train are sized one after the other, so they are no advice for those that run together."""
    for more, without in (
        (["--order", "by-block"], ""),
        (["--micro-batches-per-pass", "8"], "without --micro-batches-per-pass 8"),
    ):
        argv = ["tiny-llama", "--batch", "1", "--accumulation", "16", "--gpu-budget", "5MiB"]
        assert run(monkeypatch, cache, *argv, *more) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "of RAM at least: --order by-batch" in said and without in said
        assert "--optimizer" not in said and "--lora" not in said
        assert run(monkeypatch, cache, *argv, "--order", "by-batch") == 0
        capsys.readouterr()
