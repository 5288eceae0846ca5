"""The pages over a store: what they say, what they refuse, and that no text in a record can command a browser.

| situation | page |
|---|---|
| a run that failed | why, and the command that resumes it |
| a run of a dead cluster, a fork, a fan-out | state of each step in words |
| a damaged record | what is left, and what is damaged |
| a store that fails, or does not answer | says so |
| names made of HTML | text |
"""

import hashlib
import re
import shlex
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.hostile_text import HOSTILE, control_characters, write_full_run
from support.builders.lineage import RUN, STEP, claim_of, commit, end_of, ref, write_claim, write_end, write_run
from support.fakes.submitter import FakeSubmitter
from support.processes.polling import until
from support.stories.pages import Pages, Texts
from tiphys_controller import start_run
from tiphys_controller.goodput import FailureCost
from tiphys_controller.runs import StepOutput

from hera_pipelines.ui import app as ui_app
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.run_index import RunIndex
from hera_pipelines.ui.run_page import CauseCost, write_copy_command
from tiphys.errors import StoreError
from tiphys.protocol.step_spec import GpuRequest, StepKind
from tiphys.records import (
    AttemptClaim,
    Cause,
    DataVersion,
    FailureEvidence,
    Preemption,
    SubmissionEnd,
    TrainingProgress,
)
from tiphys.store import (
    DirectoryStore,
    LineageLayout,
    ObjectInfo,
    RunLayout,
    Store,
    lineage_name,
    read_submissions,
)

PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), gated("report", depends="fit"))


@pytest.fixture
def index(store: Store, submitter: FakeSubmitter) -> RunIndex:
    return RunIndex(store, submitter)


@pytest.fixture
def pages(store: Store, submitter: FakeSubmitter, index: RunIndex) -> Pages:
    return Pages(build_app(store, submitter, index=index))


def failed_run(store: Store, submitter: FakeSubmitter) -> str:
    started = start_run(store, submitter, PIPELINE, "digits-1")
    history = History(store, started.run)
    history.done("prep")
    history.failed("fit", cause=Cause.USER_ERROR, message="the loss is not a number")
    submitter.end(started.workflow_name)
    end = SubmissionEnd(run=started.run, submission=1, status="Failed", message="")
    store.create(RunLayout(started.run).submission_end(1), end.to_bytes())
    return started.run


def test_a_failed_run_says_why_and_what_to_type(
    store: Store, submitter: FakeSubmitter, index: RunIndex, pages: Pages
) -> None:
    run = failed_run(store, submitter)
    index.refresh()

    home, page = Texts(pages.get("/").text), Texts(pages.get(f"/runs/{run}").text)

    assert "digits-1 failed 1 of 3" in home.text
    assert "fit failed in attempt 1 by user error: the loss is not a number" in page.text
    assert f"tiphys resume digits-1 --store {store.url}" in page.text
    assert "It runs what is missing: fit, report." in page.text
    titles = re.findall(r"<title>(\w+: [\w ]+)</title>", pages.get(f"/runs/{run}").text)
    assert titles == ["prep: done", "fit: failed", "report: never started"]


def test_running_training_shows_its_step_and_why_nothing_is_committed(
    store: Store, submitter: FakeSubmitter, pages: Pages
) -> None:
    pipeline = pipeline_of(gated("fit", kind=StepKind.TRAIN), gated("tune", kind=StepKind.TRAIN))
    run = start_run(store, submitter, pipeline, "digits-1").run
    for step in ("fit", "tune"):
        claim = claim_of(1).model_copy(update={"run": run, "step": step, "lineage": lineage_name(run, step)})
        write_claim(store, claim)
    report = TrainingProgress(global_step=1200, total_steps=5000, hindrance="the <b>disk</b> is full")
    store.create(LineageLayout(lineage_name(run, "fit")).training_progress_report(1, 1), report.to_bytes())

    page = Texts(pages.get(f"/runs/{run}").text)

    line = "step 1,200 of 5,000, no commit yet, because the <b>disk</b> is full"
    assert f"fit: {line}; tune: it keeps no checkpoints (checkpoints=None)." in page.text
    assert page.text.count(line) == 2, "in the sentence at the top, and beside the attempt"
    assert page.text.count("it keeps no checkpoints (checkpoints=None)") == 2
    assert "<b>" not in pages.get(f"/runs/{run}").text


