"""`offmate show`: what a saved plan is of, its page, its text, and two plans beside each other."""

import json
import re
from dataclasses import replace

import pytest
from offmate.solver.accumulation import AccumulationTrial
from offmate.solver.simulate import memory_highs

from offmate.cli import main
from offmate.plans.about import About
from offmate.plans.plan import load_plan
from offmate.sizes import format_bytes

from ..loops import plan as planned
from ..reports.report_plans import tiny_plan


def test_show(tmp_path, capsys):
    plan = tiny_plan()
    path, page, traced = tmp_path / "plan.json", tmp_path / "plan.html", tmp_path / "trace.json"
    plan.save(path)
    assert load_plan(path) == plan
    assert main(["show", str(path)]) == 0
    assert "the least budget that works" in capsys.readouterr().out
    assert main(["show", str(path), "--html", str(page), "--trace", str(traced)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(traced.read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["show", str(path), "--json", str(tmp_path / "figures.json"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["predicted_peak_bytes"] == plan.predicted_peak_bytes and len(figures["blocks"]) == 2
    assert main(["show", str(path), "--text"]) == 0
    assert "update-cpu w" in capsys.readouterr().out


def about(**changes):
    """What a plan may be of."""
    known = About("llama2-7b", 6_740_000_000, "bf16", "adamw", "4 × 512 tokens", "RTX 3060 12 GB", "2026-01-31")
    return replace(known, **changes)


def test_a_saved_plan_and_its_page_say_what_it_is_of(tmp_path, capsys):
    plan = replace(tiny_plan(), about=about(model="<b>llama2-7b</b>"))
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert read.about == plan.about
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    words = "6.74 B parameters in bf16, adamw, 4 × 512 tokens, on RTX 3060 12 GB, planned 2026-01-31"
    assert f"<b>llama2-7b</b>: {words}" in " ".join(capsys.readouterr().out.split())
    assert main(["show", str(tmp_path / "plan.json"), "--text"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"<b>llama2-7b</b>: {words}") and "on GPU" in text
    page = read.to_html()
    title = f"&lt;b&gt;llama2-7b&lt;/b&gt; on RTX 3060 12 GB: one step in {format_bytes(plan.budget_bytes)}"
    assert f"<title>{title}</title>" in page and f"<h2>{title}</h2>" in page
    assert "6.74 B parameters in bf16, adamw, 4 × 512 tokens, planned 2026-01-31" in page
    assert str(read).startswith("<b>llama2-7b</b>: 6.74 B")


def test_tokens_are_counted_where_the_plan_knows_them(tmp_path, capsys):
    """Of the step, and of the numbers of micro-batches that were tried; else these are counted."""
    trial = AccumulationTrial(2, "by batch", 0.5, 0.25, 0.125, "host")
    plan = replace(tiny_plan(), about=about(tokens=3_000), accumulation=(trial,))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").about.tokens == 3_000
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert f"{3_000 / plan.predicted_step_s:,.0f} tokens/s" in said and not re.search(r"per s\b", said)
    assert f" {2 * 3_000 / plan.accumulation_steps / 0.5:,.0f} " in said

    replace(plan, about=about()).save(tmp_path / "plan.json")
    assert "tokens" not in json.loads((tmp_path / "plan.json").read_text())["about"]
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "predicted, " not in said and re.search(r"per s\b", said)


def test_an_older_file_has_no_description_and_the_day_does_not_make_plans_differ(tmp_path):
    plan = replace(tiny_plan(), about=about())
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["about"]
    (tmp_path / "older.json").write_text(json.dumps(data))
    older = load_plan(tmp_path / "older.json")
    assert older.about == About() and older.about.words() == ""
    assert older == plan == replace(plan, about=about(made="2027-01-01"))
    assert f"<title>One step in {format_bytes(plan.budget_bytes)}</title>" in older.to_html()


def test_a_description_that_cannot_be_is_refused(tmp_path, capsys):
    tiny_plan().save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["about"]["n_parameters"] = -1
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert main(["show", str(tmp_path / "plan.json")]) == 2
    assert "n_parameters is -1" in capsys.readouterr().err


@pytest.fixture
def two(tmp_path):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, machine in zip(paths, ("card A", "card B")):
        replace(tiny_plan(), about=about(machine=machine)).save(path)
    return [str(path) for path in paths]


def test_show_compares_two_plans(two, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", *two]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert ["before", "after", "change"] in [line.split() for line in lines]
    assert "card A" in " ".join(lines[:4]) and "card B" in " ".join(lines[:4])
    page, traced = tmp_path / "ab.html", tmp_path / "ab.trace.json"
    assert main(["show", *two, "--html", str(page), "--trace", str(traced)]) == 0
    text = page.read_text()
    assert "<h3>a.json: llama2-7b" in text and "<h3>b.json: llama2-7b" in text
    assert "<title>a.json and b.json: one step each</title>" in text and "<th>before</th>" in text
    assert all(len(set(re.findall(f'data-{axis}="[^"]+"', text))) == 1 for axis in ("top", "end"))
    events = json.loads(traced.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a.json", "b.json"]


def test_show_refuses_what_is_of_one_plan(two, capsys):
    assert main(["show", *two, "--text", "--what-if"]) == 2
    assert "--text and --what-if can be used with one plan only, and 2 are named" in capsys.readouterr().err
    assert main(["show", *two, two[0]]) == 2
    assert "3 plans are named" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_action_has_its_sizes_unbroken_at_the_right(tmp_path, capsys, monkeypatch, width):
    plan = tiny_plan()
    plan.save(tmp_path / "plan.json")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["show", str(tmp_path / "plan.json"), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert all(re.search(r"\d B$", line) for line in lines if " compute " in line)
    assert sum("stays" in line for line in lines) == 1 and sum(line.startswith("forward:") for line in lines) == 1
    moved = [line.split()[-4:] for line in lines if "offload g:w" in line]
    assert moved == [["10", "B", *format_bytes(highest_at(plan, "offload g:w")).split()]]


def highest_at(plan, words):
    highs = zip(plan.schedule.actions, memory_highs(plan.schedule))
    return next(high for action, high in highs if words in str(action)) + plan.fixed_bytes


@pytest.mark.parametrize("content", [None, "no JSON", "{}", '{"format": 99}', '{"format": 1}', "[]"])
def test_show_refuses_what_is_no_plan(tmp_path, capsys, content):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    assert main(["show", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_show_says_where_it_cannot_write(tmp_path, capsys):
    path = tmp_path / "plan.json"
    tiny_plan().save(path)
    assert main(["show", str(path), "--html", str(path / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_plan_knows_its_model_its_optimizer_and_its_batch():
    known = planned("middle").about
    assert known.optimizer == "AdamW" and known.dtype == "float32" and known.machine == "the emulated device"
    assert known.model and known.n_parameters > 0 and " × " in known.batch
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", known.made)
