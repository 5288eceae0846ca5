"""The line at the end of the benchmark of plugin steps."""

from bench.cluster_bench import summary


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
