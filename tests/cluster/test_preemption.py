"""A training that has to go for another, with real pods: asked, given its grace period, and its GPUs kept until then.

The plugin's own decisions over the ledger object, and Argo's part played by the
test: it makes the pods of attempts, and asks to admit and to conclude.
"""

import re
from collections.abc import Iterator

import pytest
from cluster.client import Cluster, Json
from cluster.test_gangs import RANKS, SETTINGS, TRAINER, Training, training
from support.builders.argo_objects import NARRATED
from support.builders.ledger import spec
from support.stories.plugin import Flow, fit, gpus, outputs, phase, said, workflow
from tiphys_plugin import PluginCore, Queues
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.eviction.evict import evict_lease
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.context import SingleStore

from tiphys.kube import KubeApi
from tiphys.kube.resources import GPU_LEDGERS, PODS, WORKFLOWS
from tiphys.protocol.step_spec import ATTEMPT_LABEL, PIPELINE_ANNOTATION, RUN_LABEL, STEP_LABEL
from tiphys.protocol.workflow_nodes import NODE_NAME_ANNOTATION
from tiphys.store import Store

__all__ = ["training"]

QUEUES = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 4}, "preempts_lower_priority": True}]})
GRACE_SECONDS = 280
"""Longer than the test needs; nothing ends by its being over."""
PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("was asked", flush=True))
print("trains", flush=True)
while not os.path.exists("/tmp/saved"):
    time.sleep(0.1)
sys.exit(75)
"""


class Place:
    """The plugin of one namespace, and the job that has trainings go."""

    def __init__(self, cluster: Cluster, api: KubeApi, store: Store, image: str) -> None:
        self.cluster, self.api, self.image = cluster, api, image
        seen = KubernetesCluster(api, (api.namespace,), "kubernetes:test")
        api.create(GPU_LEDGERS, api.namespace, {"metadata": {"name": "default"}, "spec": spec(QUEUES)})
        self.ledger = KubernetesLedger(api, api.namespace)
        self.core = PluginCore(store, seen, self.ledger, settings=SETTINGS)
        self.job = PreemptionLoop(self.ledger, seen, SingleStore(store))

    def submit(self, run: str, priority: int) -> Flow:
        step = fit(gpu=gpus(4, priority=priority), grace_seconds=GRACE_SECONDS, checkpoints=None)
        body = workflow([step], run)
        annotations = {**body["metadata"]["annotations"], **NARRATED}
        metadata = {"name": run, "labels": {PIPELINE_ANNOTATION: "digits"}, "annotations": annotations}
        made = self.api.create(WORKFLOWS, self.api.namespace, {**body, "metadata": metadata})
        return Flow(self, run, made["metadata"]["uid"], namespace=self.api.namespace)  # type: ignore[arg-type]  # the core is enough

    def start_pod(self, flow: Flow, attempt: int, retry: int) -> str:
        """The pod that Argo would make for an attempt; it trains when this returns."""
        name = f"{flow.name}-fit-{attempt}"
        owner = {"apiVersion": WORKFLOWS.api_version, "kind": "Workflow", "name": flow.name, "uid": flow.uid}
        metadata = {
            "name": name,
            "labels": {RUN_LABEL: flow.name, STEP_LABEL: "fit", ATTEMPT_LABEL: str(attempt)},
            "annotations": {NODE_NAME_ANNOTATION: f"{flow.name}.fit({retry}).run"},
            "ownerReferences": [owner],
        }
        container = {"name": "main", "image": self.image, "command": ["python", "-c", PROGRAM]}
        pod_spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "containers": [container],
        }
        self.api.create(PODS, self.api.namespace, {"metadata": metadata, "spec": pod_spec})
        self.cluster.wait("the pod trains", lambda: "trains" in self.log(name))
        return name

    def log(self, pod: str) -> str:
        return self.cluster.kubectl("logs", pod, "--namespace", self.api.namespace, check=False)

    def pod(self, name: str) -> Json | None:
        return self.api.get(PODS, self.api.namespace, name)

    def lease(self) -> Lease:
        [found] = self.ledger.snapshot().leases
        return found


@pytest.fixture
def place(cluster: Cluster, api: KubeApi, run_store: Store, images: dict[str, str]) -> Iterator[Place]:
    made = Place(cluster, api, run_store, images["tiphys"])
    yield made
    made.core.close()


def test_a_pod_is_asked_and_its_gpus_come_back_only_when_it_is_gone(place: Place) -> None:
    low, high = place.submit("low", 0), place.submit("high", 5)
    assert outputs(low.admit("fit", 0))["run"] == "true"
    pod = place.start_pod(low, attempt=1, retry=0)
    assert phase(high.admit("fit", 0)) == "Pending"

    place.job.run_once()
    leaving = place.lease().preemption
    assert leaving is not None
    assert (leaving.uid, (leaving.deadline - leaving.asked_at).total_seconds()) == (high.uid, GRACE_SECONDS)
    found = place.pod(pod)
    assert found is not None and found["metadata"]["deletionGracePeriodSeconds"] == GRACE_SECONDS
    place.cluster.wait("the program is asked", lambda: "was asked" in place.log(pod))

    waiting = high.admit("fit", 0)
    assert said(waiting).startswith("Deferred: WaitingForPreemptedCheckpoint: low/fit was asked to save and go at")
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Pending"
    place.job.run_once()
    assert place.lease().request.run == "low", "its pod is there, and so it holds its GPUs"

    # The program may end before this one does, and ends it.
    saved = ("--", "python", "-c", "open('/tmp/saved', 'w')")
    place.cluster.kubectl("exec", pod, "-n", place.api.namespace, *saved, check=False)
    place.cluster.wait("the pod is gone", lambda: place.pod(pod) is None)
    ended = low.end_try("fit", 0, exit_code="75")
    assert phase(ended) == "Error", "it is tried again"
    assert "ended by preemption, it was asked at" in said(ended) and "to save and go for high/fit" in said(ended)
    assert outputs(high.admit("fit", 0))["run"] == "true"
    assert phase(low.admit("fit", 1)) == "Pending"
    place.job.run_once()
    assert (place.lease().request.run, place.lease().preemption) == ("high", None)


@pytest.mark.parametrize("training", [TRAINER], indirect=True, ids=["trainer"])
def test_ranks_of_a_preempted_gang_save_together_and_continue_from_there(training: Training) -> None:
    training.begin()
    [lease] = training.ledger.snapshot().leases
    assert evict_lease(KubernetesCluster(training.api, None, "kubernetes:test"), lease) == RANKS
    training.watched("failed")
    message = training.end_try("Failed")
    found = re.search(r"ended by preemption.*attempt 2 resumes from step (\d+)", message)
    assert found, message
    training.begin(retry=1)
    assert training.logs("begins at") == [f"begins at {found[1]} and has met the others"] * RANKS
    training.watched("succeeded")
    training.end_try("Succeeded", retry=1, expected="Succeeded")
