"""The pages quote the numbers of the committed reports, and no others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from bench import page
from bench.aims import Aim
from bench.beside import report as beside
from bench.checkpoint import report as checkpoint
from bench.page import (
    BESIDE_PICTURE,
    COMPARISON,
    PAGE,
    README,
    code_digest,
    describe_age,
    inserted,
    read_report,
    rows,
    with_comparison,
    with_front_rows,
    with_tables,
)
from bench.quota import report as quota
from bench.resume import report as resume
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
        "stall": {"line": {"stall_over_memcpy": summary([1.1, 1.15, 1.3])}},
        "inflation": {"line": {"step_inflation": 0.031}},
        "landing": {"landed": 320, "trials": 320, "wilson_lower_bound": 0.9881, "line": {"sigterm_landed_ratio": 1.0}},
        "peers": {"left_out": {}, "packages": {}, "tiphys": {"throttled": TIMES, "free": TIMES}},
    },
}
BEGIN = "<!-- made from tests/bench/reports/checkpoint.json by `python -m bench.page` -->"
END = "<!-- end -->"


def test_a_row_has_the_median_the_quartiles_and_the_aim():
    measured = {"stall": summary([1.1, 1.15, 1.3]), "runs": 119338, "share": 0.5, "unknown": 7}
    words = {"stall": "a stall", "runs": "of runs", "share": "a share", "absent": "of nothing"}
    assert rows(words, measured, {"stall": Aim("≤", 1.1), "share": Aim("≥", 0.25)}, ["share"])[2:] == [
        "| a stall | 1.15 (1.12 … 1.23) | **missed**: ≤ 1.1 |",
        "| of runs | 119,338 |  |",
        "| a share | 50 % | ≥ 25 % |",
    ]


def test_the_block_of_checkpoints_holds_what_was_measured_beside_what_is_promised():
    lines = checkpoint.block(REPORTED)
    assert "320 of 320 saves landed after SIGTERM (at least 98.8%" in lines[0]
    assert "| stall of a save, times that of a memcpy into warm memory | 1.15 (1.12 … 1.23) | ≤ 1.3 |" in lines
    assert "| how much longer a training step takes during an upload, throttled | 3.1 % | ≤ 10 % |" in lines
    assert "| tiphys | 40 ms | 11.0 s | 40 ms | 11.0 s |" in lines


def test_the_block_is_exchanged_and_nothing_else():
    lines = checkpoint.block(REPORTED)
    once = inserted(f"# Tiphys\n\n{BEGIN}\nold\n{END}\n\nmore\n", "checkpoint.json", lines)
    block = "\n".join([BEGIN, *lines, END])
    assert once == f"# Tiphys\n\n{block}\n\nmore\n"
    assert inserted(once, "checkpoint.json", lines) == once


def test_a_page_without_a_place_for_it_is_refused():
    with pytest.raises(ValueError, match="the page needs the lines"):
        inserted("# Tiphys\n", "checkpoint.json", [])


@pytest.mark.parametrize(
    ("path", "write", "held"),
    [(PAGE, with_tables, "| ≥ "), (README, with_front_rows, "| ≥ "), (COMPARISON, with_comparison, "| right, ")],
)
def test_a_page_quotes_the_committed_reports(path: Path, write: Callable[[str], str], held: str):
    text = path.read_text()
    assert write(text) == text, "run `PYTHONPATH=tests python -m bench.page`"
    assert held in text


def test_the_picture_of_the_comparison_is_that_of_the_committed_report():
    assert BESIDE_PICTURE.read_text() == beside.picture(read_report("beside")), "run `python -m bench.page`"
    assert f"images/{BESIDE_PICTURE.name})" in COMPARISON.read_text()


def test_figures_older_than_the_code_that_they_measure_are_named():
    now = code_digest("resume")
    report = {"parts": {"plan": {}, "decide": {}}, "code": {"plan": now, "decide": now}}
    assert describe_age("resume", report) == []
    [_, line] = describe_age("resume", {**report, "code": {"plan": now, "decide": "0" * 64}})
    assert line.startswith("The code has changed since decide was measured (`controller/tiphys_controller`, ")
    assert line.endswith(": `make bench-resume` measures it again.")
    assert "since all rows were measured" in describe_age("quota", {"measured": {"core": {}}})[1]


@pytest.mark.parametrize("change", ["bytes", "name"])
def test_code_that_changed_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str):
    monkeypatch.setattr(page, "ROOT", tmp_path)
    module = tmp_path / "plugin/tiphys_plugin/quota/ledger/kern.py"
    module.parent.mkdir(parents=True)
    module.write_text("quota = 1\n")
    before = code_digest("quota")
    if change == "bytes":
        module.write_text("quota = 2\n")
    else:
        module.rename(module.with_name("kern_2.py"))
    assert code_digest("quota") != before
    (tmp_path / "tiphys/store").mkdir(parents=True)
    (tmp_path / "tiphys/store/s3.py").write_text("")
    after = code_digest("quota")
    (tmp_path / "tiphys/store/s3.py").write_text("# another folder\n")
    assert code_digest("quota") == after


def test_readme_is_a_front_page():
    assert len(README.read_text().splitlines()) <= 150


def test_the_page_of_queues_quotes_the_committed_report():
    found = read_report("quota")["allocation"]
    best, least = (found[policy]["allocated_percent"] for policy in ("best-fit", "fragmentation"))
    published = " and ".join(f"{one['published_percent']} %" for one in (found["best-fit"], found["fragmentation"]))
    page = " ".join((README.parent / "docs" / "queues.md").read_text().split())
    assert f"policies use {best:.1f} % and {least:.1f} % of the GPUs" in page
    assert f"for the paper's policy are {published}" in page


def test_the_page_of_the_web_pages_quotes_the_committed_report():
    found = read_report("ui")
    home, run = (round(1000 * found["seconds"][name]["median"]) for name in ("home", "run"))
    size = round(found["bytes"]["run"] / 1000)
    page = " ".join((README.parent / "docs" / "ui.md").read_text().split())
    assert f"a store of {found['runs']:,} runs, of which one has {found['attempts']} attempts" in page
    assert f"and {found['checkpoints']:,} checkpoints" in page
    assert f"takes {home} ms at the server, the page of that run {run} ms" in page
    assert f"its size is {size} kB" in page


@pytest.mark.parametrize("report", [checkpoint, resume, quota])
def test_a_quick_run_is_judged_by_names_that_a_full_run_has(report):
    assert report.QUICK_AIMS.keys() <= report.AIMS.keys()
    assert report.QUICK_AIMS.keys() != report.AIMS.keys()
