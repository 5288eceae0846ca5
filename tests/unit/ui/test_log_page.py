"""The page of the logs of one attempt.

| where the log is                        | the page                                  |
|-----------------------------------------|-------------------------------------------|
| with a pod, an engine or in an archive  | its last lines, and where they come from  |
| only in the store, as the program's copy | that copy                                |
| nowhere                                 | says so; the report of a crash is left    |
| where these pages do not ask            | says why                                  |
| larger than a page                      | its end                                   |
"""

import re
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.hostile_text import HOSTILE, control_characters, write_full_run
from support.builders.lineage import RUN, STEP
from support.fakes.submitter import FakeSubmitter
from support.stories.pages import Pages, Texts
from tiphys_controller import start_run

from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.log_page import MAX_HTML_BYTES, MAX_PODS
from tiphys.errors import UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.records import SubmissionEnd
from tiphys.store import Attempt, RunLayout, Store, Submission
from tiphys.store.program_output import chunk_key

PodLogs = list[tuple[str, str, list[str]]]


@pytest.fixture
def open_pages(store: Store) -> Callable[..., Pages]:
    def open_with(*found: tuple[str, str, Iterable[str]]) -> Pages:
        def find(attempt: Attempt, _: Submission, max_lines: int, max_bytes: int) -> PodLogs:
            assert max_lines > 0
            assert max_bytes > 0
            number = attempt.claim.attempt
            return [
                (pod, source, [line.replace("NUMBER", str(number)) for line in lines]) for pod, source, lines in found
            ]

        return Pages(build_app(store, find_logs=find))

    return open_with


def shown_logs(page: str) -> list[str]:
    """The texts of the logs, as a browser shows them: without the newline that begins an element ``pre``."""
    return [unescape(text).removeprefix("\n") for text in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]


def test_the_newest_attempt_is_shown_unless_one_is_named(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)
    pages = open_pages(("fit-pod", "pod in ml", ["one\n", "attempt NUMBER\n"]))

    newest, first = (pages.get(f"/runs/{RUN}/logs/{STEP}{query}").text for query in ("", "?attempt=1"))

    assert shown_logs(newest) == ["one\nattempt 2"]
    assert shown_logs(first)[0] == "one\nattempt 1"
    assert "From pod in ml." in Texts(first).text
    assert "failed by preemption: the node is gone" in Texts(first).text
    assert f'href="/runs/{RUN}/logs/{STEP}?attempt=2"' in first


TRACEBACK = """Traceback (most recent call last):
  File "pipeline.py", line 41, in fit
    return 1 / x <= 1
ZeroDivisionError: division by zero"""


@pytest.mark.parametrize(("status", "is_shown"), [("Failed", True), ("Succeeded", False)])
def test_the_page_of_a_failed_run_begins_with_the_last_traceback(
    status: str, is_shown: bool, store: Store, tmp_path: Path, open_pages: Callable[..., Pages]
) -> None:
    submitter = FakeSubmitter(tmp_path / "cluster")
    started = start_run(store, submitter, pipeline_of(gated("fit")))
    run = started.run
    submitter.end(started.workflow_name)
    History(store, run).failed("fit")
    end = SubmissionEnd(run=run, submission=1, status=status, message="")
    store.create(RunLayout(run).submission_end(1), end.to_bytes())
    lines = f"epoch 1\n{TRACEBACK.replace('41', '7')}\nagain\n{TRACEBACK}\nsaved\n".splitlines(keepends=True)

    page = open_pages(("fit-pod", "pod in ml", lines)).get(f"/runs/{run}").text

    assert shown_logs(page) == ([TRACEBACK] if is_shown else [])


def test_the_report_of_a_crash_is_left_when_the_log_is_gone(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)

    page = open_pages().get(f"/runs/{RUN}/logs/{STEP}?attempt=1").text

    assert "No output is left: its pods are gone, and no archive has it." in Texts(page).text
    assert shown_logs(page) == ["ValueError: nan\n\nThread 1"]
    assert "after 9s without a step" in Texts(page).text


def test_logs_of_another_cluster_are_named_as_not_shown(store: Store) -> None:
    def refuse(*_: object) -> PodLogs:
        raise UsageError("its pods are known to the cluster east, which these pages do not ask")

    write_full_run(store)
    answer = Pages(build_app(store, find_logs=refuse)).get(f"/runs/{RUN}/logs/{STEP}")
    assert answer.status_code == 200
    assert "No output can be shown: its pods are known to the cluster east" in Texts(answer.text).text