def test_outputs_have_their_size_and_digest_and_the_command_that_copies_them(
    store: Store, submitter: FakeSubmitter, pages: Pages
) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    History(store, run).done("prep", artifacts={"data": b"x" * 2048}, parameters={"n": "5"})

    page = Texts(pages.get(f"/runs/{run}").text)

    key = f"{RunLayout(run).outputs('prep', 1)}artifacts/data"
    digest = hashlib.sha256(b"x" * 2048).hexdigest()[:12]
    assert f"prep attempt 1 data 2 KiB {digest} cp {store.url.removeprefix('file://')}/{key} ." in page.text
    assert "prep attempt 1 n 1 B" in page.text
    assert pages.get(f"/runs/{run}").text.count("cp ") == 1


AZ = "az storage blob"


@pytest.mark.parametrize(
    ("url", "directory", "command"),
    [
        ("s3://ml-runs/tiphys", False, ["aws", "s3", "cp", "s3://ml-runs/tiphys/data/a/model", "."]),
        ("s3://ml-runs", True, ["aws", "s3", "cp", "--recursive", "s3://ml-runs/data/a/model", "model"]),
        ("gs://ml-runs/tiphys", False, ["gcloud", "storage", "cp", "gs://ml-runs/tiphys/data/a/model", "."]),
        ("gs://ml-runs", True, ["gcloud", "storage", "cp", "-r", "gs://ml-runs/data/a/model", "."]),
        ("az://mlruns/runs/tiphys", False, f"{AZ} download --container-name runs --name tiphys/data/a/model".split()),
        ("az://mlruns/runs", True, f"{AZ} download-batch --source runs --pattern data/a/model/*".split()),
        ("file:///mnt/my%20runs", False, ["cp", "/mnt/my runs/data/a/model", "."]),
        ("file:///mnt/$(id)", True, ["cp", "-r", "/mnt/$(id)/data/a/model", "."]),
    ],
)
def test_an_output_is_copied_by_one_command(url: str, directory: bool, command: list[str]) -> None:
    output = StepOutput(
        step="fit", source="attempt 1", name="model", key="data/a/model", directory=directory, value=None,
        objects=1, size_bytes=1, sha256="",
    )  # fmt: skip
    written = shlex.split(write_copy_command(url, output))

    assert written[: len(command)] == command
    if url.startswith("az:"):
        target = ["--destination", "."] if directory else ["--file", "model"]
        assert written[len(command) :] == [*target, "--account-name", "mlruns", "--auth-mode", "login"]
    else:
        assert written == command


def test_an_attempt_shows_the_versions_of_the_data_that_no_step_made(store: Store, pages: Pages) -> None:
    write_run(store)
    data = DataVersion(name="data/<train>", algorithm="md5", digest=f"{'ab' * 16}.dir")
    store.create(RunLayout(RUN).attempt(STEP, 1), claim_of(1).model_copy(update={"data": (data,)}).to_bytes())
    page = pages.get(f"/runs/{RUN}").text
    assert f'data data/&lt;train&gt; <code title="md5 {"ab" * 16}.dir">md5 abababababab</code>' in page


def test_lost_gpu_hours_are_shown_by_cause_the_most_costly_first(store: Store, pages: Pages) -> None:
    began = datetime(2030, 1, 1, tzinfo=UTC)
    write_run(store, gpu=GpuRequest(gpus=8))
    ends = ((Cause.INFRASTRUCTURE, 30), (Cause.PREEMPTION, 90))
    for number, (cause, minutes) in enumerate(ends, start=1):
        opened_at = began + timedelta(hours=number * 3)
        store.create(
            RunLayout(RUN).attempt(STEP, number),
            claim_of(number).model_copy(update={"written_at": opened_at}).to_bytes(),
        )
        ended_at = opened_at + timedelta(minutes=minutes)
        end = end_of(number, cause).model_copy(update={"written_at": ended_at, "ended_at": ended_at})
        store.create(RunLayout(RUN).attempt_end(STEP, number), end.to_bytes())

    page = Texts(pages.get(f"/runs/{RUN}").text)

    assert "Lost GPU-hours by cause" in page.text
    assert page.text.index("preemption 1 12.00 75.0%") < page.text.index("infrastructure 1 4.00 25.0%")


