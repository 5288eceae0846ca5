"""What the watches have seen: lists of one namespace say nothing about another, and what is gone is gone."""

import pytest
from support.builders import authored_workflows
from support.builders.argo_objects import agent_pod, workflow
from support.builders.authored_workflows import train
from tiphys_controller.kubernetes.watch_cache import WatchCache

from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.kube import ListSnapshot, Object, WatchEvent, WatchEventType
from tiphys.protocol.gang import GangBackend, GangSpec
from tiphys.protocol.step_spec import STEP_ANNOTATION


@pytest.fixture
def view() -> WatchCache:
    return WatchCache()


def names(view: WatchCache) -> list[str]:
    return sorted(one.name for one in view.workflows())


def test_a_list_replaces_what_was_known_of_its_namespace(view: WatchCache) -> None:
    view.apply_workflow_change("ml", ListSnapshot([workflow("a"), workflow("b")]))
    view.apply_workflow_change("dev", ListSnapshot([workflow("c", namespace="dev")]))
    view.apply_workflow_change("ml", ListSnapshot([workflow("b")]))
    assert names(view) == ["b", "c"]
    assert [one.name for one in view.pop_deleted_workflows()] == ["a"]
    assert view.pop_deleted_workflows() == []


def test_changes_are_followed(view: WatchCache) -> None:
    view.apply_workflow_change(None, WatchEvent(WatchEventType.ADDED, workflow("a", phase="")))
    view.apply_workflow_change(None, WatchEvent(WatchEventType.MODIFIED, workflow("a", phase="Running")))
    assert [one.phase for one in view.workflows()] == ["Running"]
    view.apply_workflow_change(None, WatchEvent(WatchEventType.DELETED, workflow("a", phase="Running")))
    assert (names(view), [one.name for one in view.pop_deleted_workflows()]) == ([], ["a"])


def test_the_recorder_gets_each_state_of_a_workflow_and_its_deletion() -> None:
    states: list[tuple[str, str]] = []
    gone: list[str] = []
    view = WatchCache(
        on_workflow=lambda one: states.append((one["metadata"]["name"], one["status"]["phase"])), on_gone=gone.append
    )
    view.apply_workflow_change("ml", ListSnapshot([workflow("a"), workflow("b", phase="Succeeded")]))
    view.apply_workflow_change("ml", WatchEvent(WatchEventType.MODIFIED, workflow("a", phase="Failed")))
    view.apply_workflow_change("ml", WatchEvent(WatchEventType.DELETED, workflow("a", phase="Failed")))
    view.apply_workflow_change("dev", ListSnapshot([]))
    view.apply_workflow_change("ml", ListSnapshot([]))
    assert states == [("a", "Running"), ("b", "Succeeded"), ("a", "Failed")]
    assert gone == ["uid-of-a", "uid-of-b"]


@pytest.mark.parametrize(
    "hostile",
    [
        {"spec": {"templates": [{"metadata": {"annotations": {STEP_ANNOTATION: '"gang"'}}}]}},
        {"spec": {"templates": [{"metadata": {"annotations": {STEP_ANNOTATION: '{"gang": {"backend": "cloud"}}'}}}]}},
        {"spec": {"templates": [{"metadata": {"annotations": {STEP_ANNOTATION: '"gang"' + "[" * 100_000}}}]}},
        {"status": {"nodes": {"one": "no node"}}},
        {"status": {"nodes": {"one": {"type": "Plugin", "phase": "Pending", "message": 7}}}},
    ],
    ids=["no JSON", "unknown backend", "deep JSON", "no node", "no text"],
)
def test_a_workflow_that_cannot_be_read_hides_no_other(view: WatchCache, hostile: Object) -> None:
    view.apply_workflow_change(None, ListSnapshot([workflow("bad", **hostile), workflow("good")]))
    view.apply_workflow_change(None, WatchEvent(WatchEventType.MODIFIED, workflow("bad", **hostile)))
    assert (names(view), view.count_synced()) == (["good"], 1)


@pytest.mark.parametrize("backend", GangBackend)
def test_the_kinds_of_gangs_are_known_from_what_compile_wrote(view: WatchCache, backend: GangBackend) -> None:
    template = train("fit", asked={"gang": GangSpec(members=2, backend=backend)})
    spec = compile_workflow(authored_workflows.workflow(template), CompileOptions(store=authored_workflows.STORE))[
        "spec"
    ]
    view.apply_workflow_change(None, ListSnapshot([workflow("a", spec=spec)]))
    assert [one.gangs for one in view.workflows()] == [frozenset({backend})]


def test_a_finished_workflow_disappears_without_a_notice(view: WatchCache) -> None:
    view.apply_workflow_change(None, ListSnapshot([workflow("a", phase="Succeeded")]))
    view.apply_workflow_change(None, ListSnapshot([]))
    assert view.pop_deleted_workflows() == []


def test_only_failed_agent_pods_are_kept(view: WatchCache) -> None:
    view.apply_agent_pod_change(None, ListSnapshot([agent_pod("one", phase="Running"), agent_pod("two")]))
    assert [one.name for one in view.stuck_agent_pods()] == ["two"]
    view.apply_agent_pod_change(None, WatchEvent(WatchEventType.DELETED, agent_pod("two")))
    assert view.stuck_agent_pods() == []


def test_waiting_ends_with_news(view: WatchCache) -> None:
    before = view.wait(-1, 0)
    view.apply_agent_pod_change(None, ListSnapshot([]))
    assert view.wait(before, 60) != before
    assert view.count_synced() == 1
