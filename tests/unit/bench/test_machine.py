"""What a benchmark says of the machine."""

from typing import Any

import pytest
from bench.machine import NoiseProbe, describe_noise, machine

QUIET = {
    "seconds": 61.0,
    "load_average_before": 0.4,
    "steal_percent": 0.1,
    "spread_percent": 1.5,
    "drift_percent": -0.7,
}


def test_a_quiet_machine_is_called_quiet():
    assert describe_noise(QUIET, cores=2) == (
        "machine: quiet; load 0.40 on 2 cores before, 0.1 % of CPU time stolen, fixed loop spread 1.5 %, "
        "drift -0.7 % in 61 s"
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"load_average_before": 3.0}, "load"),
        ({"steal_percent": 4.0}, "steal"),
        ({"spread_percent": 30.0}, "spread"),
        ({"drift_percent": -20.0}, "drift"),
    ],
)
def test_every_kind_of_noise_is_named(change: dict[str, Any], cause: str):
    assert f"machine: NOISY ({cause}): only ratios count; load" in describe_noise(QUIET | change, cores=2)


def test_the_probe_reads_this_machine():
    noise = NoiseProbe().report()
    assert noise["seconds"] >= 0
    assert noise["loop_seconds"]["before"]["median"] > 0
    assert 0 <= noise["steal_percent"] <= 100
    assert "machine: " in describe_noise(noise, machine()["cores"])
