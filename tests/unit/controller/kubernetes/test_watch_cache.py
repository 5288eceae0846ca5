"""What the watches have seen: lists of one namespace say nothing about another, and what is gone is gone."""

import pytest
from support.argo_objects import agent_pod, workflow
from tiphys_controller.kubernetes.watch_cache import ClusterView

from tiphys.kube import Change, ChangeType, Synced


@pytest.fixture
def view() -> ClusterView:
    return ClusterView()


def names(view: ClusterView) -> list[str]:
    return sorted(one.name for one in view.workflows())


def test_a_list_replaces_what_was_known_of_its_namespace(view: ClusterView) -> None:
    view.take_workflows("ml", Synced([workflow("a"), workflow("b")]))
    view.take_workflows("dev", Synced([workflow("c", namespace="dev")]))
    view.take_workflows("ml", Synced([workflow("b")]))
    assert names(view) == ["b", "c"]
    assert [one.name for one in view.take_deleted()] == ["a"]
    assert view.take_deleted() == []


def test_changes_are_followed(view: ClusterView) -> None:
    view.take_workflows(None, Change(ChangeType.ADDED, workflow("a", phase="")))
    view.take_workflows(None, Change(ChangeType.MODIFIED, workflow("a", phase="Running")))
    assert [one.phase for one in view.workflows()] == ["Running"]
    view.take_workflows(None, Change(ChangeType.DELETED, workflow("a", phase="Running")))
    assert (names(view), [one.name for one in view.take_deleted()]) == ([], ["a"])


def test_one_that_was_over_is_cleaned_up_without_a_word(view: ClusterView) -> None:
    view.take_workflows(None, Synced([workflow("a", phase="Succeeded")]))
    view.take_workflows(None, Synced([]))
    assert view.take_deleted() == []


def test_only_failed_agent_pods_are_kept(view: ClusterView) -> None:
    view.take_agents(None, Synced([agent_pod("one", phase="Running"), agent_pod("two")]))
    assert [one.name for one in view.stuck_agents()] == ["two"]
    view.take_agents(None, Change(ChangeType.DELETED, agent_pod("two")))
    assert view.stuck_agents() == []


def test_waiting_ends_with_news(view: ClusterView) -> None:
    before = view.wait(-1, 0)
    view.take_agents(None, Synced([]))
    assert view.wait(before, 60) != before
    assert view.synced() == 1
