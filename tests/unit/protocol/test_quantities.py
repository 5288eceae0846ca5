"""Amounts of memory, read and written as Kubernetes does, and durations, as Argo and Go do.

| Text                    | Duration    | Go's duration |
|-------------------------|-------------|---------------|
| 500ms, 10s, 1h30m, 1.5m | sum of both | the same      |
| 3h 20m, 10 m, 2d, 1e3s  | sum of both | refused       |
| 7, 0.5, 1e3             | seconds     | refused       |
| empty, s, 1x, -3s       | refused     | refused       |

In a Workflow only the first row and whole seconds are durations.

| Seconds          | Printed                          |
|------------------|----------------------------------|
| below 1          | whole milliseconds               |
| below 60         | seconds, one decimal if not zero |
| from 60 on       | the two largest units            |
| negative         | the same after a minus sign      |
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.errors import UsageError
from tiphys.protocol.quantities import (
    format_argo_duration,
    format_bytes,
    format_duration,
    format_memory_quantity,
    parse_argo_duration_seconds,
    parse_duration_seconds,
    parse_go_duration_seconds,
    parse_memory_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8Gi", 8 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("2G", 2_000_000_000), ("1e9", 10**9), (4096, 4096)],
)
def test_amounts_are_read(text, size):
    assert parse_memory_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "much", "8GB", "-1Gi", "0", "{{inputs.parameters.memory}}"])
def test_an_invalid_amount_is_refused(text):
    with pytest.raises(UsageError, match=r"its limit: .* is not an amount of memory; write it like 8Gi"):
        parse_memory_bytes(text, "its limit")


@pytest.mark.parametrize(("size", "text"), [(12 << 30, "12Gi"), ((12 << 30) + 1, "12289Mi"), (1, "1Mi")])
def test_amounts_are_written_and_never_rounded_down(size, text):
    assert format_memory_quantity(size) == text
    assert parse_memory_bytes(format_memory_quantity(size), "x") >= size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("2s", 2),
        ("1m30s", 90),
        ("1h30m", 5400),
        ("1.5m", 90),
        ("0s", 0),
        ("250us", 2.5e-4),
        ("7ns", 7e-9),
    ],
)
def test_durations_of_go_are_durations(text, seconds):
    assert parse_go_duration_seconds(text) == parse_duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7), ("0.5", 0.5), ("1e3", 1000), ("1e+06s", 1e6), (" 10 m ", 600), ("3h 20m", 12000), ("2d", 172800)],
)
def test_durations_of_people_may_be_written_more_freely_than_those_of_go(text, seconds):
    assert parse_duration_seconds(text) == pytest.approx(seconds)
    with pytest.raises(UsageError, match=r"not a duration of Go; write for example 500ms"):
        parse_go_duration_seconds(text)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), ("10s", 10), ("1h30m", 5400), ("1.5m", 90), ("300ms", 0.3)])
def test_durations_of_a_workflow_are_compact_or_whole_seconds(text, seconds):
    assert parse_argo_duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0.5", "1e3", "1e+06s", "10 m", "3h 20m", "2d", "-3s", "soon"])
def test_the_local_engine_refuses_durations_that_argo_refuses(text):
    with pytest.raises(UsageError, match=r"is not a duration of Argo; write for example 10s"):
        parse_argo_duration_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.0, "5s"), (300.0, "300s"), (0.5, "0.5s"), (1_036_800.0, "1036800s"), (0.00005, "0.00005s")]
)
def test_durations_are_written_for_argo_without_an_exponent(seconds, text):
    assert format_argo_duration(seconds) == text
    assert parse_argo_duration_seconds(text) == parse_go_duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "s", "10 minutes", "1x", "-3s", "1h30", "1.s", "auto"])
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(UsageError, match=r"is not a duration; write for example 10s, 5m or 1h30m"):
        parse_duration_seconds(text)
    with pytest.raises(UsageError, match=r"is not a duration of Go"):
        parse_go_duration_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0004, "0s"),
        (0.04, "40ms"),
        (0.4, "400ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (2.5, "2.5s"),
        (59, "59s"),
        (59.97, "1m"),
        (60, "1m"),
        (61, "1m 1s"),
        (12000, "3h 20m"),
        (3605, "1h"),
        (86400, "1d"),
        (90061, "1d 1h"),
        (30 * 86400, "30d"),
        (-90, "-1m 30s"),
    ],
)
def test_durations_are_printed_in_two_units(seconds, text):
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e9))
def test_a_printed_duration_reads_back_to_within_its_second_unit(seconds):
    assert parse_duration_seconds(format_duration(seconds)) == pytest.approx(seconds, rel=0.05, abs=0.001)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536 << 20, "1.5 GiB"), (5000 << 40, "5000 TiB")],
)
def test_sizes_are_printed_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
