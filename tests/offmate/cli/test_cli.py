import importlib.util
import subprocess
import sys

import pytest

from offmate import __version__, cli
from offmate.cli.arguments import output_file, with_options
from offmate.errors import ArgumentValueError, DeviceError, InfeasibleBudget


def refused(capsys, *argv: str) -> str:
    """What a command line that cannot start says."""
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def parsed(*argv: str):
    return cli._parser().parse_args(argv)


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"offmate {__version__}\n"


@pytest.mark.parametrize("verb", ["plan", "fits", "cards", "show", "check", "profile", "doctor", "demo", "finetune"])
def test_help_has_examples_and_fits_eighty_columns(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"\n  offmate {verb}" in text[text.index("examples:") :]
    assert "--quiet" in text and "--json" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_unknown_option_shows_the_usage_of_its_command_and_the_nearest_option(capsys):
    said = refused(capsys, "plan", "gpt2", "--crad", "rtx3060")
    assert said.startswith("usage: offmate plan") and "--crad rtx3060; did you mean --card?" in said
    assert "did you mean" not in refused(capsys, "cards", "more")
    assert refused(capsys, "--nothing").startswith("usage: offmate [-h]")


def test_demo_arguments(tmp_path):
    arguments = parsed("demo", "--gpu-budget", "1.5MiB", "--steps", "3", "--json", str(tmp_path / "out.json"))
    assert arguments.gpu_budget == 3 << 19
    assert arguments.steps == 3
    assert arguments.device == "emulated"
    assert arguments.json == tmp_path / "out.json"


def test_demo_defaults():
    arguments = parsed("demo")
    assert (arguments.gpu_budget, arguments.device, arguments.json) == (None, "emulated", None)


def test_without_a_verb_help_is_printed(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr().out
    assert said.startswith("usage: offmate") and all(verb in said for verb in VERBS)


# Per verb: arguments that cannot work, found by the parser, and found later.
VERBS = {
    "demo": (["--steps", "0"], ["--device", "tpu"]),
    "plan": (["gpt2", "--gpu-budget", "12"], ["gpt2", "--card", "no-such-card"]),
    "fits": (["--batch", "0"], ["--card", "no-such-card"]),
    "cards": (["--json", "/no/such/folder/a.json"], ["--no-such-option"]),
    "show": ([], ["no-such-plan.json"]),
    "check": (["gpt2", "--steps", "0"], ["no-such-file.py"]),
    "profile": (["--device", "a card"], ["--device", "tpu"]),
    "doctor": (["--json", "/no/such/folder/a.json"], ["--no-such-option"]),
    "init": (["--batch-size", "many"], ["--precision", "fp8"]),
    "finetune": (["--batch-size", "many"], ["--model", "a", "--data", "b", "--output", "c", "--precision", "fp8"]),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("later", [False, True])
def test_arguments_that_cannot_work_are_status_2(verb, later, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main([verb, *VERBS[verb][later]])
    except SystemExit as ended:
        status = ended.code
    said = "".join(capsys.readouterr())
    assert status == 2 and "offmate" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_every_verb_is_tried():
    (verbs,) = (action.choices for action in cli._parser()._actions if isinstance(action.choices, dict))
    assert verbs.keys() == VERBS.keys()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--gpu-budget", "12Gb"), "'12Gb' is a size in bits"),
        (("--gpu-budget", "a lot"), "'a lot' is not a size"),
        (("--gpu-budget", "0"), "less than one byte"),
        (("--steps", "0"), "'0' is not a whole number from 1 to"),
        (("--steps", "2.5"), "'2.5' is not a whole number"),
        (("--device", "a card"), "'a card' is not a device"),
        (("--json", "/no/such/folder/out.json"), "'/no/such/folder/out.json' cannot be written: No such file"),
        (("--json", "/"), "'/' cannot be written: Is a directory"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(capsys, argv, said):
    assert said in refused(capsys, "demo", *argv)


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert 'pip install -e ".[hf]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DeviceError("no device"), 1),
        (ArgumentValueError("an unknown model"), 2),
        (InfeasibleBudget("raise gpu_budget", 1), 1),
        (OSError(28, "No space left on device", "a.json"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_one_line_and_a_status(monkeypatch, capsys, error, status):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_demo", fail)
    assert cli.main(["demo"]) == status
    captured = capsys.readouterr().err
    assert captured.startswith("offmate: ")
    assert len(captured.splitlines()) == 1


def test_a_reader_that_has_gone_is_no_error(monkeypatch, capfd):
    """As with `offmate plan ... | head`; Python then flushes its output into nothing."""

    def gone(arguments):
        raise BrokenPipeError

    put = []
    monkeypatch.setattr(cli, "_demo", gone)
    monkeypatch.setattr(cli.os, "dup2", lambda *numbers: put.append(numbers))
    assert cli.main(["demo"]) == 1
    assert len(put) == 1 and capfd.readouterr().err == ""


def test_messages_about_budgets_name_options():
    told = with_options(
        "raise gpu_budget or cpu_budget, or keep fewer outputs (Config(outputs=...)). With "
        "Config(updates='auto'), 3 GiB is enough"
    )
    assert told == "raise --gpu-budget or --cpu-budget. With a new run, 3 GiB is enough"


def test_arguments_are_read_without_loading_torch():
    code = "import sys, offmate.cli; offmate.cli._parser().parse_args(['demo']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_run_that_fails_leaves_no_empty_file(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    assert (output_file(str(new)), output_file(str(old))) == (new, old)
    assert not new.exists()
    assert old.read_text() == "kept"


def test_the_package_can_be_run_where_the_command_is_not_on_the_path():
    found = subprocess.run([sys.executable, "-m", "offmate", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout.split()) == (0, ["offmate", __version__])
