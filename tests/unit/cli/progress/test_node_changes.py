"""A Workflow object of Argo, told as the local engine tells its own: node by node, what is new."""

from typing import Any

import pytest

from hera_pipelines.cli.progress.cluster import NodeChangeReader
from hera_pipelines.cli.progress.table import ProgressTable
from hera_pipelines.local.nodes import NodePhase


def node(name: str, phase: str = "Running", kind: str = "Plugin", **fields: Any) -> dict[str, Any]:
    return {
        "name": f"wf{name}",
        "type": kind,
        "templateName": "t",
        "phase": phase,
        "startedAt": "2026-01-01T12:00:00Z",
        **fields,
    }


def state(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"nodes": {str(index): one for index, one in enumerate(nodes)}}}


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("", ""),
        (".fit", "fit"),
        (".fit(1).admit", "fit"),
        (".sweep(0:lr:0.1).admit", "sweep"),
        (".onExit", ""),
        (".onExit[0].tell", ""),
    ],
)
def test_a_node_belongs_to_the_task_that_its_name_begins_with(name: str, task: str) -> None:
    [change] = NodeChangeReader("wf", ["fit", "sweep"]).changes(state(node(name)))
    assert (change.node, change.task) == (f"wf{name}", task)


def test_only_new_changes_are_reported() -> None:
    reader = NodeChangeReader("wf", ["fit"])
    assert len(reader.changes(state(node(".fit")))) == 1
    assert reader.changes(state(node(".fit"))) == []
    [change] = reader.changes(state(node(".fit", "Failed", message="no data", finishedAt="2026-01-01T12:00:09Z")))
    assert (change.phase, change.message, change.changed_at.second) == (NodePhase.FAILED, "no data", 9)


def test_changes_come_in_the_order_in_which_nodes_began() -> None:
    later = node(".fit.admit", startedAt="2026-01-01T12:00:05Z")
    changes = NodeChangeReader("wf", ["fit"]).changes(state(node(".fit[1].x", startedAt=None), later, node(".fit")))
    assert [one.node for one in changes] == ["wf.fit", "wf.fit.admit", "wf.fit[1].x"]


def test_an_ended_run_is_reported_in_the_order_of_its_events() -> None:
    nodes = [
        node(".a", "Succeeded", finishedAt="2026-01-01T12:00:09Z"),
        node(".a.run", "Succeeded", finishedAt="2026-01-01T12:00:09Z"),
        node(".a.admit", "Succeeded", finishedAt="2026-01-01T12:00:02Z"),
        node(".b", startedAt="2026-01-01T12:00:09Z"),
        node(".b.admit", startedAt="2026-01-01T12:00:09Z"),
    ]
    changes = NodeChangeReader("wf", ["a", "b"]).changes(state(*nodes))
    assert [one.node for one in changes] == ["wf.a.admit", "wf.a.run", "wf.a", "wf.b", "wf.b.admit"]


def test_a_step_ends_after_its_last_try() -> None:
    nodes = [
        node(".a", "Failed", kind="Retry", finishedAt="2026-01-01T12:00:09Z"),
        node(".a(0)", "Failed", kind="Pod", finishedAt="2026-01-01T12:00:03Z"),
        node(".a(1)", "Failed", kind="Pod", finishedAt="2026-01-01T12:00:09Z"),
    ]
    changes = NodeChangeReader("wf", ["a"]).changes(state(*nodes))
    assert [one.node for one in changes] == ["wf.a(0)", "wf.a(1)", "wf.a"]


@pytest.mark.parametrize(("word", "phase"), [("", NodePhase.PENDING), ("Daemoned", NodePhase.RUNNING)])
def test_words_that_the_local_engine_does_not_have(word: str, phase: NodePhase) -> None:
    [change] = NodeChangeReader("wf", ["fit"]).changes(state(node(".fit", word)))
    assert change.phase is phase


def test_a_pod_that_is_being_made_says_nothing() -> None:
    [change] = NodeChangeReader("wf", ["fit"]).changes(state(node(".fit", kind="Pod", message="ContainerCreating")))
    assert change.message == ""


def test_a_workflow_without_nodes_has_no_changes() -> None:
    assert NodeChangeReader("wf", ["fit"]).changes({}) == []
    assert NodeChangeReader("wf", ["fit"]).changes({"status": {"compressedNodes": "H4sI"}}) == []


def test_the_board_tells_a_cluster_run_as_it_tells_a_local_one() -> None:
    board, reader = ProgressTable(["fit"]), NodeChangeReader("wf", ["fit"])
    seen = [
        state(node(".fit", kind="Steps")),
        state(node(".fit", kind="Steps"), node(".fit(0).admit", "Pending", message="queue is full")),
        state(node(".fit", "Succeeded", kind="Steps")),
    ]
    lines = [line for one in seen for change in reader.changes(one) for line in board.apply_change(change)]
    assert lines == ["fit: Running", "fit: queue is full", "fit: Succeeded"]
