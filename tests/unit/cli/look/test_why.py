"""``tiphys why``: what a person is told about GPUs that a step waits for."""

import json
import re
from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.ledger import NOW, ask, lease
from support.builders.lineage import RUN, STEP, claim_of, end_of, write_run
from support.fakes.submitter import FakeSubmitter
from support.servers.kube_server import serving
from support.stories.kubeconfig_folder import Desk
from support.stories.plugin import commit
from tiphys_controller import resume_run, start_run
from tiphys_plugin.quota.lease import PreemptionNotice
from tiphys_plugin.quota.preemption.victims import VictimSelection

from hera_pipelines.cli.gpus.preemption_preview import (
    describe_eviction,
    describe_preemption,
    preemption_document,
)
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.workflow_nodes import NODE_NAME_ANNOTATION, WORKFLOW_LABEL
from tiphys.records import AttemptEndOutcome, Cause, Escalation, FailureEvidence, SubmissionEnd, utc_now
from tiphys.store import DirectoryStore, RunLayout

QUEUES = "queues: [{name: research, gpus: {A100: 8}}]"
MOVING = """
queues: [{name: research, gpus: {A100: 16}, backfill: preemptible}]
nodes: [{name: n1, gpu_type: A100, gpus: 8}, {name: n2, gpu_type: A100, gpus: 8}]
"""


