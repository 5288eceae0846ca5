"""An object that cannot be read is that object's problem: every list and watch goes on without it.

Kubernetes takes objects of 10,000 levels; Python's parsers end at some hundred.

| a tenant writes | what follows |
|---|---|
| an object nested 1,500 deep, in metadata or spec | it is left out; log, metric and Event name it |
| a task set without types | the same |
| many such objects | the metric has a bounded number of names, and as few Events are written |
| an object that becomes unreadable while it is watched | it counts as deleted |
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.builders.argo_objects import posted_events, put, workflow
from support.fakes.task_sets import Controller as ArgoController
from support.fakes.task_sets import ScriptedCore, task, task_set
from support.processes.polling import until
from support.servers.kube_server import KubeServer, serving
from support.servers.kube_store import Collection, Place
from support.stories.triggers import template
from tiphys_controller.kubernetes.controller import Controller, ControllerDependencies
from tiphys_controller.submit.triggers.catalog import list_trigger_templates
from tiphys_plugin.agent import AgentMetrics, AgentSettings, SharedAgent

from tiphys.errors import StoreError, UsageError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEvent, WatchEventType, watch_objects
from tiphys.kube.resources import CONFIG_MAPS, JOBS, PODS, WORKFLOW_TASK_SETS, WORKFLOW_TEMPLATES, WORKFLOWS, Resource
from tiphys.records.trigger import TRIGGER_LABEL, TRIGGER_LABEL_VALUE
from tiphys.store import TenantStores

_DEEP = "a value of 1,500 levels"
_NESTED = {
    "lists": b"[" * 1500 + b'"]}"' + b"]" * 1500,
    "mappings": b'{"\\"{[":' * 1500 + b"1" + b"}" * 1500,
    "wide and deep": b"[" * 1500 + b"[],{}," * 3000 + b"1" + b"]" * 1500,
}
_KINDS = (PODS, JOBS, CONFIG_MAPS, WORKFLOWS, WORKFLOW_TEMPLATES, WORKFLOW_TASK_SETS)


@pytest.fixture(params=_NESTED)
def server(request: pytest.FixtureRequest) -> Iterator[KubeServer]:
    with serving() as running:
        running.raw = {f'"{_DEEP}"'.encode(): _NESTED[request.param]}
        yield running


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("ml")


def store(server: KubeServer, resource: Resource, body: Object, namespace: str = "ml") -> None:
    """Without a request: the reply would hold the object, which the client refuses to read."""
    whole = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
    whole["metadata"] = {"namespace": namespace, **body["metadata"]}
    place = Place(Collection(resource.group, resource.plural), namespace, body["metadata"]["name"])
    server.store.create(place.collection, namespace, whole)
    if "status" in body:
        server.store.write(place, "status", lambda found: {**found, "status": body["status"]})


def is_ready(controller: Controller) -> bool:
    try:
        controller.check_ready()
    except StoreError:
        return False
    return True


def count_named(api: KubeApi) -> dict[tuple[str, str, str], float]:
    registry = CollectorRegistry()
    registry.register(api.unreadable)
    [family] = registry.collect()
    return {(s.labels["kind"], s.labels["namespace"], s.labels["name"]): s.value for s in family.samples}


@pytest.mark.parametrize("resource", _KINDS, ids=lambda kind: kind.plural)
@pytest.mark.parametrize("place", ["metadata", "spec"])
def test_deep_object_is_left_out_of_a_list_and_named(
    server: KubeServer, api: KubeApi, resource: Resource, place: str
) -> None:
    deep = {"metadata": {"name": "bad", "managedFields": _DEEP}} if place == "metadata" else {"spec": {"x": _DEEP}}
    for name in ("a.grün", "bad", "c"):
        store(server, resource, {"metadata": {"name": name}, **(deep if name == "bad" else {})}, "vision")
    for limit in (500, 1):
        listing = api.list(resource, "vision", limit=limit)
        assert [found["metadata"]["name"] for found in listing.items] == ["a.grün", "c"]
        assert listing.resource_version
    assert count_named(api) == {(resource.kind, "vision", "bad"): 2}
    with pytest.raises(UsageError, match=r"/bad .*is nested more than 150 levels deep"):
        api.get(resource, "vision", "bad")


def test_object_that_becomes_deep_counts_as_deleted_and_the_watch_goes_on(api: KubeApi) -> None:
    for name in ("turns", "stays"):
        api.create(WORKFLOWS, "ml", {"metadata": {"name": name, "namespace": "ml"}})
    events = watch_objects(api, WORKFLOWS, "ml", sleep=lambda _: None)
    first = next(events)
    assert isinstance(first, ListSnapshot)
    api.patch(WORKFLOWS, "ml", "stays", {"spec": {"x": 1}})
    seen = [next(events)]
    server_side = {"spec": {"x": _DEEP}}
    with pytest.raises(UsageError, match="nested"):
        api.patch(WORKFLOWS, "ml", "turns", server_side)
    api.patch(WORKFLOWS, "ml", "stays", {"spec": {"x": 2}})
    seen += [next(events), next(events)]
    events.close()  # type: ignore[attr-defined]
    changes = [(event.type, event.object["metadata"]["name"]) for event in seen if isinstance(event, WatchEvent)]
    modified, deleted = WatchEventType.MODIFIED, WatchEventType.DELETED
    assert changes == [(modified, "stays"), (deleted, "turns"), (modified, "stays")]
    assert list(count_named(api)) == [("Workflow", "ml", "turns")]


def test_metric_has_few_names_and_each_is_announced_once(server: KubeServer, api: KubeApi) -> None:
    announced: list[str] = []
    api.unreadable.announce = lambda found, _: announced.append(found["metadata"]["name"])
    for number in range(50):
        store(server, JOBS, {"metadata": {"name": f"job-{number}"}, "spec": {"x": _DEEP}})
    store(server, JOBS, {"metadata": {"name": "job-1"}, "spec": {"x": _DEEP}}, "vision")
    for _ in range(2):
        assert api.list(JOBS).items == []
    named = count_named(api)
    assert named.pop(("Job", "ml", "")) == 60
    assert (len(named), len(announced), ("Job", "vision", "job-1") in named) == (21, 21, True)


@pytest.mark.parametrize(
    "hostile",
    [
        {"spec": {"tasks": {"n1": {"inputs": _DEEP}}}},
        {"spec": {"tasks": ["no mapping"]}},
        {"spec": {"tasks": {"n1": "no template"}}},
        {"spec": ["no mapping"]},
        {"spec": {"tasks": {"n1": task()}}, "status": {"nodes": {"n1": "no entry"}}},
        {"spec": {"tasks": {"n1": task()}}, "status": {"nodes": [7]}},
    ],
    ids=["deep", "list of tasks", "text for a template", "list for a spec", "text for an entry", "list of entries"],
)
def test_shared_agent_answers_beside_a_task_set_that_cannot_be_read(server: KubeServer, hostile: Any) -> None:
    api = server.api("ml")
    store(server, WORKFLOW_TASK_SETS, {**task_set({}, "bad-before", uid="uid-1"), **hostile})
    argo, core = ArgoController(api), ScriptedCore()
    argo.create({"n1": task()})
    settings = AgentSettings(workers=2, writers=1, batch_seconds=0.01, max_batch_seconds=0.05)
    agent = SharedAgent(server.api(), core.execute, [None], lambda: True, AgentMetrics(), settings)
    stop = threading.Event()
    thread = threading.Thread(target=agent.run, args=(stop,))
    thread.start()
    try:
        until(lambda: "n1" in argo.messages(), seconds=120)
        store(server, WORKFLOW_TASK_SETS, {**task_set({}, "bad.later", uid="uid-2"), **hostile})
        argo.add({"n2": task("fit")})
        until(lambda: "n2" in argo.messages(), seconds=120)
        assert thread.is_alive()
        assert not agent.watch_error
        until(lambda: len(count_named(agent._api)) == 2, seconds=120)
    finally:
        stop.set()
        thread.join()


def test_controller_is_ready_and_writes_an_event_beside_a_deep_workflow(server: KubeServer, tmp_path: Path) -> None:
    api = server.api("ml")
    put(api, workflow("good", run="good"))
    store(server, WORKFLOWS, workflow("bad", spec={"x": _DEEP}))
    put(api, workflow("odd", status={"nodes": {"one": "no node"}}))
    stores = TenantStores(f"{tmp_path}/{{namespace}}", ("ml",))
    controller = Controller(ControllerDependencies(api, ("ml",), stores.store, "one", "ml"))
    stop = threading.Event()
    thread = threading.Thread(target=controller.run, args=(stop,))
    thread.start()
    try:
        until(lambda: len([1 for reason, _ in posted_events(server) if reason == "Unreadable"]) == 2, seconds=120)
        until(lambda: b'kind="Workflow",name="bad",namespace="ml"' in controller.metrics.render(), seconds=120)
        until(lambda: is_ready(controller), seconds=120)
        assert any("nested more than 150 levels deep" in message for _, message in posted_events(server))
    finally:
        stop.set()
        thread.join()


def test_triggers_of_other_namespaces_are_read_beside_a_deep_template(server: KubeServer, api: KubeApi) -> None:
    for namespace in ("ml", "vision"):
        for name in ("digits", "bad") if namespace == "ml" else ("digits",):
            made = template(name, namespace)
            made["metadata"]["labels"] = {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}
            spec = {"x": _DEEP} if name == "bad" else made["spec"]
            store(server, WORKFLOW_TEMPLATES, {**made, "spec": spec}, namespace)
    found = [one["metadata"] for one in list_trigger_templates(api, None)]
    assert [(one["namespace"], one["name"]) for one in found] == [("ml", "digits"), ("vision", "digits")]
