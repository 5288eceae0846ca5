"""finalize seals a submission once, and says what failed in one line."""

import json

import pytest
from support.stories.plugin import commit, fit, gpus, outputs, phase, prep, records, resumed, said, world
from tiphys_plugin import LOCAL_SETTINGS, PluginSettings, Queues
from tiphys_plugin.operations import finalize
from tiphys_plugin.operations.finalize import summarize_failures

from tiphys.errors import ConflictError
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEndOutcome
from tiphys.store import read_step_attempts


def test_first_seal_stands(tmp_path):
    flow = world(tmp_path).submit(prep())
    assert said(flow.finalize("Failed")) == "Run digits-abc12, submission 1: Failed"
    assert said(flow.finalize("Succeeded")) == "Run digits-abc12, submission 1: Failed"
    (sealed,) = [r for r in records(flow.world.store, "control/runs/digits-abc12/submissions/") if "status" in r]
    assert sealed["status"] == "Failed"


@pytest.mark.parametrize(("said_phase", "counted"), [("Failed", "Failed"), ("a phase of a tenant's own", "Error")])
def test_the_end_of_a_workflow_counts_once_by_a_phase_of_argo(tmp_path, said_phase, counted):
    flow = world(tmp_path).submit(prep())
    flow.finalize(said_phase)
    flow.finalize(said_phase)
    text = flow.world.core.metrics.render().decode()
    counts = {phase: float(phase == counted) for phase in ("Succeeded", "Failed", "Error")}
    for one, count in counts.items():
        assert f'tiphys_submissions_ended_total{{phase="{one}"}} {count}' in text
    assert text.count("tiphys_submissions_ended_total{") == 3


def test_workflow_that_ended_before_any_step_is_still_a_run(tmp_path):
    flow = world(tmp_path).submit(prep())
    assert phase(flow.finalize("Failed")) == "Succeeded"
    assert records(flow.world.store, "control/runs/digits-abc12/run.json")[0]["pipeline"] == "digits"


def stop(flow):
    here = flow.world
    workflow = here.cluster.workflow("ml", flow.name)
    workflow["spec"]["shutdown"] = "Stop"
    here.cluster.write_workflow(workflow)


@pytest.mark.parametrize("settings", [LOCAL_SETTINGS, PluginSettings()])
def test_stop_ends_the_attempt_once_its_pods_have_ended_and_counts_the_last_checkpoint(tmp_path, settings):
    here = world(tmp_path, settings=settings)
    flow = here.submit(fit(), prep())
    flow.admit("fit", 0)
    flow.pod("fit", 1)
    stop(flow)
    waiting = flow.finalize("Failed")
    assert phase(waiting) == "Pending"
    assert "still ending" in said(waiting)
    (attempt,) = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.end is None
    commit(here.store, "digits-abc12/fit", 1, 7)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    assert "go on with `tiphys resume digits-abc12`, not with `argo retry`" in said(flow.finalize("Failed"))
    (attempt,) = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.end is not None
    assert (attempt.end.outcome, attempt.end.stopped) == (AttemptEndOutcome.FENCED, True)
    assert attempt.end.message == "stopped by a person"
    assert attempt.end.last_checkpoint is not None
    assert attempt.end.last_checkpoint.checkpoint.global_step == 7


def test_stop_gives_the_gpus_back_as_soon_as_the_pods_are_gone(tmp_path):
    queues = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})
    here = world(tmp_path, queues)
    flow = here.submit(fit(gpu=gpus(2)), fit(name="évaluer.v2", gpu=gpus(4)))
    for step in ("fit", "évaluer.v2"):
        flow.admit(step, 0)
    flow.pod("fit", 1)
    stop(flow)
    assert phase(flow.finalize("Failed")) == "Pending"
    assert [lease.request.step for lease in here.ledger.snapshot().leases] == ["fit"]
    flow.pod("fit", 1, phase="Failed", exit_code=143)
    assert phase(flow.finalize("Failed")) == "Succeeded"
    assert not here.ledger.snapshot().leases


def test_failed_workflow_without_a_stop_leaves_its_attempts_open(tmp_path):
    here = world(tmp_path, settings=LOCAL_SETTINGS)
    flow = here.submit(fit(), prep())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed")
    flow.finalize("Failed", '"null"')
    (attempt,) = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.end is None


def test_training_that_succeeded_before_the_stop_is_done(tmp_path):
    here = world(tmp_path)
    flow = here.submit(fit())
    admitted = flow.admit("fit", 0)
    flow.write_output(admitted, "artifacts/model", b"weights")
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    stop(flow)
    flow.finalize("Failed")
    (attempt,) = read_step_attempts(here.store, "digits-abc12", "fit")
    assert attempt.end is not None
    assert attempt.end.outcome is AttemptEndOutcome.DONE


