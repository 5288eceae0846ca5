"""finalize seals a submission once, and says what failed in one line."""

import json

import pytest
from support.world import phase, prep, records, said, world
from tiphys_plugin.finalize import summarize


def test_first_seal_stands(tmp_path):
    flow = world(tmp_path).submit(prep())
    assert said(flow.finalize("Failed")) == "Run digits-abc12, submission 1: Failed"
    assert said(flow.finalize("Succeeded")) == "Run digits-abc12, submission 1: Failed"
    (sealed,) = [r for r in records(flow.world.store, "runs/digits-abc12/submissions/") if "status" in r]
    assert sealed["status"] == "Failed"


def test_workflow_that_ended_before_any_step_is_still_a_run(tmp_path):
    flow = world(tmp_path).submit(prep())
    assert phase(flow.finalize("Failed")) == "Succeeded"
    assert records(flow.world.store, "runs/digits-abc12/run.json")[0]["pipeline"] == "digits"


TWO = [{"displayName": "fit", "message": "exit 1"}, {"displayName": "prep", "message": ""}]


@pytest.mark.parametrize(
    ("failures", "line"),
    [
        (json.dumps(json.dumps(TWO)), "fit: exit 1; prep: failed"),
        (json.dumps(TWO), "fit: exit 1; prep: failed"),
        ('"null"', ""),
        ("null", ""),
        ("", ""),
        ("{{workflow.failures}}", ""),
        ('"[1, 2]"', ""),
        (json.dumps([{"displayName": "x", "message": "m" * 5000}]), "x: " + "m" * 997),
    ],
)
def test_failures_are_summarised_whatever_their_encoding(failures, line):
    assert summarize(failures) == line
