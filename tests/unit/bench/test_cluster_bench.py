"""What the benchmark of the shared agent compares."""

from bench.aims import verdicts
from bench.cluster_bench import AIMS, values
from bench.samples import summary


def test_a_burst_is_judged_beside_a_plain_loop_and_times_are_not() -> None:
    load = {"p50_ms": 210.5, "p99_ms": 805.0, "api_requests_per_step": 0.11, "over_plain_loop": summary([0.4, 0.5])}
    report = {"agent": {"loads": {"1": {}, "200": load}}}
    assert list(verdicts(values(report), AIMS)) == [
        "kept    over_plain_loop = 0.45  [0.425 … 0.475, n=2]  (≤ 1.5)",
        "kept    api_requests_per_step = 0.11  (≤ 0.5)",
        "        p50_ms = 210.5  (not judged)",
        "        p99_ms = 805  (not judged)",
    ]
