"""`offmate profile` and `offmate doctor`: figures with sources that planning accepts, and nothing private."""

import getpass
import json
import os
import socket

import pytest
from offmate.solver.backends import cpsat
from torch.optim import AdamW

import offmate
from offmate import cli
from offmate.errors import OffmateError
from offmate.machines import benchmark as rates
from offmate.machines import doctor, hardware

TINY = rates.Sizes(copies_bytes=(1 << 12, 1 << 16), matrix=32, elements=1 << 12)


@pytest.fixture(scope="module")
def measured():
    return rates.measure_machine(lambda phase, share: None, TINY, masters=offmate.with_master_weights(AdamW))


def test_what_is_measured_is_a_hardware_file(measured, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(measured))
    machine = hardware.load(str(path))
    assert machine.cpu_master_update_bytes_per_s == measured["cpu_master_update_bytes_per_s"]["value"]
    assert machine.shared_cores and machine.name.startswith("emulated device on ")
    assert {name for name, _ in machine.matrix_flops_per_s} == {"float32", "bfloat16", "float16"}
    assert 0 < machine.default_budget_bytes < machine.device_memory_bytes
    assert machine.per_copy_s == measured["per_copy_s"]["value"]
    copies = measured["copies"]
    assert {(row["direction"], row["bytes"]) for row in copies} == {
        (direction, size) for direction in ("in", "out", "both") for size in TINY.copies_bytes
    }
    assert all(row["bytes_per_s"] > 0 for row in copies)


def test_every_figure_has_a_source(measured):
    figures = [value for value in measured.values() if isinstance(value, dict) and "value" in value]
    figures += measured["matrix_flops_per_s"].values()
    assert len(figures) == 14
    assert all(figure["source"] and figure["value"] >= 0 for figure in figures)
    assert [figure for figure in figures if not figure["value"]] in ([], [measured["per_copy_s"]])
    assert "PyTorch" in measured["in_bytes_per_s"]["source"]


def test_profile_shows_and_writes(monkeypatch, capsys, tmp_path, measured):
    monkeypatch.setattr(rates, "measure_machine", lambda say, kind, masters: measured)
    path = tmp_path / "mine.json"
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(["profile", "--json", str(path)]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= columns for line in text.splitlines()) and "…" not in text
        assert "Copies per second" in text and "GFLOP/s" in text
        assert "GFLOP/s" in text and " 0 GFLOP/s" not in text
    assert json.loads(path.read_text()) == measured
    for load, busy in ((0.3, False), (4.0, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert cli.main(["profile"]) == 0
        assert ("rates may be too low" in " ".join(capsys.readouterr().out.split())) == busy
    assert cli.main(["profile", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_measured_machine_can_be_planned_for(monkeypatch, capsys, tmp_path, measured):
    pytest.importorskip("transformers")
    monkeypatch.setenv("OFFMATE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(measured))
    arguments = ["plan", "tiny-llama", "--batch", "1", "--seq-len", "32", "--hardware", str(path), "--quiet"]
    assert cli.main([*arguments, "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"]["rates"]["shared_cores"] is True


def test_a_card_is_measured_where_operators_run(sim, tmp_path):
    measured = rates.measure_machine(lambda phase, share: None, TINY, "sim:0")
    path = tmp_path / "card.json"
    path.write_text(json.dumps(measured))
    machine = hardware.load(str(path))
    assert machine.name.startswith("simulated accelerator on ") and not machine.shared_cores
    assert machine.device_memory_bytes == pytest.approx(sim.mem_get_info()[1], rel=1e-3)
    assert "simulated accelerator" in measured["device_update_bytes_per_s"]["source"]
    assert {row["direction"] for row in measured["copies"]} == {"in", "out", "both"}


def test_doctor_looks_at_cards(sim, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    assert "simulated accelerator: 16 GiB of 16 GiB free; copies in" in capsys.readouterr().out
    card = json.loads((tmp_path / "doctor.json").read_text())["devices"][1]
    assert card["memory_bytes"] == sim.mem_get_info()[1] and card["both_bytes_per_s"] > 0


def test_no_card_to_profile():
    assert cli.main(["profile", "--device", "cuda"]) == 2


def test_doctor_prints_what_a_report_needs(monkeypatch, capsys, tmp_path):
    path = tmp_path / "doctor.json"
    for columns in (40, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert cli.main(["doctor", "--json", str(path)]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= columns for line in text.splitlines())
        for word in (
            "versions",
            "system",
            "host",
            "device",
            "pinned",
            "solvers",
            "highs: works",
            "cp-sat: works",
            "may lock",
        ):
            assert word in text
    found = json.loads(path.read_text())
    assert found["versions"]["torch"] and found["devices"][0]["in_bytes_per_s"] > 0


def test_doctor_says_what_wsl_limits_and_which_solver_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "is_wsl", lambda: True)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (doctor.resource.RLIM_INFINITY, 0))
    monkeypatch.setattr(cpsat, "CHILD", tmp_path / "no-such-file.py")
    assert cli.main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert ".wslconfig" in said and "a process may lock any amount of memory" in said and "cp-sat: CP-SAT ended" in said


def test_doctor_names_no_user_host_or_folder(capsys):
    cli.main(["doctor"])
    text = capsys.readouterr().out
    private = [os.path.expanduser("~"), os.getcwd(), socket.gethostname(), getpass.getuser()]
    assert [word for word in private if len(word) > 3 and word in text.replace("\n", "")] == []


def test_a_processor_without_a_name(tmp_path):
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert rates.processor(listed) == "Some CPU @ 2 GHz"
    assert rates.processor(tmp_path / "absent")


def test_a_hardware_file_of_another_kind(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("[]")
    with pytest.raises(OffmateError, match="not a hardware file"):
        hardware.load(str(path))
