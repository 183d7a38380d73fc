import pytest
from offmate.runtime.ledger import Ledger, LimitExceeded


def test_counts():
    ledger = Ledger(100)
    ledger.add("p", 30)
    ledger.made(20, workspace_bytes=10)
    assert (ledger.level_bytes, ledger.peak_bytes) == (50, 60)
    ledger.remove("p", 30)
    ledger.freed(20)
    assert (ledger.level_bytes, ledger.peak_bytes) == (0, 60)
    ledger.reset_peak()
    assert ledger.peak_bytes == 0


def test_kinds_are_of_what_is_held_now():
    ledger = Ledger(100)
    ledger.add("p", 30)
    ledger.add("s", 20)
    ledger.add("a", 10)
    ledger.made(5)
    ledger.remove("g", 2)
    assert {k: v for k, v in ledger.by_kind.items() if v} == {
        "parameters": 30,
        "optimizer states": 20,
        "activations and gradients": 13,
    }
    ledger.clear()
    assert ledger.level_bytes == 0 and not any(ledger.by_kind.values())


@pytest.mark.parametrize("workspace_bytes", [0, 41])
def test_limit_is_hard(workspace_bytes):
    ledger = Ledger(100)
    ledger.add("p", 60)
    ledger.made(40 - workspace_bytes if workspace_bytes <= 40 else 0)
    with pytest.raises(LimitExceeded, match=r"101 bytes would be held, but the budget is 100; .*parameters 60"):
        ledger.made(0 if workspace_bytes else 1, workspace_bytes)
    assert ledger.peak_bytes <= 100