ASKED = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "fit/1 4 other-1/fit[2] 2030-01-01 00:00:00 UTC 1m 5s checkpoint 1-20 2m of 4 GPUs"),
        ({"seconds_lost": 0.0}, "checkpoint 1-20 nothing"),
        ({"seconds_lost": None, "committed": None}, "no checkpoint not known"),
        ({"moves": True}, "fit/1 4 other-1/fit[2], to other nodes 2030"),
        ({"nodes": ("n1",)}, "fit/1 4 n1 fails or will be removed 2030"),
        ({"nodes": ("n1", "n2")}, "n1, n2 fail or will be removed"),
        ({"for_run": "", "for_step": "", "for_step_name": "", "reason": "Kueue evicted it"}, "4 Kueue evicted it 2030"),
        ({"for_run": "", "for_step": "", "for_step_name": ""}, "a request that no longer waited"),
    ],
)
def test_a_preemption_says_for_what_and_what_it_saved_and_cost(
    store: Store, pages: Pages, change: dict[str, Any], words: str
) -> None:
    write_run(store, gpu=GpuRequest(gpus=4))
    fields: dict[str, Any] = {
        "for_step": "fit-2", "for_run": "other-1", "for_step_name": "fit[2]", "asked_at": ASKED, "gpus": 4,
        "gone_at": ASKED + timedelta(seconds=65), "committed": ref(1, 20), "seconds_lost": 120.0,
    }  # fmt: skip
    write_claim(store, claim_of(1))
    write_end(store, end_of(1).model_copy(update={"preempted": Preemption(**(fields | change))}))

    page = Texts(pages.get(f"/runs/{RUN}").text)

    assert words in page.text
    assert not [tag for tag, attributes in page.elements if attributes.get("href") == "/runs/other-1"]


def test_a_preemption_leads_to_the_run_that_got_the_gpus(store: Store, index: RunIndex, pages: Pages) -> None:
    write_run(store)
    write_run(store, run="other-1")
    preempted = Preemption(for_step="fit", for_run="other-1", asked_at=ASKED, gone_at=ASKED, gpus=4)
    write_claim(store, claim_of(1))
    write_end(store, end_of(1).model_copy(update={"preempted": preempted}))
    index.refresh()

    assert '<a href="/runs/other-1">other-1</a>/fit' in pages.get(f"/runs/{RUN}").text
    assert "Preemptions" not in pages.get("/runs/other-1").text


def test_an_attempt_has_its_nodes_and_which_pod_ended_first(store: Store, pages: Pages) -> None:
    write_run(store)
    write_claim(store, claim_of(1).model_copy(update={"nodes": tuple(f"n{number}" for number in range(1, 7))}))
    evidence = FailureEvidence(rule="node-lost", node="n5")
    write_end(store, end_of(1).model_copy(update={"evidence": evidence}))

    text = Texts(pages.get(f"/runs/{RUN}").text).text

    assert "rule node-lost; its pod on n5 ended first" in text
    assert "on n1, n2, n3, n4 and 2 more nodes" in text


def test_waiting_between_two_attempts_is_on_the_time_axis(store: Store, pages: Pages) -> None:
    write_run(store)
    for number, minutes in ((1, 0), (2, 30)):
        opened_at = ASKED + timedelta(minutes=minutes)
        write_claim(store, claim_of(number).model_copy(update={"written_at": opened_at}))
        ended_at = opened_at + timedelta(minutes=10)
        write_end(store, end_of(number).model_copy(update={"written_at": ended_at, "ended_at": ended_at}))

    picture = pages.get(f"/runs/{RUN}/times.svg").text

    assert "before attempt 2: waiting 20m" in picture
    assert "before attempt 1" not in picture


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0.00"), (7.0, "< 0.01"), (36.0, "0.01"), (7.2e6, "2,000.00")])
def test_hours_are_never_rounded_to_nothing(seconds: float, text: str) -> None:
    assert CauseCost("hang", FailureCost(failures=1, lost=seconds), 1.0).lost_hours == text


def test_a_submission_shows_its_own_attempts(store: Store, submitter: FakeSubmitter, pages: Pages) -> None:
    run = failed_run(store, submitter)

    assert "fit/1" in pages.get(f"/runs/{run}?submission=1").text
    missing = pages.get(f"/runs/{run}?submission=7")

    assert missing.status_code == 404
    assert "has no submission 7; it has 1" in Texts(missing.text).text


def test_a_workflow_leads_to_its_run(store: Store, submitter: FakeSubmitter, index: RunIndex, pages: Pages) -> None:
    run = failed_run(store, submitter)
    index.refresh()
    [submission] = read_submissions(store, run)
    assert submission.binding is not None

    known = pages.get(f"/workflows/{submission.binding.workflow_name}")
    unknown = pages.get("/workflows/a%2Fb%0d%0aX: 1")

    assert (known.status_code, known.headers["Location"]) == (303, f"/runs/{run}?submission=1")
    assert unknown.status_code in (303, 404)
    assert "x" not in unknown.headers