def started_step(tmp_path, **changes):
    """A workflow that is stopped while its only step runs, which has stored its outputs."""
    flow = world(tmp_path).submit(prep(**changes))
    admitted = flow.admit("prep")
    flow.write_output(admitted, "0/parameters/rows", b"7")
    flow.write_output(admitted, "0/artifacts/data", b"data")
    stop(flow)
    return flow


def test_step_that_succeeded_before_the_stop_is_done(tmp_path):
    flow = started_step(tmp_path)
    flow.pod("prep", 1, None)
    assert phase(flow.finalize("Failed")) == "Pending"
    assert read_step_attempts(flow.world.store, flow.name, "prep")[0].end is None
    flow.pod("prep", 1, None, phase="Succeeded", exit_code=0)
    assert said(flow.finalize("Failed")) == "Run digits-abc12, submission 1: Failed"
    (attempt,) = read_step_attempts(flow.world.store, flow.name, "prep")
    assert attempt.end is not None
    assert (attempt.end.outcome, attempt.end.outputs[0].value) == (AttemptEndOutcome.DONE, "7")
    assert said(resumed(flow.world, prep()).admit("prep")) == "Adopted from attempt 1"


@pytest.mark.parametrize(
    ("exit_code", "outcome", "verdict"),
    [
        (143, AttemptEndOutcome.FENCED, "Attempt 1 of prep was stopped by a person; go on with"),
        (3, AttemptEndOutcome.FAILED, "prep failed in attempt 1 by user error"),
    ],
)
def test_step_that_did_not_survive_the_stop_has_its_verdict_in_the_record(tmp_path, exit_code, outcome, verdict):
    flow = started_step(tmp_path)
    flow.pod("prep", 1, None, phase="Failed", exit_code=exit_code)
    flow.finalize("Failed", json.dumps([failed(flow.name, "main", WAITED)]))
    (attempt,) = read_step_attempts(flow.world.store, flow.name, "prep")
    assert attempt.end is not None
    assert (attempt.end.outcome, attempt.end.stopped) == (outcome, outcome is AttemptEndOutcome.FENCED)
    assert verdict in flow.sealed()["message"]


def test_step_without_its_outputs_is_not_done_after_a_stop(tmp_path):
    flow = world(tmp_path).submit(prep())
    flow.admit("prep")
    flow.pod("prep", 1, None, phase="Succeeded", exit_code=0)
    stop(flow)
    flow.finalize("Failed")
    assert "prep failed in attempt 1 by output missing: declared output" in flow.sealed()["message"]


def test_stop_records_no_result_of_a_step_whose_standard_output_is_read(tmp_path):
    flow = started_step(tmp_path, has_result=True)
    flow.pod("prep", 1, None, phase="Succeeded", exit_code=0)
    flow.finalize("Failed")
    (attempt,) = read_step_attempts(flow.world.store, flow.name, "prep")
    assert attempt.end is not None
    assert attempt.end.outcome is AttemptEndOutcome.FENCED


def write_nodes(flow, *nodes):
    document = flow.world.cluster.workflow("ml", flow.name)
    document["status"]["nodes"] = {node["name"]: node for node in nodes}
    flow.world.cluster.write_workflow(document)


@pytest.mark.parametrize(("tries", "outcome"), [(1, AttemptEndOutcome.DONE), (2, AttemptEndOutcome.FAILED)])
def test_nodes_of_a_stopped_workflow_say_which_try_was_the_last_where_its_pods_are_gone(tmp_path, tries, outcome):
    flow = started_step(tmp_path)  # only the first try has left outputs
    names = [f"{flow.name}.prep.run", *(f"{flow.name}.prep.run({number})" for number in range(tries))]
    write_nodes(flow, *({"name": name, "phase": "Succeeded"} for name in names))
    flow.finalize("Failed")
    (attempt,) = read_step_attempts(flow.world.store, flow.name, "prep")
    assert attempt.end is not None
    assert attempt.end.outcome is outcome


def test_step_whose_pod_still_ends_delays_neither_the_end_nor_the_gpus_of_another(tmp_path):
    queues = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})
    flow = world(tmp_path, queues).submit(prep(name="a"), fit(name="b", gpu=gpus(2)))
    flow.admit("a")
    flow.admit("b", 0)
    flow.pod("a", 1, None)
    stop(flow)
    assert phase(flow.finalize("Failed")) == "Pending"
    assert read_step_attempts(flow.world.store, flow.name, "b")[0].end is not None
    assert not flow.world.ledger.snapshot().leases


