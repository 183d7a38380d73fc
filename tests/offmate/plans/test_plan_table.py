import io

import pytest
from rich.console import Console

from offmate.plans.table import BlockRow, class_lines, class_table, plan_table, spans

MIB = 1 << 20


def row(
    index: int, class_id: str, option: str = "keep", kept_bytes: int = 2 * MIB, params_bytes: int = MIB
) -> BlockRow:
    return BlockRow(str(index), class_id, option, kept_bytes, 0, 0, params_bytes, 0, params_bytes)


def printed(rows: list[BlockRow], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(plan_table(rows))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0], "0"),
        ([1, 2], "1, 2"),
        ([3, 4, 5], "3–5"),
        ([2, 4, 6], "2, 4, 6"),
        ([1, 3, 5, 7, 11], "1, 3 … 7, 11"),
        ([1, 4, 5, 6], "1, 4–6"),
        ([0, 1, 2, 10, 12, 14, 16], "0–2, 10, 12 … 16"),
    ],
)
def test_block_numbers_are_shortened(indices, text):
    assert spans(indices) == text


def test_blocks_that_are_alike_share_a_row_and_all_are_added_up():
    rows = [row(0, "A"), *(row(i, "BC"[i % 2]) for i in range(1, 9)), row(9, "A", params_bytes=512)]
    lines = [line.split() for line in printed(rows, 80)]
    assert ["1,", "3", "…", "7", "C", "keep", "2.00", "-", "-", "1.00", "-", "1.00"] in lines
    assert ["9", "A", "keep", "2.00", "-", "-", "<0.01", "-", "<0.01"] in lines
    assert ["all", "20.00", "-", "-", "9.00", "-", "9.00"] in lines


def test_a_model_of_many_blocks_fits_eighty_columns():
    rows = [row(i, "AB"[i % 3 == 0], f"mixture {i % 7}", i % 5 * 900 * MIB, 800 * MIB) for i in range(160)]
    lines = printed(rows, 80)
    assert max(map(len, lines)) <= 80
    assert any("128000" in line for line in lines)


def test_the_mixtures_of_a_class_share_a_row_that_follows_its_other_options():
    rows = [row(0, "A"), row(1, "B", "mixture 5"), row(2, "C"), row(3, "B", "mixture 2"), row(4, "B")]
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(class_table(rows))
    lines = [line.split()[:4] for line in console.file.getvalue().splitlines() if "×" in line]
    assert [" ".join(line) for line in lines] == ["1 × A keep", "2 × B mixture", "1 × B keep", "1 × C keep"]
    assert "option mixture" in console.file.getvalue()


def test_blocks_of_a_class_are_added_up_and_silent_ones_share_a_row():
    rows = [
        row(0, "A"),
        row(1, "B"),
        row(2, "B"),
        row(3, "B", "offload", 0),
        row(4, "C", "keep", 0, 0),
        row(5, "D", "keep", 0, 0),
    ]
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(class_table(rows))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["2", "×", "B", "keep", "4.00", "-", "-", "2.00", "-", "2.00"] in lines
    assert ["2", "×", "other", "-", "-", "-", "-", "-", "-", "-"] in lines
    assert ["all", "6.00", "-", "-", "4.00", "-", "4.00"] in lines
    assert list(class_lines(rows)) == [
        "class A, 1 × keep: kept 2 MiB, parameters 1 MiB, updated by the CPU 1 MiB",
        "class B, 2 × keep: kept 4 MiB, parameters 2 MiB, updated by the CPU 2 MiB",
        "class B, 1 × offload: parameters 1 MiB, updated by the CPU 1 MiB",
        "2 other: nothing to keep or move",
    ]
