"""Plan files that nobody should rely on: each is refused at load, in a sentence that names the place."""

import copy
import itertools
import json

import pytest

import offmate
from offmate import PlanFileError

from ..loops import plan


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan("middle").save(path)
    return json.loads(path.read_text())


def _places(data, place=()):
    """Yield the places of a file's values: all keys, and the first entry of every list."""
    yield place
    entries = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, value in entries:
        yield from _places(value, (*place, key))


def _one_of_each(data):
    """Keep two of the entries of mappings whose keys are names."""
    for parent in ("computes", "item_bytes", "update_cpu_s", "update_device_s"):
        data["schedule"][parent] = dict(list(data["schedule"][parent].items())[:2])
    data["classes"] = dict(list(data["classes"].items())[:1])
    for one in data["classes"].values():
        one["kernel_bytes"] = dict(list(one["kernel_bytes"].items())[:1])
    return data


def _with(data, place, value):
    changed = copy.deepcopy(data)
    at = changed
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return changed


def test_every_place_holds_something_else(data, tmp_path):
    """Another type, a number that cannot be, or nothing: a plan that shows itself, or a sentence."""
    path, refused = tmp_path / "plan.json", 0
    values = itertools.cycle((None, True, -1, float("nan"), 10**40, "x", [], {"a": 1}, 1.5))
    for place in list(_places(_one_of_each(copy.deepcopy(data))))[1:]:
        path.write_text(json.dumps(_with(data, place, next(values))))
        try:
            read = offmate.load_plan(path)
        except PlanFileError as error:
            assert str(path) in str(error) and len(str(error)) < 2000
            refused += 1
        else:
            read.explain()
    assert refused > 100


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("fixed_bytes",), -1, "fixed_bytes is -1; it must be finite and not negative"),
        (("fixed_bytes",), float("nan"), "plan.fixed_bytes: expected int, found nan"),
        (("gap",), "small", "plan.gap: expected float, found 'small'"),
        (("gap",), float("inf"), "gap is inf; it must be finite"),
        (("problem",), [], "problem: expected an object, found a list"),
        (("classes",), [], "classes: expected an object, found a list"),
        (("schedule",), [], "not a schedule: expected an object"),
        (("schedule", "options", 0), 99, "chooses option 99 for block 0, which has"),
        (("schedule", "host_bytes"), -1, "host_bytes: is -1, must not be negative"),
        (("schedule", "rates", "in_bytes_per_s"), 0, "in_bytes_per_s is 0"),
        (("problem", "turn_around_steps"), 10**40, "at most 10,000 can be planned"),
    ],
)
def test_a_value_that_cannot_be_is_named(data, tmp_path, place, value, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(_with(data, place, value)))
    with pytest.raises(PlanFileError, match=words):
        offmate.load_plan(path)


def test_files_that_hold_no_plan(data, tmp_path):
    path = tmp_path / "plan.json"
    for text, words in (
        ("[" * 100_000, "nested too deeply"),
        ('{"endless_s": 1.0, "points": []}', "the curve that `offmate plan --sweep` wrote, not a plan"),
        ("{}", "it holds an object without a format"),
        ("3", "it holds a int"),
    ):
        path.write_text(text)
        with pytest.raises(PlanFileError, match=words):
            offmate.load_plan(path)
    with pytest.raises(PlanFileError, match="Is a directory"):
        offmate.load_plan(tmp_path)
