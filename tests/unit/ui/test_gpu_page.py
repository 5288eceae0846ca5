"""The pages of queues and nodes: quota, who holds and waits and why, the health of nodes, and what they refuse."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from html import escape
from pathlib import Path

import pytest
from support.builders.compiled_workflows import gated, pipeline_of
from support.builders.hostile_text import HOSTILE, control_characters
from support.builders.lineage import claim_of, end_of, write_claim, write_end, write_run
from support.fakes.gpu_pages import RUN, SINCE, FakeGpus, view_of, waiting
from support.fakes.submitter import FakeSubmitter
from support.stories.pages import Pages, Texts
from tiphys_controller import start_run

from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.gpu_page import NodeRow, NodesView, QueuesView, share_reads
from hera_pipelines.ui.run_index import RunIndex
from tiphys.errors import StoreError
from tiphys.protocol.step_spec import GpuRequest
from tiphys.store import Store


def test_queues_with_what_they_hold_and_why_a_request_waits(store: Store) -> None:
    page = Pages(build_app(store, gpus=FakeGpus(view_of(waiting())))).get("/queues").text
    text = Texts(page).text
    assert "research A100 8 12 10 2 4 reclaims" in text
    assert "6 above its limit" in text
    assert "4 A100research" in text
    assert "WaitingForQuota: 8 of 8 are held" in text
    assert "run-7/fit would go" in text
    assert "preempted at 10:00" in text
    assert "7 later requests wait, too" in text
    assert 'data-follow="5"' in page


def test_only_the_requests_of_a_queue_are_shown_on_demand(store: Store) -> None:
    pages = Pages(build_app(store, gpus=FakeGpus(view_of(waiting(), waiting("other-1", "spare")))))
    assert "other-1" in Texts(pages.get("/queues").text).text
    chosen = Texts(pages.get("/queues?queue=research").text).text
    assert "other-1" not in chosen
    assert RUN in chosen


def test_a_run_is_linked_if_the_store_has_it(store: Store, tmp_path: Path) -> None:
    start_run(store, FakeSubmitter(tmp_path / "cluster"), pipeline_of(gated("fit")), RUN)
    index = RunIndex(store)
    index.refresh()
    page = Pages(build_app(store, index=index, gpus=FakeGpus(view_of(waiting())))).get("/queues").text
    assert f'href="/runs/{RUN}"' in page
    assert 'href="/runs/run-7"' not in page


def test_the_page_of_a_run_says_why_it_waits(store: Store, tmp_path: Path) -> None:
    submitter = FakeSubmitter(tmp_path / "cluster")
    started = start_run(store, submitter, pipeline_of(gated("fit")), RUN)
    gpus = FakeGpus(view_of(waiting(), waiting("other-1", sentence="of another run")))
    pages = Pages(build_app(store, submitter, gpus=gpus))

    text = Texts(pages.get(f"/runs/{RUN}").text).text
    assert "fit waits for 4 A100 of queue research, at position 2; WaitingForQuota: 8 of 8 are held." in text
    assert "of another run" not in text

    submitter.end(started.workflow_name)
    assert "waits for 4 A100" not in Texts(pages.get(f"/runs/{RUN}").text).text


def test_a_ledger_that_does_not_answer_costs_only_its_own_page(store: Store, tmp_path: Path) -> None:
    submitter = FakeSubmitter(tmp_path / "cluster")
    start_run(store, submitter, pipeline_of(gated("fit")), RUN)
    pages = Pages(build_app(store, submitter, gpus=FakeGpus()))
    assert pages.get("/queues").status_code == 503
    assert "the API server is away" in Texts(pages.get("/queues").text).text
    assert pages.get(f"/runs/{RUN}").status_code == 200


def test_nodes_with_their_evidence(store: Store) -> None:
    evidence = (("condition GpuMemWatch", "a double bit error", SINCE), ("taint spot", "", None))
    rows = (
        NodeRow("n1", "A100", 8, 4, 3, 1, "r1", "healthy", ()),
        NodeRow("n2", "A100", 8, 0, 0, 0, "", "unhealthy", evidence),
    )
    gpus = FakeGpus(view_of(), NodesView("namespace ml", rows, ()))
    text = Texts(Pages(build_app(store, gpus=gpus)).get("/nodes").text).text
    assert "n1r1 8 A100 4 3 1 healthy" in text
    assert "condition GpuMemWatch: a double bit error," in text
    assert "taint spot" in text


def test_only_pages_that_can_be_shown_are_offered(store: Store) -> None:
    nodes = NodesView("namespace ml", (), ())
    for gpus, queues_status, nodes_status in (
        (None, 404, 404),
        (FakeGpus(view_of()), 200, 404),
        (FakeGpus(view_of(), nodes), 200, 200),
    ):
        pages = Pages(build_app(store, gpus=gpus))
        assert [pages.get(path).status_code for path in ("/queues", "/nodes")] == [queues_status, nodes_status]
        home = pages.get("/").text
        assert [f'href="{path}"' in home for path in ("/queues", "/nodes")] == [
            queues_status == 200,
            nodes_status == 200,
        ]


def test_names_made_of_html_stay_text(store: Store) -> None:
    text = f"<script>alert(1)</script>{HOSTILE}"
    node = NodeRow(text, text, 8, 0, 0, 8, text, text, ((text, text, None),))
    gpus = FakeGpus(view_of(waiting(text, text, text), text=text), NodesView(text, (node,), (text,)))
    pages = Pages(build_app(store, gpus=gpus))
    for path in ("/queues", "/nodes", f"/queues?queue={escape('<script>')}"):
        page = pages.get(path).text
        assert page.count("<script") == 1
        assert not control_characters(page)


def test_many_visitors_read_the_ledger_once_in_a_while() -> None:
    now, gpus = [0.0], FakeGpus(view_of())
    read = share_reads(gpus.read_queues, lambda: now[0])
    for _ in range(5):
        read()
    assert gpus.reads == 1
    now[0] = 60.0
    read()
    assert gpus.reads == 2


def test_visitors_wait_for_a_read_in_work_and_an_error_is_not_kept() -> None:
    reads, outcomes = [], [StoreError("the ledger is away"), view_of()]
    gate = threading.Event()

    def read_slowly() -> QueuesView:
        reads.append(threading.get_ident())
        assert gate.wait(60)
        outcome = outcomes[len(reads) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    read = share_reads(read_slowly, lambda: 0.0)
    with ThreadPoolExecutor(4) as visitors:
        answers = [visitors.submit(read) for _ in range(4)]
        gate.set()
        failed = [answer for answer in answers if answer.exception() is not None]
    assert (len(failed), len(reads)) == (1, 2)


def test_shares_over_time_are_those_of_the_runs_of_the_store(store: Store) -> None:
    write_run(store, gpu=GpuRequest(gpus=4, queue="research"))
    claim = claim_of(1).model_copy(update={"written_at": SINCE})
    write_claim(store, claim)
    ended_at = SINCE + timedelta(hours=6)
    write_end(store, end_of(1).model_copy(update={"written_at": ended_at}))
    index = RunIndex(store, reads_holds=True)
    index.refresh()
    now = SINCE + timedelta(hours=12)
    gpus = FakeGpus(view_of())
    pages = Pages(build_app(store, index=index, gpus=gpus, clock=lambda: now))

    day, week = pages.get("/queues/shares/1.svg"), pages.get("/queues/shares/7.svg")
    assert day.headers["content-type"] == "image/svg+xml"
    assert "1.0 of 8 (12%) on average" in day.text
    assert "0.1 of 8 (2%) on average" in week.text
    gpus.queues = None
    alone = Pages(build_app(store, index=index, gpus=gpus, clock=lambda: now)).get("/queues/shares/1.svg").text
    assert "1.0 on average" in alone


@pytest.mark.parametrize(("chosen", "picture"), [("", "1"), ("?days=30", "30"), ("?queue=research&days=7", "7")])
def test_the_time_is_chosen_in_the_address(store: Store, chosen: str, picture: str) -> None:
    page = Pages(build_app(store, gpus=FakeGpus(view_of()))).get(f"/queues{chosen}").text
    assert f'src="/queues/shares/{picture}.svg"' in page
    assert ("days=1&amp;queue=research" in page) == ("queue" in chosen)


@pytest.mark.parametrize("path", ["/queues?days=2", "/queues?days=<b>", "/queues/shares/0.svg", "/queues/shares/x.svg"])
def test_a_time_that_is_no_choice_is_refused(store: Store, path: str) -> None:
    answer = Pages(build_app(store, gpus=FakeGpus(view_of()))).get(path)
    assert answer.status_code == 400
    assert "is no choice; there are 1, 7, 30" in Texts(answer.text).text


def test_without_queues_there_are_no_shares(store: Store) -> None:
    assert Pages(build_app(store)).get("/queues/shares/1.svg").status_code == 404
