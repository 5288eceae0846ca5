"""finalize seals a submission once, and says what failed in one line."""

import json

import pytest
from support.world import commit, fit, phase, prep, records, said, world
from tiphys_plugin import LOCAL_SETTINGS, PluginSettings
from tiphys_plugin.operations.finalize import summarize_failures

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


STOPPED_NODES = json.dumps([{"displayName": "run", "message": "Stopped with strategy 'Stop'"}])


@pytest.mark.parametrize(
    ("settings", "pod", "failures", "ended"),
    [
        (LOCAL_SETTINGS, "Failed", STOPPED_NODES, True),
        (LOCAL_SETTINGS, "Running", STOPPED_NODES, False),
        (LOCAL_SETTINGS, "Failed", '"null"', False),
        (PluginSettings(), "Failed", STOPPED_NODES, False),
    ],
)
def test_a_stop_ends_the_attempts_whose_pods_have_ended(tmp_path, settings, pod, failures, ended):
    here = world(tmp_path, settings=settings)
    flow = here.submit(fit(), prep())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase=pod)
    commit(here.store, "digits-abc12/fit", 1, 7)
    flow.finalize("Failed", failures)
    (attempt,) = read_step_attempts(here.store, "digits-abc12", "fit")
    found = attempt.end and (attempt.end.outcome, attempt.end.stopped, attempt.end.message, attempt.end.progress)
    assert found == ((AttemptEndOutcome.FENCED, True, "stopped with its workflow", True) if ended else None)


def test_a_stop_ends_the_newest_attempt(tmp_path):
    here = world(tmp_path, settings=LOCAL_SETTINGS)
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    flow.settle("fit", 0, exit_code="75")
    flow.admit("fit", 1)
    flow.pod("fit", 2, phase="Failed")
    flow.finalize("Failed", STOPPED_NODES)
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


def failed(name, template, message=""):
    pod = name if template == "main" else f"digits-7xk2p-{template}-12"
    return {"displayName": name, "templateName": template, "message": message, "podName": pod}


FIT = [
    failed("digits-7xk2p", "main"),
    failed("[1]", "", "child 'digits-7xk2p-12' failed"),
    failed("fit", "fit", "child 'digits-7xk2p-12' failed"),
    failed("run", "fit-run", "main: Error (exit code 1)"),
    failed("conclude", "fit-conclude", "fit failed in attempt 1 by user error"),
]
STOPPED = "workflow shutdown with strategy:  Stop"
WAITED = "Stopped with strategy 'Stop'"


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        (FIT, "fit failed in attempt 1 by user error"),
        (
            [failed("admit", "fit-admit", "prep failed in attempt 1 by output missing")],
            "prep failed in attempt 1 by output missing",
        ),
        ([failed("admit", "fit-admit", "Refused: no")], "fit-admit: Refused: no"),
        ([*FIT, failed("notify", "notify", "exit 2")], "fit failed in attempt 1 by user error; notify: exit 2"),
        (
            [*FIT, failed("run(0)", "prep-run", "OOMKilled")],
            "fit failed in attempt 1 by user error; prep-run: OOMKilled",
        ),
        ([*FIT, failed("run", "fit-run", STOPPED)], f"fit: {STOPPED}; fit failed in attempt 1 by user error"),
        ([FIT[4], failed("conclude", "eval-conclude", STOPPED)], f"eval: {STOPPED}; {FIT[4]['message']}"),
        ([*FIT, failed("attempts", "fit-attempt", WAITED)], f"fit: {WAITED}; {FIT[4]['message']}"),
        (
            [
                failed("digits-7xk2p", "main", WAITED),
                failed("fit", "fit", WAITED),
                failed("attempts", "fit-attempt", WAITED),
                failed("run", "fit-run", WAITED),
            ],
            f"fit: {WAITED}",
        ),
        (FIT[:3], "[1]: child 'digits-7xk2p-12' failed; digits-7xk2p: failed; fit: child 'digits-7xk2p-12' failed"),
    ],
)
def test_what_counts_is_said_first_whatever_the_order(nodes, line):
    for order in (nodes, nodes[::-1]):
        assert summarize_failures(json.dumps(json.dumps(order))) == line


def test_a_shutdown_is_never_cut_off():
    many = [failed(f"fit({n})", "plain", "exit 1 " + "x" * 50) for n in range(50)]
    assert summarize_failures(json.dumps([*many, failed("run", "fit-run", STOPPED)])).startswith(
        f"fit: {STOPPED}; fit(0)"
    )