def test_older_attempts_are_on_pages_of_their_own(store: Store, submitter: FakeSubmitter, pages: Pages) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    history = History(store, run)
    for attempt in range(1, 121):
        history.failed("prep", attempt)

    first, second = pages.get(f"/runs/{run}").text, pages.get(f"/runs/{run}?page=2").text

    assert "this page has 100 of 120, the newest of each step first, and their outputs; 20 follow" in first
    assert f'href="/runs/{run}?page=2"' in first
    assert [int(number) for number in re.findall(r">prep/(\d+)", first)] == list(range(120, 20, -1))
    assert [int(number) for number in re.findall(r">prep/(\d+)", second)] == list(range(20, 0, -1))
    assert "older attempts" not in second
    for page in (first, second):
        assert ">120</td>" in page


def test_a_page_shows_the_newest_attempt_of_every_step_and_a_submission_keeps_its_filter(
    store: Store, submitter: FakeSubmitter, pages: Pages
) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    history = History(store, run)
    history.done("fit")
    for attempt in range(1, 121):
        history.failed("prep", attempt)

    assert ">fit/1<" in pages.get(f"/runs/{run}").text
    chosen = pages.get(f"/runs/{run}?submission=1").text
    assert f'href="/runs/{run}?submission=1&amp;page=2"' in chosen
    assert "20 follow" not in chosen and "21 follow" in chosen


def test_figures_say_how_many_attempts_they_leave_out(store: Store, pages: Pages) -> None:
    write_run(store)
    for attempt in range(1, 251):
        write_claim(store, claim_of(attempt))
        write_end(store, end_of(attempt))

    page = Texts(pages.get(f"/runs/{RUN}").text).text

    assert "they leave out 50, which tiphys report digits-1 counts, too" in page
    assert "failures200" in page


def test_a_log_of_any_attempt_is_found_among_many(store: Store, pages: Pages) -> None:
    write_run(store)
    for attempt in range(1, 41):
        write_claim(store, claim_of(attempt))
        write_end(store, end_of(attempt, message=f"end {attempt}."))

    newest, old = pages.get(f"/runs/{RUN}/logs/{STEP}").text, pages.get(f"/runs/{RUN}/logs/{STEP}?attempt=3").text

    assert "end 40." in newest and "end 3." in old
    assert ">attempt 40<" in old and ">attempt 3<" in old


def test_pictures_and_retention_of_many_checkpoints_say_what_they_leave_out(
    store: Store, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hera_pipelines.ui.app.MAX_CHECKPOINTS", 3)
    monkeypatch.setattr("hera_pipelines.ui.checkpoint_page.MAX_RECORDS", 12)
    write_run(store)
    write_claim(store, claim_of(1))
    for step in range(1, 6):
        commit(store, ref(1, step), metrics={"loss": 1.0 / step})

    lineage = pages.get(f"/runs/{RUN}/lineage.svg").text
    assert "checkpoints older than the newest 3 are not shown" in lineage
    assert "1-5" in lineage and "1-2" not in lineage
    assert pages.get(f"/runs/{RUN}/metrics.svg").status_code == 200
    assert "too many records for a page" in pages.get(f"/runs/{RUN}/checkpoints").text


def test_a_run_that_goes_on_is_followed_and_an_ended_one_is_not(
    store: Store, submitter: FakeSubmitter, pages: Pages
) -> None:
    started = start_run(store, submitter, PIPELINE, "digits-1")
    History(store, started.run).opened("prep")

    page = pages.get("/runs/digits-1").text
    assert 'data-follow="3"' in page
    assert re.findall(r"<title>(\w+: [\w ]+)</title>", page) == ["prep: running", "fit: waiting", "report: waiting"]

    submitter.end(started.workflow_name)
    assert "data-follow" not in pages.get("/runs/digits-1").text


def test_a_damaged_record_costs_only_what_it_held(store: Store, submitter: FakeSubmitter, pages: Pages) -> None:
    run = failed_run(store, submitter)
    key = RunLayout(run).attempt("fit", 2)
    store.create(key, b"{broken")

    page = Texts(pages.get(f"/runs/{run}").text)

    assert "1 damaged record." in page.text
    assert key in page.text
    assert "fit/1" in page.text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/runs/absent", 404, "absent"),
        ("/runs/absent/lineage.svg", 404, "absent"),
        ("/runs/absent/metrics.svg", 404, "absent"),
        ("/runs/absent/weather.svg", 404, "there is no picture weather"),
        ("/runs/..%2f..%2fetc%2fpasswd", 404, "there is no page"),
        ("/nothing", 404, "there is no page /nothing"),
        ("/runs/absent?submission=first", 400, "submission='first' is no number"),
        ("/?phase=Broken", 400, "there is no phase 'Broken'"),
        ("/?page=0", 400, "page='0' is no number of a page"),
    ],
)
def test_a_missing_page_is_refused_in_words(pages: Pages, path: str, status: int, words: str) -> None:
    answer = pages.get(path)
    assert answer.status_code == status
    assert words in Texts(answer.text).text
    assert "Content-Security-Policy" in answer.headers


