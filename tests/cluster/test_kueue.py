"""What Tiphys writes for Kueue, on a real API server: conditional writes and deletions, the status, and the rights.

The kinds are minimal definitions of our own with the names of Kueue's, and the
small Kueue of `support.fakes.kueue` admits and evicts. A cluster that has Kueue itself is
for `make test-kueue`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.client import Cluster
from cluster.rights import new_account
from support.builders.ledger import ask
from support.checks.chart import MINIMAL, find_helm, named, render
from support.fakes.kueue import FakeKueue
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.lease import Admitted, Deferred, LeaseRequest

from tiphys.errors import ConflictError, StoreError
from tiphys.kube import KubeApi, Resource, connect_to_cluster
from tiphys.kube.resources import (
    CUSTOM_RESOURCE_DEFINITIONS,
    KUEUE_FLAVORS,
    KUEUE_LOCAL_QUEUES,
    KUEUE_WORKLOADS,
)

OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(resource: Resource) -> dict[str, Any]:
    """The least that the API server needs to serve a kind of Kueue."""
    names = {"plural": resource.plural, "kind": resource.kind, "singular": resource.kind.lower()}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": OPEN, "status": OPEN}}}
    version = {"name": resource.version, "served": True, "storage": True, "schema": schema}
    has_status = resource == KUEUE_WORKLOADS
    scope = "Cluster" if resource == KUEUE_FLAVORS else "Namespaced"
    return {
        "apiVersion": CUSTOM_RESOURCE_DEFINITIONS.api_version,
        "kind": CUSTOM_RESOURCE_DEFINITIONS.kind,
        "metadata": {
            "name": f"{resource.plural}.{resource.group}",
            "labels": {"made-by": "tiphys-tests"},
            # The API server keeps the group for Kubernetes' own projects, to which Kueue belongs.
            "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
        },
        "spec": {
            "group": resource.group,
            "names": names,
            "scope": scope,
            "versions": [{**version, "subresources": {"status": {}}} if has_status else version],
        },
    }


@pytest.fixture(scope="module")
def kueue_kinds(cluster: Cluster) -> Iterator[None]:
    connected = connect_to_cluster(cluster.kubeconfig)
    resources = (KUEUE_WORKLOADS, KUEUE_LOCAL_QUEUES, KUEUE_FLAVORS)
    definitions = [definition(resource) for resource in resources]
    for one in definitions:
        found = connected.get(CUSTOM_RESOURCE_DEFINITIONS, None, one["metadata"]["name"])
        if found is not None and "made-by" not in (found["metadata"].get("labels") or {}):
            pytest.skip("this cluster has Kueue itself; `make test-kueue` tries it")
    cluster.apply(*definitions, namespace="default")
    cluster.established(*(one["metadata"]["name"] for one in definitions))
    yield
    for one in definitions:
        connected.delete(CUSTOM_RESOURCE_DEFINITIONS, None, one["metadata"]["name"])
    connected.close()


@pytest.fixture
def kueue(api: KubeApi, kueue_kinds: None) -> Iterator[FakeKueue]:
    yield FakeKueue(api, flavor=api.namespace, research=8)
    api.delete(KUEUE_FLAVORS, None, api.namespace)


@pytest.fixture
def backend(api: KubeApi, kueue: FakeKueue) -> KueueAdmission:
    return KueueAdmission(api, [api.namespace])


def request_of(api: KubeApi, gpus: int, uid: str = "u1", **changes: Any) -> LeaseRequest:
    return ask(gpus, uid, namespace=api.namespace, **changes)


def admitted(backend: KueueAdmission, kueue: FakeKueue, request: LeaseRequest) -> Admitted:
    assert isinstance(backend.request(request), Deferred)
    kueue.schedule()
    answer = backend.request(request)
    assert isinstance(answer, Admitted), answer
    return answer


def test_life_of_a_workload(api, kueue, backend):
    request = request_of(api, 8)
    answer = admitted(backend, kueue, request)
    assert KueueAdmission(api, None).request(request) == answer
    kueue.evict()
    assert backend.snapshot().leases[0].preemption is not None
    backend.release(answer.lease)
    backend.release(answer.lease)
    assert kueue.used("research") == 0
    assert isinstance(backend.request(request), Deferred), "the finished Workload is replaced"


def test_grant_on_an_old_version_is_refused(api, kueue, backend, monkeypatch):
    request = request_of(api, 8)
    backend.request(request)
    kueue.schedule()
    read_flavor = backend._read_flavor

    def evict_first(*arguments: Any) -> Any:
        monkeypatch.setattr(backend, "_read_flavor", read_flavor)
        kueue.evict()
        return read_flavor(*arguments)

    monkeypatch.setattr(backend, "_read_flavor", evict_first)
    assert isinstance(backend.request(request), Deferred)
    assert kueue.used("research") == 0
    assert backend.snapshot().leases == ()


def test_deletion_spares_what_was_changed_since(api, kueue, backend):
    request = request_of(api, 8)
    backend.request(request)
    [pending] = backend.workloads()
    kueue.schedule()
    backend.request(request)
    with pytest.raises(ConflictError):
        backend._delete(pending)
    backend.withdraw("u1")
    assert len(backend.snapshot().leases) == 1


def test_lost_workload_is_recorded_as_admitted(api, kueue, backend):
    request = request_of(api, 8)
    answer = admitted(backend, kueue, request)
    api.delete(KUEUE_WORKLOADS, api.namespace, answer.lease.partition("/")[2])
    assert backend.restore(answer.lease, request, api.namespace) == 8
    assert kueue.used("research") == 8


def test_elastic_gang_returns_lost_members(api, kueue, backend):
    answer = admitted(backend, kueue, request_of(api, 1, members=1, min_members=1, max_members=8))
    assert answer.members == 8
    backend.shrink(answer.lease, 5)
    assert kueue.used("research") == 5


@pytest.mark.skipif(not find_helm(), reason="there is no helm on PATH, nor in the cache of the test cluster")
def test_rights_of_the_chart_suffice_and_those_of_the_ledger_do_not(cluster: Cluster, api, kueue, tmp_path: Path):
    answers = {}
    for kind in ("kueue", "tiphys"):
        role = named(render(*MINIMAL, f"ledger.kind={kind}"), "Role", "ours-plugin-workflows", "system")
        kubeconfig = new_account(cluster, api.namespace, f"plugin-{kind}", role["rules"], tmp_path)
        connected = connect_to_cluster(kubeconfig)
        backend = KueueAdmission(connected, [api.namespace])
        try:
            answers[kind] = backend.request(request_of(api, 8))
            backend.withdraw("u1")
            assert backend.snapshot().pending == ()
        except StoreError as error:
            assert "upgrade the chart with `ledger.kind: kueue`" in str(error)
        connected.close()
    assert list(answers) == ["kueue"]