def test_end_that_cannot_be_recorded_is_reported_and_does_not_keep_the_submission_open(tmp_path, monkeypatch):
    flow = started_step(tmp_path)
    flow.pod("prep", 1, None, phase="Succeeded", exit_code=0)

    def refuse(*_, **__):
        raise ConflictError("another has it")

    monkeypatch.setattr(finalize.conclude, "conclude_attempt", refuse)
    assert phase(flow.finalize("Failed")) == "Succeeded"
    assert flow.sealed()["message"] == "prep: its end cannot be recorded: another has it"


def test_damaged_claim_does_not_keep_the_submission_open(tmp_path):
    flow = started_step(tmp_path)
    key = f"control/runs/{flow.name}/attempts/prep/000000001.json"
    flow.world.store.delete(key)
    flow.world.store.create(key, b"{")
    assert said(flow.finalize("Failed")) == "Run digits-abc12, submission 1: Failed"


def test_stop_leaves_the_attempts_of_other_workflows_alone(tmp_path):
    flow = world(tmp_path).submit(prep())
    flow.admit("prep")
    other = resumed(flow.world, prep())
    stop(other)
    other.finalize("Failed")
    assert read_step_attempts(flow.world.store, flow.name, "prep")[0].end is None


@pytest.mark.parametrize(
    ("exit_code", "outcome"),
    [
        (None, AttemptEndOutcome.FENCED),
        (143, AttemptEndOutcome.FENCED),
        (137, AttemptEndOutcome.FENCED),
        (75, AttemptEndOutcome.FENCED),
        (3, AttemptEndOutcome.FAILED),
    ],
)
@pytest.mark.parametrize("judge", ["conclude", "finalize"])
def test_end_by_a_stop_is_not_charged_whichever_call_records_it(tmp_path, judge, exit_code, outcome):
    flow = world(tmp_path).submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=exit_code)
    stop(flow)
    code = "" if exit_code is None else str(exit_code)
    reply = flow.end_try("fit", 0, exit_code=code) if judge == "conclude" else flow.finalize("Failed")
    (attempt,) = read_step_attempts(flow.world.store, "digits-abc12", "fit")
    assert attempt.end is not None
    assert attempt.end.outcome is outcome
    assert attempt.end.stopped == (outcome is AttemptEndOutcome.FENCED)
    if attempt.end.stopped:
        assert "stopped by a person" in said(reply)
        assert "`tiphys resume digits-abc12`" in said(reply)


@pytest.mark.parametrize(("exit_code", "reason"), [(3, ""), (137, "OOMKilled")])
def test_training_that_a_stop_kept_from_its_next_try_has_its_verdict_in_the_record(tmp_path, exit_code, reason):
    flow = world(tmp_path).submit(fit(retry=RetryPolicy(user_error=1, out_of_memory=1)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=exit_code, reason=reason)
    stop(flow)
    flow.finalize("Failed")
    (attempt,) = read_step_attempts(flow.world.store, "digits-abc12", "fit")
    assert attempt.end is not None
    assert attempt.end.outcome is AttemptEndOutcome.FAILED
    assert flow.sealed()["message"].startswith("fit failed in attempt 1 by ")


def test_argo_retry_after_a_stop_opens_no_attempt_and_names_the_resume(tmp_path):
    here = world(tmp_path)
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    stop(flow)
    flow.finalize("Failed")
    for retry in (0, 1):
        reply = flow.admit("fit", retry)
        assert phase(reply) == "Failed"
        assert "`tiphys resume digits-abc12`" in said(reply)
    assert len(read_step_attempts(here.store, "digits-abc12", "fit")) == 1
    again = resumed(here, fit())
    assert outputs(again.admit("fit", 0))["attempt"] == "2"


def test_a_stop_ends_the_newest_attempt(tmp_path):
    here = world(tmp_path, settings=LOCAL_SETTINGS)
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    flow.end_try("fit", 0, exit_code="75")
    flow.admit("fit", 1)
    flow.pod("fit", 2, phase="Failed")
    stop(flow)
    flow.finalize("Failed")
    attempts = read_step_attempts(here.store, "digits-abc12", "fit")
    assert [attempt.end and attempt.end.stopped for attempt in attempts] == [False, True]


TWO = [{"displayName": "fit", "message": "exit 1"}, {"displayName": "prep", "message": ""}]


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        (json.dumps(json.dumps(TWO)), "fit: exit 1"),
        (json.dumps(TWO), "fit: exit 1"),
        (json.dumps(TWO[1:]), "prep: failed"),
        ('"null"', ""),
        ("null", ""),
        ("", ""),
        ("{{workflow.failures}}", ""),
        ('"[1, 2]"', ""),
        (json.dumps([{"displayName": "x", "message": "m" * 5000}]), "x: " + "m" * 997),
    ],
)
def test_failures_are_summarised_whatever_their_encoding(failures, line):
    assert summarize_failures(failures) == line


