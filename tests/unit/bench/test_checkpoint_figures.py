"""README quotes the numbers of the committed report, and no others."""

import json

import pytest
from bench.checkpoint.__main__ import README, REPORT
from bench.checkpoint.figures import BEGIN, END, block, inserted
from bench.samples import summary

TIMES = {"stall_seconds": summary([0.04]), "durable_seconds": summary([11.0])}
REPORTED = {
    "machine": {"cores": 2},
    "settings": {
        "state": "64 float32 arrays, together 1024 MiB",
        "throttle_megabytes_per_second": 100.0,
        "throttle_latency_seconds": 0.02,
    },
    "parts": {
        "stall": {"steady_seconds": summary([0.05, 0.06, 0.07]), "line": {"stall_over_memcpy": 1.15}},
        "corruption": {"line": {"corrupt_found": 1000, "corrupt_total": 1000, "good_refused": 0}},
        "inflation": {"line": {"step_inflation": 0.031}},
        "landing": {"landed": 320, "trials": 320, "wilson_lower_bound": 0.9881, "line": {"sigterm_landed_ratio": 1.0}},
        "peers": {"left_out": {}, "packages": {}, "tiphys": {"throttled": TIMES, "free": TIMES}},
    },
}


def test_the_block_holds_what_was_measured_beside_what_is_promised():
    lines = block(REPORTED).splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    assert "stalls training for 60 ms; 320 of 320 saves landed after SIGTERM (at least 98.8%" in lines[1]
    assert "| stall of a save, times that of a memcpy into warm memory | 1.15 | ≤ 1.3 |" in lines
    assert "| damaged runs, caches and checkpoints that were noticed | 1,000 of 1,000 | ≥ 1,000 |" in lines
    assert "| how much longer a training step takes during an upload, throttled | 3.1% | ≤ 10% |" in lines
    assert "| tiphys | 40 ms | 11.0 s | 40 ms | 11.0 s |" in lines


def test_the_block_is_exchanged_and_nothing_else():
    text = f"# Tiphys\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    once = inserted(text, REPORTED)
    assert once == f"# Tiphys\n\n{block(REPORTED)}\n\nmore\n"
    assert inserted(once, REPORTED) == once


def test_a_readme_without_a_place_for_it_is_refused():
    with pytest.raises(ValueError, match="README needs the lines"):
        inserted("# Tiphys\n", REPORTED)


def test_readme_quotes_the_committed_report():
    text = README.read_text()
    assert (BEGIN in text) == REPORT.exists(), "README and the report of make bench-checkpoint come together"
    if REPORT.exists():
        assert inserted(text, json.loads(REPORT.read_text())) == text, "run `python -m bench.checkpoint --readme`"
