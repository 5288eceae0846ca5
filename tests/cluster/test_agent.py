"""The shared agent on a real API server: what its writes may and may not do, and how it dies.

| what happens | what must hold |
|---|---|
| somebody has written since the patch was decided | the patch is refused, and tells what is there |
| the agent is killed while it answers | the next one answers the rest; nobody is answered twice in another way |
| the leader is paused, and wakes after the next one has answered | it overwrites nothing, and stands by |
"""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from cluster.client import Cluster, Store
from support.builders.admissions import live_workflow, open_task_set
from support.fakes.task_sets import Controller, task
from support.processes.agent import AgentProcess
from tiphys_plugin.agent.patch import PatchOutcome, patch_task_set
from tiphys_plugin.agent.task_sets import TaskSet, is_final, parse_task_set

from tiphys.kube import KubeApi
from tiphys.kube.resources import LEASES, WORKFLOW_TASK_SETS, WORKFLOWS

DONE = {"phase": "Succeeded", "message": "done"}


@pytest.fixture
def agent(cluster: Cluster, kinds: None, namespace: str, services_store: Store) -> Callable[[], AgentProcess]:
    where = [f"--store={services_store.url}", f"--namespace={namespace}", f"--release-namespace={namespace}"]
    environment = {**services_store.environment, "KUBECONFIG": str(cluster.kubeconfig)}
    return lambda: AgentProcess(where, environment)


def stored(api: KubeApi, name: str = "flow") -> TaskSet:
    found = api.get(WORKFLOW_TASK_SETS, api.namespace, name)
    assert found is not None
    return parse_task_set(found)


def submit(api: KubeApi, store: Store, name: str, steps: int) -> None:
    """A live Workflow of which every step waits to be admitted."""
    made = api.create(WORKFLOWS, api.namespace, live_workflow(name, api.namespace, store.url, steps))
    api.create(WORKFLOW_TASK_SETS, api.namespace, open_task_set(name, api.namespace, made["metadata"]["uid"], steps))


def opened(api: KubeApi, tasks: dict[str, Any]) -> None:
    """A task set whose Workflow exists, since Kubernetes deletes what has lost its owner."""
    owner = api.get(WORKFLOWS, api.namespace, "flow")
    if owner is None:
        owner = api.create(WORKFLOWS, api.namespace, {"metadata": {"name": "flow"}, "spec": {}})
    Controller(api, api.namespace).create(tasks, "flow", owner["metadata"]["uid"])


def answers(api: KubeApi, name: str) -> dict[str, Any]:
    """The final ones: a node whose call has to wait, for the store or another call, is Pending until then."""
    return {node: entry for node, entry in stored(api, name).entries.items() if is_final(entry)}


def attempts(api: KubeApi, name: str) -> set[str]:
    """Which attempt each node was given."""
    found = answers(api, name).values()
    return {one["value"] for entry in found for one in entry["outputs"]["parameters"] if one["name"] == "attempt"}


def holder(api: KubeApi) -> str:
    lease = api.get(LEASES, api.namespace, "tiphys-agent") or {}
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def test_a_patch_is_refused_after_another_write(api: KubeApi) -> None:
    opened(api, {"n1": task(), "n2": task("fit")})
    before = stored(api)
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True).task_set == stored(api)
    stale = patch_task_set(api, before, {"n1": {"phase": "Pending", "message": "position 2"}}, lambda: True)
    assert (stale.outcome, stale.task_set) == (PatchOutcome.CONFLICT, stored(api))
    assert stored(api).entries == {"n1": DONE}
    assert patch_task_set(api, stored(api), {"n1": None}, lambda: True).outcome is PatchOutcome.WRITTEN
    assert stored(api).entries == {}
    assert set(stored(api).tasks) == {"n1", "n2"}, "a patch of the status changes nothing else"


def test_a_patch_that_no_object_can_hold_is_refused_in_words(api: KubeApi) -> None:
    opened(api, {"n1": task()})
    refused = patch_task_set(api, stored(api), {"n1": {"phase": "Succeeded", "message": "x" * (2 << 20)}}, lambda: True)
    assert refused.outcome is PatchOutcome.REFUSED
    assert "large" in refused.error


def test_a_task_set_that_was_deleted_or_made_again_takes_no_answer(api: KubeApi) -> None:
    opened(api, {"n1": task()})
    before = stored(api)
    api.delete(WORKFLOW_TASK_SETS, api.namespace, "flow")
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True) == (PatchOutcome.CONFLICT, None, "")
    opened(api, {"n1": task()})
    assert patch_task_set(api, before, {"n1": DONE}, lambda: True) == (PatchOutcome.CONFLICT, None, "")
    assert stored(api).entries == {}


def test_open_steps_are_admitted_through_kills_of_the_agent(
    cluster: Cluster, api: KubeApi, services_store: Store, agent: Callable[[], AgentProcess]
) -> None:
    submit(api, services_store, "many", 40)
    with agent() as first:
        cluster.wait("some steps are admitted", lambda: answers(api, "many"))
        first.send(signal.SIGKILL)
        first.ended()
    with agent():
        cluster.wait("all steps are admitted", lambda: len(answers(api, "many")) == 40)
        assert attempts(api, "many") == {"1"}, "no step was opened twice"
        submit(api, services_store, "late", 3)
        cluster.wait("a new workflow is answered", lambda: len(answers(api, "late")) == 3)


def test_a_paused_leader_stands_by_when_it_wakes(
    cluster: Cluster, api: KubeApi, services_store: Store, agent: Callable[[], AgentProcess]
) -> None:
    with agent() as first:
        cluster.wait("the first leads", lambda: holder(api))
        paused = holder(api)
        with agent() as second:
            first.send(signal.SIGSTOP)
            submit(api, services_store, "flow", 5)
            cluster.wait("the second leads", lambda: holder(api) not in ("", paused))
            cluster.wait("it answers", lambda: len(answers(api, "flow")) == 5)
            before = json.dumps(answers(api, "flow"), sort_keys=True)
            first.send(signal.SIGCONT)
            cluster.wait("the first has noticed", lambda: first.said("leader.ended"))
            assert json.dumps(answers(api, "flow"), sort_keys=True) == before
            second.send(signal.SIGTERM)
            assert second.ended() == 0
        cluster.wait("the first leads again", lambda: holder(api) == paused)
        submit(api, services_store, "again", 2)
        cluster.wait("and answers", lambda: len(answers(api, "again")) == 2)