def failed(name, template, message="", phase="Failed"):
    pod = name if template == "main" else f"digits-7xk2p-{template}-12"
    return {"displayName": name, "templateName": template, "message": message, "podName": pod, "phase": phase}


FIT = [
    failed("digits-7xk2p", "main"),
    failed("[1]", "", "child 'digits-7xk2p-12' failed"),
    failed("fit", "fit", "child 'digits-7xk2p-12' failed"),
    failed("run", "fit-run", "main: Error (exit code 1)"),
    failed("conclude", "fit-conclude", "fit failed in attempt 1 by user error"),
]
NEXT_TRY = [
    failed("fit(0)", "fit", phase="Error"),
    failed("conclude", "fit-conclude", "Attempt 1 ended by preemption; attempt 2 follows", "Error"),
]
STOPPED = "workflow shutdown with strategy:  Stop"
WAITED = "Stopped with strategy 'Stop'"


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        (FIT, "fit failed in attempt 1 by user error"),
        ([failed("admit", "fit-admit", "Refused: no")], "fit-admit: Refused: no"),
        ([*FIT, failed("notify", "notify", "exit 2")], "fit failed in attempt 1 by user error; notify: exit 2"),
        (
            [*FIT, failed("run(0)", "prep-run", "OOMKilled")],
            "fit failed in attempt 1 by user error; prep-run: OOMKilled",
        ),
        ([*FIT, failed("run", "fit-run", STOPPED)], f"fit: {STOPPED}; fit failed in attempt 1 by user error"),
        ([FIT[4], failed("conclude", "eval-conclude", STOPPED)], f"eval: {STOPPED}; {FIT[4]['message']}"),
        ([*FIT, failed("fit", "fit", WAITED)], f"fit: {WAITED}; {FIT[4]['message']}"),
        (
            [
                failed("digits-7xk2p", "main", WAITED),
                failed("fit", "fit", WAITED),
                failed("fit(0)", "fit", WAITED),
                failed("run", "fit-run", WAITED),
            ],
            f"fit: {WAITED}",
        ),
        ([*FIT, *NEXT_TRY], "fit failed in attempt 1 by user error"),
        ([*NEXT_TRY, failed("admit", "fit-admit", "Rejected: no")], "fit-admit: Rejected: no"),
        ([failed("admit", "fit-admit", "the next try opens a new one", "Error"), *FIT], FIT[4]["message"]),
        (NEXT_TRY, "Attempt 1 ended by preemption; attempt 2 follows; fit(0): failed"),
        ([*NEXT_TRY, failed("run", "fit-run", "pod deleted", "Error")], "fit-run: pod deleted"),
        ([*NEXT_TRY, failed("run(0)", "prep-run", "pod deleted", "Error")], "prep-run: pod deleted"),
        ([failed("fit", "fit", WAITED), failed("conclude", "fit-conclude", WAITED, "Error")], f"fit: {WAITED}"),
        ([failed("run", "mine", STOPPED), failed("conclude", "mine", "exit 1")], f"run: {STOPPED}; conclude: exit 1"),
        (
            [failed("conclude", "prep-conclude", "agent pod failed", "Error"), failed("eval", "eval", "exit 1")],
            "agent pod failed; eval: exit 1",
        ),
        (FIT[:3], "[1]: child 'digits-7xk2p-12' failed; digits-7xk2p: failed; fit: child 'digits-7xk2p-12' failed"),
    ],
)
def test_the_deciding_failure_comes_first_in_any_order_of_nodes(nodes, line):
    for order in (nodes, nodes[::-1]):
        assert summarize_failures(json.dumps(json.dumps(order)), trainings=("fit",)) == line


def test_nodes_that_a_verdict_covers_are_left_out():
    nodes = [
        failed("prep", "shared", "No more retries left"),
        failed("prep(0)", "shared", "main: Error (exit code 1)"),
        failed("prep(1)", "shared", "main: Error (exit code 1)"),
        failed("preparation", "shared", "exit 2"),
        failed("run", "fit-run", STOPPED),
    ]
    verdicts = {"prep": "prep failed in attempt 1 by user error", "run": "run failed in attempt 1 by deadline"}
    line = f"fit: {STOPPED}; {verdicts['prep']}; {verdicts['run']}; preparation: exit 2"
    assert summarize_failures(json.dumps(nodes), verdicts) == line


def test_a_shutdown_is_never_cut_off():
    many = [failed(f"fit({n})", "plain", "exit 1 " + "x" * 50) for n in range(50)]
    assert summarize_failures(json.dumps([*many, failed("run", "fit-run", STOPPED)])).startswith(
        f"fit: {STOPPED}; fit(0)"
    )
