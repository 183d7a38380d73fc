import dataclasses
import pickle
import tempfile
from pathlib import Path

import pytest

from offmate.config import Config
from offmate.errors import BudgetExceeded, DeviceError, InfeasibleBudget, OffmateError
from offmate.split import Split

MADE_ON_IMPORT = Config()


def test_defaults_hold(monkeypatch):
    monkeypatch.delenv("OFFMATE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert Config().cache_dir == "/home/someone/.cache/offmate"
    assert Config() == Config()


def test_tests_have_a_cache_of_their_own():
    assert MADE_ON_IMPORT.cache_dir is not None
    assert Path(tempfile.gettempdir()) in Path(MADE_ON_IMPORT.cache_dir).parents


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("OFFMATE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert Config().cache_dir == "/var/xdg/offmate"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Config().cache_dir.endswith("/.cache/offmate")
    monkeypatch.setenv("OFFMATE_CACHE_DIR", "/plans")
    assert Config().cache_dir == "/plans"


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().solver_gap = 0.5


@pytest.mark.parametrize(
    "good",
    [
        {"solver_time_limit_s": 1},
        {"solver_gap": 0},
        {"options_per_block": 3},
        {"outputs": ("loss", "logits")},
        {"gradients_into": ("loss", "logits")},
        {"cache_dir": None},
        {"solver": "cbc"},
        {"turn_around_steps": 2},
        {"shape_buckets": (128, 1024)},
        {"max_plans": 1},
        {"backend": "inductor"},
        {"updates": "host"},
        {"speculate": True},
        {"speculate": "auto"},
        {"updates": Split(("a",), ("b",))},
    ],
)
def test_accepts(good):
    Config(**good)


@pytest.mark.parametrize(
    "bad",
    [
        {"solver_time_limit_s": 0},
        {"solver_time_limit_s": float("nan")},
        {"solver_time_limit_s": "60"},
        {"updates": "cpu"},
        {"updates": {"a": "host"}},
        {"solver_gap": 1.0},
        {"solver_gap": -0.1},
        {"options_per_block": 2},
        {"options_per_block": 8.0},
        {"options_per_block": True},
        {"outputs": "loss"},
        {"outputs": ["loss"]},
        {"outputs": ()},
        {"outputs": ("loss", 3)},
        {"gradients_into": "logits"},
        {"gradients_into": ["logits"]},
        {"gradients_into": ()},
        {"cache_dir": ""},
        {"cache_dir": 5},
        {"solver": "gurobi"},
        {"turn_around_steps": 1},
        {"shape_buckets": [128]},
        {"shape_buckets": (1024, 128)},
        {"shape_buckets": (0,)},
        {"max_plans": 0},
        {"backend": "triton"},
        {"speculate": "always"},
        {"speculate": 1},
    ],
)
def test_refuses_and_names_the_field_and_its_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises((TypeError, ValueError)) as caught:
        Config(**bad)
    assert str(caught.value).startswith(f"{name} is {value!r}; it must be ")


def test_errors_share_one_root():
    assert issubclass(BudgetExceeded, DeviceError)
    assert issubclass(DeviceError, OffmateError)
    assert issubclass(OffmateError, RuntimeError)


def test_an_infeasible_budget_keeps_its_values_across_processes():
    error = InfeasibleBudget("too little", budget_bytes=10, least_budget_bytes=20, block="layer 3", step=5)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "too little"
    assert (copy.budget_bytes, copy.least_budget_bytes, copy.block, copy.step) == (10, 20, "layer 3", 5)