@pytest.fixture
def desk(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TIPHYS_STORE", raising=False)
    with serving() as server:
        made = Desk(server, tmp_path, capsys)
        made.queues("apply", text=QUEUES)
        yield made


@pytest.fixture
def later(monkeypatch):
    """The command looks at objects that are a minute old."""
    monkeypatch.setattr("hera_pipelines.cli.look.why.utc_now", lambda: utc_now() + timedelta(minutes=1))


def why(desk: Desk, *arguments: str) -> tuple[int, str, str]:
    return desk.tiphys("why", *arguments)


def test_a_reason_to_wait_is_shown_with_its_numbers(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1", seconds=3600))
    ledger.request(ask(4, "u2"))
    code, out, _ = why(desk, "run-u2/fit")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("run-u2/fit has waited 0:0")
    assert lines[0].endswith("for 4 A100 of queue research")
    assert lines[1] == "  WaitingForQuota: queue research holds 6 of 8 A100; 4 A100 asked"
    assert lines[2].startswith("  position 1; expected to start by 20")


def test_a_waiting_step_shows_the_requests_before_it(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1"))
    ledger.request(ask(4, "u2"))
    _, out, _ = why(desk, "run-u2")
    assert "FirstInLine: later requests of the queue may start on what it lacks until 20" in out
    desk.queues("apply", text="queues: [{name: research, gpus: {A100: 8}, backfill: strict}]")
    ledger.request(ask(1, "u3"))
    _, out, _ = why(desk, "run-u3")
    assert "BehindEarlierRequest: 1 A100 asked; behind run-u2/fit (4 A100, asked earlier)" in out
    assert "position 2; no expected start" in out


def test_a_step_with_a_lease_shows_since_when(desk):
    desk.ledger().request(ask(6, "u1"))
    _, out, _ = why(desk, "run-u1")
    assert out.startswith("run-u1/fit holds 6 A100 of queue research since 20")


def test_a_fanned_out_step_stands_for_all_of_its_items(desk):
    ledger = desk.ledger()
    for step in ("fit.0123456789ab.0", "fit.ba9876543210.0", "fitter"):
        ledger.request(ask(4, "u1", step=step))
    _, out, _ = why(desk, "run-u1/fit")
    assert {line.split()[0] for line in out.splitlines()} == {"run-u1/fit.0123456789ab.0", "run-u1/fit.ba9876543210.0"}
    assert "fit.ba9876543210.0 holds" in why(desk, "run-u1/fit.ba9876543210.0")[1]


def test_items_are_named_and_found_as_people_type_them(desk):
    ledger = desk.ledger()
    for index in (0, 1, 2):
        ledger.request(ask(6, "u1", step=f"fit.0123456789ab.{index}", item_index=index))
    _, out, _ = why(desk, "run-u1/fit")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("run-")] == [
        *("run-u1/fit[0]", "run-u1/fit[1]", "run-u1/fit[2]")
    ]
    assert "behind run-u1/fit[1] (6 A100, asked earlier)" in out
    _, out, _ = why(desk, "run-u1/fit[1]")
    assert out.startswith("run-u1/fit[1] has waited")
    assert "0123456789ab" not in out + desk.queues("show")[1]
    assert "fit[2]" in desk.queues("show")[1]
    assert json.loads(why(desk, "run-u1/fit[1]", "-o", "json")[1])["waiting"][0]["step"] == "fit.0123456789ab.1"


def test_a_step_that_could_start_is_shown_as_such(desk):
    ledger = desk.ledger()
    ledger.request(ask(8, "u1"))
    ledger.request(ask(4, "u2"))
    ledger.release(ledger.snapshot().leases[0].id)
    _, out, _ = why(desk, "run-u2")
    assert "the GPUs are free" in out


def test_a_step_whose_queue_shrank_is_shown_as_never_starting(desk):
    ledger = desk.ledger()
    ledger.request(ask(8, "u1"))
    ledger.request(ask(4, "u2"))
    desk.queues("apply", text="queues: [{name: research, gpus: {A100: 2}}]")
    _, out, _ = why(desk, "run-u2")
    assert "ExceedsMaxQuota: 4 A100 can never be had" in out


def test_the_document_has_the_same_reasons(desk):
    ledger = desk.ledger()
    ledger.request(ask(6, "u1"))
    ledger.request(ask(4, "u2"))
    _, out, _ = why(desk, "run-u2", "-o", "json")
    [waiting] = json.loads(out)["waiting"]
    assert waiting["position"] == 1
    assert waiting["expectedStart"] is None
    assert [one["reason"] for one in waiting["reasons"]] == ["WaitingForQuota", "FirstInLine"]


def test_an_unknown_run_is_named_with_what_to_do(desk):
    code, _, err = why(desk, "run-u9/fit")
    assert code != 0
    assert "run-u9/fit neither holds GPUs nor waits for any in GPULedger ml/default; `tiphys get run-u9` shows" in err


def stick(desk: Desk, name: str, step: str = "fit") -> None:
    """A Workflow of this name, whose pod no node takes."""
    labels = {"tiphys.dev/pipeline": "digits"}
    flow = {"metadata": {"name": name, "namespace": "ml", "labels": labels}, "status": {"phase": "Running"}}
    message = "0/1 nodes are available: 1 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    mark = {WORKFLOW_LABEL: name}
    pod = {
        "metadata": {"name": f"{name}-fit", "labels": mark, "annotations": {NODE_NAME_ANNOTATION: f"{name}.{step}"}},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    api = desk.server.api()
    api.create(WORKFLOWS, "ml", {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", **flow})
    api.create(PODS, "ml", {"apiVersion": "v1", "kind": "Pod", **pod})


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("ledger", [True, False])
def test_why_names_what_keeps_a_pod_from_starting_with_the_remedy(desk, ledger):
    if ledger:
        desk.ledger().request(ask(6, "u1", workflow="run-u1-x2z"))
        stick(desk, "run-u1-x2z")  # the run has the name of its author
    else:
        stick(desk, "run-u1")
    arguments = ("run-u1",) if ledger else ("run-u1", "--name", "absent")
    code, out, _ = why(desk, *arguments)
    assert code == 0
    assert "fit: no node takes its pod: 0/1 nodes are available: 1 Insufficient cpu." in out
    assert "free or add nodes" in out
    assert ("holds 6 A100" in out) is ledger
    [obstacle] = json.loads(why(desk, *arguments, "-o", "json")[1])["obstacles"]
    assert obstacle["sentence"].startswith("no node takes its pod")
    task = obstacle["step"]
    assert json.loads(why(desk, f"run-u1/{task}", *arguments[1:], "-o", "json")[1])["obstacles"] == [obstacle]


@pytest.mark.usefixtures("later")
def test_why_of_a_step_is_silent_about_another(desk):
    desk.ledger().request(ask(6, "u1", workflow="run-u1"))
    stick(desk, "run-u1", step="prep")
    assert "no node takes its pod" in why(desk, "run-u1")[1]
    assert "no node takes its pod" not in why(desk, "run-u1/fit")[1]


PREEMPTING = "queues: [{name: research, gpus: {A100: 8}, preempts_lower_priority: true, min_runtime_seconds: %d}]"


def preempting(desk: Desk, min_runtime_seconds: int = 0):
    desk.queues("apply", text=PREEMPTING % min_runtime_seconds)
    ledger = desk.ledger()
    ledger.request(ask(4, "u1"))
    ledger.request(ask(4, "u2", priority=1))
    ledger.request(ask(4, "u3", priority=5))
    return ledger


def test_why_names_the_victims_and_their_lost_time(desk, tmp_path):
    preempting(desk)
    store = DirectoryStore(tmp_path / "store")
    commit(store, "run-u2/fit", 1, 7)
    _, out, _ = why(desk, "run-u3")
    assert re.search(
        r"  run-u[12]/fit \(4 A100 of queue research, priority [01]\) would be preempted, and lose at most "
        r"\ds, \d+ GPU-seconds if it saved nothing",
        out,
    )
    _, out, _ = why(desk, "run-u3", "--store", str(tmp_path / "store"))
    assert "run-u2/fit (4 A100 of queue research, priority 1) would be preempted" in out
    assert "at most" not in out
    _, out, _ = why(desk, "run-u3", "-o", "json", "--store", str(tmp_path / "store"))
    [waiting] = json.loads(out)["waiting"]
    [victim] = waiting["preemption"]["victims"]
    assert (victim["run"], victim["step"], victim["gpus"]) == ("run-u2", "fit", 4)


def test_why_names_the_leases_that_would_move_to_other_nodes():
    stays, moves = lease(2, "u1"), lease(3, "u2")
    selection = VictimSelection((stays, moves), {stays.id: 4.0, moves.id: 6.0}, frozenset({moves.id}))
    yields, moved = map(str, describe_preemption(selection, is_exact=True))
    assert "would be preempted, and lose 2s, 4 GPU-seconds" in yields
    assert "would be moved to other nodes, and lose 2s, 6 GPU-seconds" in moved
    assert [one["movesToOtherNodes"] for one in preemption_document(selection)["victims"]] == [False, True]


def test_why_gives_the_reason_that_no_lease_is_preempted(desk):
    preempting(desk, min_runtime_seconds=3600)
    _, out, _ = why(desk, "run-u3")
    assert "no lease would be preempted for it: MinRuntimeProtected: run-u" in out
    _, out, _ = why(desk, "run-u3", "-o", "json")
    [waiting] = json.loads(out)["waiting"]
    assert waiting["preemption"]["reason"] == "MinRuntimeProtected"
    desk.queues("apply", text=QUEUES)
    _, out, _ = why(desk, "run-u3")
    assert "no lease would be preempted for it: queue research preempts no training" in out


def test_a_preempted_step_and_the_step_that_waits_for_it_are_shown(desk):
    ledger = preempting(desk)
    first = ledger.snapshot().leases[0]
    assert ledger.mark_preempted(("u3", "fit"), {first.id: 60.0})
    _, out, _ = why(desk, "run-u1")
    assert "; preempted at " in out
    _, out, _ = why(desk, "run-u3")
    assert "WaitingForPreemptedCheckpoint: run-u1/fit was asked to save and go at" in out
    assert "no lease would be preempted for it: others were asked to leave for run-u3/fit already" in out


def test_a_lease_that_would_move_later_is_shown_with_the_time(desk):
    desk.queues("apply", text=MOVING)
    ledger = desk.ledger()
    leases = {uid: ledger.request(ask(gpus, uid)) for uid, gpus in (("ends", 6), ("stays", 3), ("moves", 2))}
    ledger.release(leases["ends"].lease)
    ledger.request(ask(8, "large"))
    _, out, _ = why(desk, "run-large")
    assert re.search(
        "no lease would be preempted for it: no training started behind it in its own queue, and none may move "
        "to other nodes now; run-moves/fit would be moved to other nodes from [0-9:]{8} on, once a checkpoint has "
        "just been saved\n",
        out,
    )


def test_a_lease_that_moves_to_other_nodes_is_not_called_preempted():
    notice = PreemptionNotice("u3", "fit", NOW, NOW + timedelta(minutes=2), moves=True)
    said = describe_eviction(replace(lease(2, "u1"), preemption=notice))
    assert said == "; asked to move to other nodes at 00:00:00, must save and exit by 00:02:00"


def test_failed_attempts_are_shown_from_the_store(desk, tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path / "store")
    write_run(store)
    found = FailureEvidence(rule="pod-out-of-memory", matched_text="OOMKilled", node="node-3")
    ended = end_of(1, Cause.OUT_OF_MEMORY, message="it was killed").model_copy(update={"evidence": found})
    given = Escalation(memory_bytes=12 << 30, explanation="12Gi of memory")
    layout = RunLayout(RUN)
    for claim in (claim_of(1), claim_of(2).model_copy(update={"escalation": given})):
        store.create(layout.attempt(STEP, claim.attempt), claim.to_bytes())
    store.create(layout.attempt_end(STEP, 1), ended.to_bytes())
    where = ("--store", str(tmp_path / "store"))

    code, out, _ = why(desk, f"{RUN}/{STEP}", *where)
    assert code == 0
    assert " ".join(out.split()) == (
        f"{RUN}/{STEP} attempt 1 ended by out of memory: it was killed classified by the rule pod-out-of-memory, "
        "which matched: OOMKilled; it ran on node-3 attempt 2 therefore received: 12Gi of memory"
    )
    [failure] = json.loads(why(desk, RUN, "-o", "json", *where)[1])["failures"]
    assert (failure["cause"], failure["evidence"]["node"], failure["nextAttempt"]) == (
        *("out_of_memory", "node-3"),
        "12Gi of memory",
    )

    code, _, err = why(desk, RUN)
    assert (code, "with --store URL this command also shows how its steps failed" in err) == (3, True)
    monkeypatch.setenv("TIPHYS_STORE", str(tmp_path / "store"))
    assert "ended by out of memory" in why(desk, RUN)[1]


def test_a_step_that_is_done_has_nothing_to_answer_for(desk, tmp_path):
    store = DirectoryStore(tmp_path / "store")
    write_run(store)
    layout = RunLayout(RUN)
    for number, end in ((1, end_of(1, Cause.HANG)), (2, end_of(2, None, outcome=AttemptEndOutcome.DONE))):
        store.create(layout.attempt(STEP, number), claim_of(number).to_bytes())
        store.create(layout.attempt_end(STEP, number), end.to_bytes())
    code, _, err = why(desk, RUN, "--store", str(tmp_path / "store"))
    assert code != 0
    assert "neither holds GPUs nor waits for any" in err


def test_failures_before_the_last_submission_are_counted_where_the_last_did_not_fail(desk, tmp_path):
    store, submitter = DirectoryStore(tmp_path / "runs"), FakeSubmitter(tmp_path / "cluster")
    start_run(store, submitter, pipeline_of(gated("prep"), gated("fit", depends="prep")), "digits")
    history = History(store, "digits")
    history.done("prep")
    history.failed("fit")
    submitter.end("digits")
    resume_run(store, submitter, "digits")
    history.done("fit", attempt=2, submission=2)
    for submission, status in ((1, "Failed"), (2, "Succeeded")):
        end = SubmissionEnd(run="digits", submission=submission, status=status)
        store.create(RunLayout("digits").submission_end(submission), end.to_bytes())

    def explain(what: str) -> str:
        return why(desk, what, "--store", str(tmp_path / "runs"))[1].removesuffix(", which `tiphys get` shows\n")

    assert explain("digits") == (
        "run digits succeeded: it waits for nothing; 1 submission before the last did not succeed"
    )
    assert explain("digits/fit") == "digits/fit waits for nothing; 1 attempt before the last failed"
    assert explain("digits/prep") == "digits/prep waits for nothing, and did not fail\n"