def test_a_page_loads_nothing_from_elsewhere_and_holds_no_script(store: Store, pages: Pages) -> None:
    write_full_run(store)
    for path in ("/", f"/runs/{RUN}", "/nothing"):
        answer = pages.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for tag, attributes in Texts(answer.text).elements:
            assert not {name for name in attributes if name.startswith("on") or name == "style"}, tag
            for name in ("src", "href", "action"):
                assert (attributes.get(name) or "/").startswith(("/", "#"))
        assert "<style" not in answer.text
        assert re.findall(r"<script[^>]*>([^<]*)", answer.text) == [""]
    for name in ("tiphys.css", "tiphys.js", "tiphys.svg"):
        assert pages.get(f"/static/{name}").status_code == 200
        assert pages.get(f"/static/{name}").headers["X-Content-Type-Options"] == "nosniff"
        assert "http" not in pages.get(f"/static/{name}").text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("picture", ["lineage", "times", "recoveries", "metrics"])
def test_a_picture_is_well_formed_and_may_do_nothing(store: Store, pages: Pages, picture: str) -> None:
    write_full_run(store)
    answer = pages.get(f"/runs/{RUN}/{picture}.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert ElementTree.fromstring(answer.text).tag.endswith("svg")


BREAKOUT = f"</td></title><script>alert(1)</script><img src=x onerror=alert(1)> {HOSTILE}"


def test_names_made_of_html_stay_text(store: Store, submitter: FakeSubmitter, pages: Pages) -> None:
    started = start_run(store, submitter, PIPELINE, "digits-1")
    History(store, started.run).failed("prep", message=BREAKOUT + "x" * 1024)
    submitter.end(started.workflow_name)

    page = pages.get("/runs/digits-1").text

    assert escape("<script>alert(1)", quote=False) in page
    assert not [tag for tag, attributes in Texts(page).elements if "onerror" in attributes]
    assert not control_characters(page)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
def test_a_page_of_another_site_cannot_ask_by_a_name_of_its_own(pages: Pages, host: str) -> None:
    assert pages.get("/", host).status_code == 400
    assert pages.get("/", "localhost:8321").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_pages_refuse_every_writing_method(pages: Pages, method: str) -> None:
    assert pages.request(method, "/runs/digits-1").status_code == 405


class Failing(DirectoryStore):
    """A store whose listings fail, or hang until the test ends."""

    hangs: threading.Event | None = None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.hangs is not None:
            self.hangs.wait(60)
        raise StoreError("the bucket is away")

    def prefixes(self, prefix: str) -> Iterator[str]:
        raise StoreError("the bucket is away")


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    store = Failing(tmp_path / "store")
    index = RunIndex(store)
    index.start()
    until(lambda: index.error)
    index.stop()
    pages = Pages(build_app(store, index=index))
    assert (
        "The runs could not all be read, so this list may be old: the bucket is away" in Texts(pages.get("/").text).text
    )
    answer = pages.get("/runs/digits-1")
    assert answer.status_code == 503
    assert "the bucket is away" in Texts(answer.text).text


def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_app, "_PAGE_SECONDS", 0.05)
    store = Failing(tmp_path / "store")
    store.hangs = threading.Event()
    answer = Pages(build_app(store)).get("/runs/digits-1")
    store.hangs.set()
    assert answer.status_code == 503
    assert "it did not answer within 0.05 s" in Texts(answer.text).text


def test_records_of_a_run_that_tiphys_did_not_compile(store: Store, pages: Pages) -> None:
    claim = AttemptClaim(
        run="odd", step="fit", attempt=1, submission=1, uid="u", node="n", instance="i", step_key="k" * 64
    )
    store.create(RunLayout("odd").attempt("fit", 1), claim.to_bytes())
    assert pages.get("/runs/odd").status_code == 404