@pytest.mark.parametrize("refuses", [True, False])
def test_the_copy_in_the_store_is_shown_if_nothing_else_is_found(store: Store, refuses: bool) -> None:
    def find(*_: object) -> PodLogs:
        if refuses:
            raise UsageError("these pages do not ask the cluster")
        return []

    write_full_run(store)
    layout = RunLayout(RUN)
    store.create(chunk_key(layout, STEP, 1, 0, 0), b"step 1\nstep 2\n")

    pages = Pages(build_app(store, find_logs=find))
    page = pages.get(f"/runs/{RUN}/logs/{STEP}?attempt=1").text

    assert shown_logs(page)[0] == "step 1\nstep 2"
    assert f"From the copy that the program stored below {layout.program_output(STEP, 1)}" in Texts(page).text
    assert "No output" not in Texts(page).text
    assert "No output" in Texts(pages.get(f"/runs/{RUN}/logs/{STEP}?attempt=2").text).text


def test_a_large_log_is_cut_at_its_beginning(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)
    pods = [(f"pod-{number}", "pod in ml", [f"{line} <&> {'x' * 90}\n" for line in range(4000)]) for number in range(3)]

    page = open_pages(*pods).get(f"/runs/{RUN}/logs/{STEP}").text

    assert len(page.encode()) < MAX_HTML_BYTES + (16 << 10)
    for text in shown_logs(page):
        assert text.endswith(f"3999 <&> {'x' * 90}")
        assert not text.startswith("0 ")
    assert (
        Texts(page).text.count(f"The beginning is missing here; tiphys logs {RUN}/{STEP} --attempt 2 prints all.") == 3
    )


def test_a_line_longer_than_a_page_is_cut(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)
    page = open_pages(("pod", "pod in ml", ["<" * MAX_HTML_BYTES + "end\n"])).get(f"/runs/{RUN}/logs/{STEP}").text
    assert shown_logs(page)[0].endswith("<<<end")
    assert len(page.encode()) < MAX_HTML_BYTES


def test_of_a_large_gang_the_first_pods_are_shown(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)
    gang = [(f"pod-{number}", "pod in ml", ["hello\n"]) for number in range(MAX_PODS + 1)]
    page = open_pages(*gang).get(f"/runs/{RUN}/logs/{STEP}").text
    assert len(shown_logs(page)) == MAX_PODS
    assert "More pods have written" in page


def test_no_output_commands_a_browser(store: Store, open_pages: Callable[..., Pages]) -> None:
    write_full_run(store)
    lines = [f"</pre><script>alert(1)</script>{HOSTILE}\n", "\x1b[31mred\x1b[0m\n"]
    page = open_pages((f"pod {HOSTILE}", f"<b>{HOSTILE}</b>", lines)).get(f"/runs/{RUN}/logs/{STEP}").text
    assert len(re.findall("<script", page)) == 1
    assert not control_characters(page)
    assert shown_logs(page)[0].endswith("\nred")


def test_the_log_of_an_open_attempt_is_followed(store: Store, tmp_path: Path, open_pages: Callable[..., Pages]) -> None:
    submitter = FakeSubmitter(tmp_path / "cluster")
    run = start_run(store, submitter, pipeline_of(gated("fit", withItems=["a", "b"]))).run
    item = next(one.step_id for one in RunHistory(store, run).names.items("fit") if one.name == "fit[1]")
    History(store, run).opened(item)
    pages = open_pages(("pod", "pod in ml", ["hello\n"]))

    by_id, by_name = (pages.get(f"/runs/{run}/logs/{name}") for name in (item, "fit%5B1%5D"))

    assert 'data-follow="3"' in by_id.text
    assert shown_logs(by_id.text) == shown_logs(by_name.text) == ["hello"]
    History(store, run).finish(item)
    assert "data-follow" not in pages.get(f"/runs/{run}/logs/{item}").text
    assert f'href="/runs/{run}/logs/{item}?attempt=1"' in pages.get(f"/runs/{run}").text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"/runs/{RUN}/logs/absent", 404, "absent"),
        (f"/runs/{RUN}/logs/{STEP}?attempt=7", 404, "has no attempt 7; its newest is 2"),
        (f"/runs/{RUN}/logs/{STEP}?attempt=last", 400, "attempt='last' is no number"),
        (f"/runs/absent/logs/{STEP}", 404, "absent"),
    ],
)
def test_a_missing_attempt_or_run_is_refused(
    store: Store, open_pages: Callable[..., Pages], path: str, status: int, words: str
) -> None:
    write_full_run(store)
    answer = open_pages().get(path)
    assert answer.status_code == status
    assert words in Texts(answer.text).text
