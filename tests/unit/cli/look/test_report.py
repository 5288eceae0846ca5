"""``tiphys report``: a table that adds up, a document for programs, a page for whoever would rather look.

The run: attempt 1 trains from 15 to 100 s and is saved at 80; attempt 2 goes on from there and ends well at 200.
"""

import json
import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from support.builders.lineage import RUN, claim_of, end_of, ref, write_claim, write_end, write_run
from tiphys_controller.goodput import (
    AttemptTimeUsage,
    Recovery,
    StepTimeUsage,
    TimeUsage,
    measure_time_usage,
)

from hera_pipelines.cli import main
from hera_pipelines.draw.report_html import CHART_WIDTH, MAX_ROWS, report_page
from tiphys.lineage.attempt_phases import PhaseSpan, TimePhase
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import AttemptEndOutcome, LastCheckpoint, StartTimes
from tiphys.store import DirectoryStore

SVG = "{http://www.w3.org/2000/svg}"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(seconds):
    return NOON + timedelta(seconds=seconds)


@pytest.fixture
def store(tmp_path):
    place = DirectoryStore(tmp_path / "store")
    write_run(place, gpu=GpuRequest(gpus=4, queue="research"))
    saved = LastCheckpoint(checkpoint=ref(1, 50), at=at(80), began=StartTimes(opened_at=at(10), first_step_at=at(15)))
    write_claim(place, claim_of(1).model_copy(update={"written_at": at(0)}))
    write_end(
        place, end_of(1).model_copy(update={"written_at": at(103), "terminating_at": at(100), "last_checkpoint": saved})
    )
    write_claim(place, claim_of(2, ref(1, 50)).model_copy(update={"written_at": at(110)}))
    write_end(place, end_of(2, outcome=AttemptEndOutcome.DONE).model_copy(update={"written_at": at(200)}))
    return place


