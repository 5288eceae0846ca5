"""A cluster with a real Kueue, which this suite neither builds nor installs.

It runs only when it is asked for, by ``make test-kueue``: a kubeconfig that happens
to be set must not make a test run write to somebody's cluster. Every test has a
namespace, a ClusterQueue and a ResourceFlavor of its own, and deletes them.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.builders.ledger import ask
from support.processes.polling import until
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.kueue.workload import SPOT_LABEL
from tiphys_plugin.quota.lease import Admission, Admitted, LeaseRequest

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, connect_to_cluster
from tiphys.kube.resources import KUEUE_FLAVORS, KUEUE_LOCAL_QUEUES, KUEUE_WORKLOADS, NAMESPACES, Resource
from tiphys.protocol.step_spec import GPU_RESOURCE

_HERE = Path(__file__).parent
CLUSTER_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "clusterqueues", "ClusterQueue")
GPUS = 8


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(_HERE)]
    for item in ours:
        item.add_marker(pytest.mark.kueue)
    if "kueue" not in config.option.markexpr:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@dataclass
class Rig:
    """A queue of eight GPUs of the type A100."""

    api: KubeApi
    name: str
    """Of the namespace, the ClusterQueue and the ResourceFlavor."""
    backend: KueueAdmission = field(init=False)

    def __post_init__(self) -> None:
        self.backend = self.service()

    def service(self) -> KueueAdmission:
        """One more service, which shares nothing with the others."""
        return KueueAdmission(self.api, [self.name])

    def ask(self, gpus: int, uid: str = "u1", **changes: Any) -> LeaseRequest:
        return ask(gpus, uid, namespace=self.name, **changes)

    def wait_for(self, request: LeaseRequest, kind: type[Admission]) -> Any:
        """Repeat the request, as Argo does, until its answer is of this kind."""
        answers: list[Admission] = []

        def is_answered() -> bool:
            answers.append(self.backend.request(request))
            return isinstance(answers[-1], kind)

        until(is_answered)
        return answers[-1]

    def admitted(self, gpus: int, uid: str = "u1", **changes: Any) -> Admitted:
        answer: Admitted = self.wait_for(self.ask(gpus, uid, **changes), Admitted)
        return answer

    def wait_for_words(self, request: LeaseRequest, words: str) -> Any:
        """Repeat the request until its message has ``words``."""
        answers: list[Any] = []

        def is_told() -> bool:
            answers.append(self.backend.request(request))
            return words in getattr(answers[-1], "message", "")

        until(is_told)
        return answers[-1]

    @property
    def used(self) -> int:
        """GPUs that Kueue counts as reserved."""
        queue = self.api.get(CLUSTER_QUEUES, None, self.name)
        assert queue is not None
        flavors = queue["status"].get("flavorsReservation") or []
        return sum(int(one["total"]) for flavor in flavors for one in flavor["resources"])

    def wait_until_used(self, gpus: int) -> None:
        until(lambda: self.used == gpus)

    def patch_queue(self, **spec: Any) -> None:
        self.api.patch(CLUSTER_QUEUES, None, self.name, {"spec": spec})

    def add_spot_flavor(self) -> str:
        """Eight GPUs of spot nodes beside those of the queue; returns the name of their flavor."""
        name = f"{self.name}-spot"
        taint = {"key": "spot", "value": "true", "effect": "NoSchedule"}
        labels = {"nvidia.com/gpu.product": "A100", "pool": "spot"}
        metadata = {"name": name, "labels": {SPOT_LABEL: "true"}}
        self.api.create(
            KUEUE_FLAVORS, None, {"metadata": metadata, "spec": {"nodeLabels": labels, "nodeTaints": [taint]}}
        )
        self.patch_queue(
            resourceGroups=[{"coveredResources": [GPU_RESOURCE], "flavors": [_quota(self.name), _quota(name)]}]
        )
        return name

    def patch_workload(self, lease: str, **spec: Any) -> None:
        self.api.patch(KUEUE_WORKLOADS, self.name, lease.partition("/")[2], {"spec": spec})


@pytest.fixture(scope="session")
def api() -> Iterator[KubeApi]:
    """The cluster; skips with one sentence if there is none, or it has no Kueue."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster with Kueue")
    try:
        connected = connect_to_cluster(Path(os.environ["KUBECONFIG"]))
        connected.list(KUEUE_WORKLOADS)
    except TiphysError as error:
        pytest.skip(f"the cluster of KUBECONFIG does not answer, or has no Kueue 0.15 or newer: {error}")
    yield connected
    connected.close()


@pytest.fixture
def rig(api: KubeApi) -> Iterator[Rig]:
    name = f"tiphys-test-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name}
    api.create(NAMESPACES, None, {"metadata": metadata})
    labels = {"nvidia.com/gpu.product": "A100", "pool": "reserved"}
    api.create(KUEUE_FLAVORS, None, {"metadata": metadata, "spec": {"nodeLabels": labels}})
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": [GPU_RESOURCE], "flavors": [_quota(name)]}],
    }
    api.create(CLUSTER_QUEUES, None, {"metadata": metadata, "spec": spec})
    local = {"metadata": {"name": "research", "namespace": name}, "spec": {"clusterQueue": name}}
    api.create(KUEUE_LOCAL_QUEUES, name, local)
    try:
        yield Rig(api, name)
    finally:
        for workload in api.list(KUEUE_WORKLOADS, name).items:
            api.delete(KUEUE_WORKLOADS, name, workload["metadata"]["name"])
        api.delete(NAMESPACES, None, name)
        api.delete(CLUSTER_QUEUES, None, name)
        for flavor in (name, f"{name}-spot"):
            api.delete(KUEUE_FLAVORS, None, flavor)


def _quota(flavor: str) -> dict[str, Any]:
    return {"name": flavor, "resources": [{"name": GPU_RESOURCE, "nominalQuota": str(GPUS)}]}
