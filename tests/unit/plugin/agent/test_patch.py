"""What each answer of the API server to a patch means."""

from collections.abc import Iterator

import pytest
from support.fakes.task_sets import Controller, task
from support.servers.kube_server import KubeServer, serving
from tiphys_plugin.agent.patch import PatchOutcome, patch_task_set, workflow_awaits_node
from tiphys_plugin.agent.task_sets import TaskSet, parse_task_set

from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS

DONE = {"phase": "Succeeded", "message": "done"}


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as running:
        Controller(running.api()).create({"n1": task()})
        yield running


def stored(api: KubeApi) -> TaskSet:
    found = api.get(WORKFLOW_TASK_SETS, "ml", "flow")
    assert found is not None
    return parse_task_set(found)


def test_an_answer_is_written_into_the_version_it_was_decided_on(server: KubeServer) -> None:
    api = server.api()
    written = patch_task_set(api, stored(api), {"n1": DONE}, lambda: True)
    assert written.outcome is PatchOutcome.WRITTEN
    assert written.task_set == stored(api)
    assert stored(api).entries == {"n1": DONE}


def test_a_change_in_between_is_a_conflict_that_tells_what_is_there(server: KubeServer) -> None:
    api = server.api()
    before = stored(api)
    Controller(api).add({"n2": task("fit")})
    written = patch_task_set(api, before, {"n1": DONE}, lambda: True)
    assert written.outcome is PatchOutcome.CONFLICT
    assert written.task_set == stored(api)
    assert stored(api).entries == {}


def test_a_task_set_that_is_gone_or_another_one_is_a_conflict_without_one(server: KubeServer) -> None:
    api = server.api()
    before = stored(api)
    api.delete(WORKFLOW_TASK_SETS, "ml", "flow")
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True) == (PatchOutcome.CONFLICT, None, "")
    Controller(api).create({"n1": task()})
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True) == (PatchOutcome.CONFLICT, None, "")


def test_a_replica_that_does_not_lead_sends_no_patch(server: KubeServer) -> None:
    api = server.api()
    assert patch_task_set(api, stored(api), {"n1": DONE}, lambda: False).outcome is PatchOutcome.NOT_LEADING
    assert server.count("patch") == 0


@pytest.mark.parametrize(
    ("status", "message", "outcome"),
    [
        (413, "Request entity too large: limit is 3145728", PatchOutcome.REFUSED),
        (422, "phase: Invalid value", PatchOutcome.REFUSED),
        (500, "etcdserver: request is too large", PatchOutcome.REFUSED),
        (500, "trying to send message larger than max (2097194 vs. 2097152)", PatchOutcome.REFUSED),
        (500, "etcdserver: leader changed", PatchOutcome.UNREACHABLE),
        (503, "apiserver is shutting down", PatchOutcome.UNREACHABLE),
        (403, "cannot patch resource", PatchOutcome.UNREACHABLE),
        (409, "the storage changed its mind", PatchOutcome.UNREACHABLE),
        (0, "", PatchOutcome.UNREACHABLE),
    ],
)
def test_a_refused_patch_has_an_outcome_by_status_and_message(
    server: KubeServer, status: int, message: str, outcome: PatchOutcome
) -> None:
    api = server.api()
    before = stored(api)
    server.fail_next(status, verb="patch", message=message)
    written = patch_task_set(api, before, {"n1": DONE}, lambda: True)
    assert written.outcome is outcome
    assert message in written.error


def test_a_conflict_that_cannot_be_looked_at_is_tried_again_later(server: KubeServer) -> None:
    api = server.api()
    before = stored(api)
    Controller(api).add({"n2": task("fit")})
    server.fail_next(503, verb="get", plural="workflowtasksets")
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True).outcome is PatchOutcome.UNREACHABLE


def test_a_kind_without_a_status_of_its_own_is_named() -> None:
    with serving(with_status=frozenset()) as server:
        api = server.api()
        Controller(api).create({"n1": task()})
        written = patch_task_set(api, stored(api), {"n1": DONE}, lambda: True)
    assert written.outcome is PatchOutcome.UNREACHABLE
    assert "install the CustomResourceDefinitions" in written.error


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        ({"nodes": {"n1": {"phase": "Pending"}}}, True),
        ({"nodes": {"n1": {"phase": "Failed"}}}, False),
        ({"nodes": {"other": {"phase": "Pending"}}}, False),
        ({"compressedNodes": "H4sI"}, True),
        ({"offloadNodeStatusVersion": "fnv:1"}, True),
        ({}, False),
    ],
)
def test_the_workflow_says_whether_it_still_waits(server: KubeServer, status: dict[str, object], waits: bool) -> None:
    api = server.api()
    api.create(WORKFLOWS, "ml", {"metadata": {"name": "flow"}, "status": status})
    assert workflow_awaits_node(api, stored(api), "n1") is waits


def test_a_workflow_that_is_gone_waits_for_nothing(server: KubeServer) -> None:
    assert not workflow_awaits_node(server.api(), stored(server.api()), "n1")
