import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offmate.errors import ArgumentTypeError, ArgumentValueError
from offmate.sizes import format_bytes, format_least_bytes, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (12 << 30, 12 << 30),
        ("1048576", 1 << 20),
        ("7 B", 7),
        ("12GiB", 12 << 30),
        ("12GB", 12 * 10**9),
        ("500 MiB", 500 << 20),
        ("1.5GiB", 3 << 29),
        ("  64KiB ", 64 << 10),
        ("3kB", 3000),
        ("0.1GB", 10**8),
        ("1.0000001KiB", 1024),
        ("2 TiB", 2 << 40),
        ("1PB", 10**15),
    ],
)
def test_reads_what_people_write(value, expected):
    assert parse_bytes(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("12Gb", "bits"),
        ("12 Gib", "bits"),
        ("2tib", "bits"),
        ("-3GiB", "not a size"),
        ("0", "less than one byte"),
        (0, "less than one byte"),
        (-5, "less than one byte"),
        ("0.2B", "less than one byte"),
        ("12XB", "unknown unit 'XB'"),
        ("12G", "unknown unit 'G'"),
        ("1e9", "not a size"),
        ("nan", "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("auto", "not a size"),
    ],
)
def test_refuses_text_that_is_no_size(value, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_bytes(value)
    assert repr(value) in str(caught.value)
    assert '"12GiB"' in str(caught.value)


@pytest.mark.parametrize("value", [1.5, 12e9, float("nan"), True, None, b"12GiB"])
def test_refuses_other_types(value):
    with pytest.raises(TypeError, match=re.escape(repr(value))) as caught:
        parse_bytes(value)
    assert '"12GiB"' in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536 << 20, "1.5 GiB"),
        (11 << 30, "11 GiB"),
        (123456789, "118 MiB"),
        (-5000, "-4.88 KiB"),
        ((1 << 20) - 1, "1 MiB"),
    ],
)
def test_writes_three_significant_digits(size_bytes, text):
    assert format_bytes(size_bytes) == text


@settings(max_examples=100)
@given(st.integers(1, 1 << 60))
def test_what_is_printed_is_close(size_bytes):
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= 0.006 * size_bytes


@settings(max_examples=100)
@given(st.integers(1, 1 << 60))
def test_a_least_size_suffices_when_typed_back(size_bytes):
    assert size_bytes <= parse_bytes(format_least_bytes(size_bytes)) <= 1.011 * size_bytes + 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3GB/s", 3e9), (" 500 MiB /s", 500 << 20), ("1.5 GiB/ s", 3 << 29), (7, 7.0), (2.5e9, 2.5e9)],
)
def test_a_rate_is_a_size_per_second(value, expected):
    assert parse_rate(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("3GB", "'3GB' is not a rate; write \"3GB/s\""),
        ("3Gb/s", "bits"),
        ("3GB/h", "not a rate"),
        ("/s", "'/s' is not a rate"),
        ("-7GB/s", "'-7GB/s' is not a rate above zero; write"),
        ("0GB/s", "not a rate"),
        (0, "not positive"),
        (-1.0, "not positive"),
        (float("nan"), "not positive and finite"),
        (float("inf"), "not positive and finite"),
        (True, "is a bool"),
        (None, "is a NoneType"),
    ],
)
def test_refuses_what_is_no_rate(value, reason):
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=f"^read_rate: .*{reason}"):
        parse_rate(value, "read_rate")