@pytest.fixture
def tiphys(store, tmp_path, capsys):
    def call(*arguments):
        code = main(["report", *map(str, arguments), "--store", str(tmp_path / "store")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_the_table_of_a_run_tells_phases_causes_and_recoveries(tiphys):
    code, out, _ = tiphys(RUN)
    steps, causes, recoveries, figures = out.strip().split("\n\n")
    assert code == 0
    header, row = map(cells, steps.splitlines())
    assert dict(zip(header, row, strict=True)) == {
        "STEP": "fit",
        "GPUS": "4",
        "ATTEMPTS": "2",
        "SPAN": "3m 20s",
        "STARTING": "10s",
        "FIRST STEP": "5s",
        "USEFUL": "2m 35s",
        "DISCARDED": "20s",
        "DETECTING": "3s",
        "WAITING": "7s",
        "LOST": "38s",
        "GOODPUT": "80.3%",
    }
    assert cells(causes.splitlines()[1]) == ["preemption", "1", "2m 32s", "10s"]
    assert cells(recoveries.splitlines()[1])[:3] == ["fit/1", "preemption", "3s"]
    assert figures.startswith("goodput 80.3%, failures 1, GPU time held 12m 52s")
    assert figures.endswith("GPU time lost 2m 32s"), "as the causes say"


def test_every_run_and_every_queue_is_reported_where_none_is_named(tiphys, store):
    write_run(store, run="idle-1")
    _, out, _ = tiphys()
    runs, queues = out.strip().split("\n\n")
    assert [cells(line)[0] for line in runs.splitlines()] == ["RUN", RUN, "idle-1"]
    assert cells(runs.splitlines()[2])[-1] == "-"
    assert [cells(line)[0] for line in queues.splitlines()] == ["QUEUE", "research"]


def test_the_document_adds_up_to_what_was_held(tiphys):
    _, out, _ = tiphys(RUN, "-o", "json")
    document = json.loads(out)
    (run,) = document["runs"]
    times = run["gpu_seconds"]
    assert times.pop("held") == pytest.approx(sum(times.values())) == 4 * (103 + 90)
    assert (run["goodput"], run["costs"]["preemption"]["failures"]) == (pytest.approx(155 / 193), 1)
    assert run["lost_gpu_seconds"] == run["costs"]["preemption"]["lost"] == 4 * 38
    assert [queue["name"] for queue in document["queues"]] == ["research"]


def test_the_page_draws_every_phase_at_its_place(store):
    found = measure_time_usage(RunHistory.for_display(store, RUN), at(200))
    page = report_page("What failures have cost <digits>", [("goodput", "77.5%")], found)
    assert "&lt;digits&gt;" in page
    times, recovery = (ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    bars = find_bars(times)
    per_second = CHART_WIDTH / 200
    begin, _ = bars["attempt 1: starting 10s; it ended by preemption"]
    x, width = bars["attempt 1: discarded 20s; it ended by preemption"]
    assert (x - begin, width) == (pytest.approx(80 * per_second, abs=0.02), pytest.approx(20 * per_second, abs=0.01))
    assert sum(width for _, width in find_bars(recovery).values()) == pytest.approx(CHART_WIDTH, abs=0.1)


def find_bars(drawing):
    """Left edge and width of each bar, by its tooltip."""
    corners = {
        path[0].text: re.findall("[MH]([0-9.]+)", path.get("d")) for path in drawing.iter(f"{SVG}path") if path[:]
    }
    return {tooltip: (float(left), float(right) - float(left)) for tooltip, (left, right, _) in corners.items()}


ITEM = "optimizer=adamw lr=0.0003 width=2048"


def many_steps(count: int) -> TimeUsage:
    """Items of a fan-out, each of which was preempted once."""
    with_item = measured_step().model_copy(update={"name": "fit[0]", "item": ITEM})
    return TimeUsage(
        name=RUN,
        steps=tuple(with_item.model_copy(update={"name": f"fit[{index}]"}) for index in range(count)),
    )


def measured_step() -> StepTimeUsage:
    begun = at(0)
    entries = tuple(
        AttemptTimeUsage(
            attempt=number,
            submission=1,
            outcome=None,
            failed_by="preemption" if number == 1 else "",
            spans=(PhaseSpan(phase=TimePhase.USEFUL, begin=begun, end=at(50)),),
        )
        for number in (1, 2)
    )
    parts = {"detect": 1, "decide": 0, "submit": 0, "wait": 2, "start": 1, "load": 0, "first_step": 0}
    recovery = Recovery(after=1, failed_by="preemption", **parts)
    return StepTimeUsage(step="x", gpus=1, began_at=begun, ended_at=at(100), entries=entries, recoveries=(recovery,))


def test_the_page_names_items_by_value_with_room_for_every_label():
    page = report_page("Report", [], many_steps(2))
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    labels = [label for drawing in drawings for label in drawing.iter(f"{SVG}text") if label.get("class") == "end"]
    assert [label.text for label in labels[:2]] == [f"fit[0] {ITEM}", f"fit[1] {ITEM}"]
    assert [label.text for label in labels[2:]] == [f"fit[0]/1 {ITEM}", f"fit[1]/1 {ITEM}"]
    assert all(float(label.get("x")) >= 7 * len(label.text) for label in labels)


def test_the_page_says_how_much_it_leaves_out():
    assert "shown" not in report_page("Report", [], many_steps(MAX_ROWS))
    page = report_page("Report", [], many_steps(MAX_ROWS + 8))
    assert f"{MAX_ROWS} of {MAX_ROWS + 8} shown: those that began first." in page
    assert f"{MAX_ROWS} of {MAX_ROWS + 8} shown: the longest." in page


def test_a_page_tells_of_one_run(tiphys, tmp_path):
    code, _, err = tiphys("-o", "html")
    assert (code, "a page shows one run" in err) == (2, True)
    assert tiphys(RUN, "--output", "x.html")[0] == 2
    code, out, err = tiphys(RUN, "-o", "html", "--output", tmp_path / "report.html")
    assert (code, out) == (0, "")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert tiphys(RUN, "-o", "html", "--output", tmp_path / "none" / "report.html")[0] != 0


def test_a_run_that_is_not_there_is_named(tiphys):
    code, out, err = tiphys("digits-2")
    assert code != 0
    assert out == ""
    assert "digits-2" in err
    assert "digits-1" in err


PRICES = """\
queues: [{name: research, gpus: {own: 8}}]
flavors: [{name: own, gpu_type: A100}]
gpu_prices: {A100: 7.2, "*": 3.6}
"""


def test_gpu_hours_of_a_namespace_cost_what_the_queue_file_says(tiphys, store, tmp_path):
    code, out, err = tiphys("--by", "namespace", "-n", "ml")
    assert code == 0
    assert "no price is known of an unnamed type" in err
    assert out.splitlines()[1].split() == ["2026-03", "ml", "-", "0.2", "-"]
    queues = tmp_path / "queues.yaml"
    queues.write_text(PRICES)
    code, out, err = tiphys("--by", "namespace", "-n", "ml", "--queues", queues, "-o", "json")
    document = json.loads(out)
    assert (code, "no price" in err, document["kind"]) == (0, False, "CostReport")
    seconds = 4 * (103 + 90)
    assert document["costs"] == [
        {"month": "2026-03", "namespace": "ml", "gpu_kind": "", "gpu_seconds": seconds, "cost": seconds / 3600 * 3.6}
    ]
    code, out, _ = tiphys("--by", "namespace", "-n", "ml", "--since", "2026-04", "-o", "json")
    assert json.loads(out)["costs"] == []


def test_a_report_of_namespaces_reads_the_store_of_each(tmp_path, capsys):
    for name, gpus in (("team-a", 1), ("team-b", 2)):
        place = DirectoryStore(tmp_path / name)
        write_run(place, gpu=GpuRequest(gpus=gpus, gpu_type="A100"))
        write_claim(place, claim_of(1).model_copy(update={"written_at": at(0)}))
        write_end(place, end_of(1).model_copy(update={"written_at": at(3600)}))
    queues = tmp_path / "queues.yaml"
    queues.write_text(PRICES)
    url = f"{tmp_path}/{{namespace}}"
    options = ["--by", "namespace", "-n", "team-a", "-n", "team-b", "--queues", str(queues), "--store", url]
    assert main(["report", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [["2026-03", "team-a", "A100", "1.0", "7.20"], ["2026-03", "team-b", "A100", "2.0", "14.40"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--since", "2026-11"], "are for --by namespace"),
        (["--by", "namespace", "digits"], "drop the names of runs"),
        (["--by", "namespace", "--since", "yesterday"], "write 2026-11, 2026-11-15 or 30d"),
        (["--by", "namespace", "-n", "a", "-n", "b"], "is the store of one namespace"),
        (["--by", "queue"], "namespace"),
    ],
)
def test_a_report_of_namespaces_that_cannot_be_made_is_refused(tiphys, options, words):
    code, _, err = tiphys(*options)
    assert code == 2
    assert words in err


def test_a_url_for_each_namespace_needs_the_names(tmp_path, capsys):
    assert main(["report", "--by", "namespace", "--store", f"{tmp_path}/{{namespace}}"]) == 2
    assert "name those of the report: -n team-a -n team-b" in capsys.readouterr().err
