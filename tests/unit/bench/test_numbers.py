"""The numbers of a benchmark that a person compares: percentiles, and the line at its end."""

import pytest
from bench.cluster_bench import summary
from bench.latency import percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0], 50, 1.0),
        (list(range(1, 201)), 99, 198),
        ([5.0, 9.0], 99, 9.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_the_last_line_holds_what_is_compared() -> None:
    load = {"p50_ms": 210.5, "p99_ms": 805.0, "api_requests_per_step": 0.11}
    report = {
        "agent": {"loads": {"1": {}, "200": load}},
        "sidecar": {"loads": {"1": {"p50_ms": 4100.0}}, "sidecar_after_load": {"rss_mib": 21.5}},
        "install_seconds": 28.0,
    }
    assert summary(report) == (
        "agent_p50_ms=210.5 agent_p99_ms=805.0 sidecar_p50_ms=4100.0 sidecar_rss_mib=21.5 "
        "api_requests_per_step=0.11 install_seconds=28.0"
    )
