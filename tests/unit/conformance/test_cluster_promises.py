"""What a cluster makes of the two Workflows, and what is found.

| Argo and Tiphys | found |
|---|---|
| do as they should | held |
| make two Workflows; start from the beginning; lose bits; repeat a step; grant too much | broken |
| lack a part, the image, the queue | not tried, with the remedy |
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.builders.lineage import claim_of, commit, ref, write_claim
from support.builders.preflights import CLUSTER, STORE
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.servers.kube_server import KubeServer, serving
from tiphys_controller.doctor import Finding
from tiphys_controller.doctor.observed import DeploymentSearch
from tiphys_controller.kubernetes import KubernetesSubmitter

from hera_pipelines.conformance import cluster_promises
from hera_pipelines.conformance.cluster_promises import ClusterPromises
from hera_pipelines.conformance.program import train_undisturbed
from hera_pipelines.conformance.promises import try_promises
from tiphys.kube import KubeApi, identify_cluster
from tiphys.kube.resources import GPU_LEDGERS, PODS, WORKFLOWS
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, Output
from tiphys.store import RunLayout, list_runs

NAME, SEED = "conformance-1", 9
LEDGER = {"metadata": {"name": "default"}, "spec": {"queues": [{"name": "research", "gpus": {"A100": 3, "*": 1}}]}}


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as found:
        yield found


@pytest.fixture
def api(server: KubeServer) -> KubeApi:
    return server.api("ml")


@pytest.fixture
def promises(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> ClusterPromises:
    monkeypatch.setattr(cluster_promises, "_POLL_SECONDS", 0.01)
    submitter = KubernetesSubmitter(api, identify_cluster(api))
    deadline = time.monotonic() + 120
    return ClusterPromises(api, MemoryStore(url=STORE), CLUSTER, submitter, "img:1", "research", NAME, SEED, deadline)


def found_by(promises: ClusterPromises, *names: str) -> dict[str, Finding]:
    findings: list[Finding] = []
    trials = [trial for trial in promises.trials() if trial[0] in names]
    try_promises(trials, findings, time.monotonic() + 600, lambda _: None)
    return {finding.check: finding for finding in findings}


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Something that the cluster does by itself while the body runs."""
    thread = threading.Thread(target=action)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def end_of(step: str, attempt: int, value: str = "", cause: Cause | None = None) -> AttemptEnd:
    outputs = (Output(name="digest", kind="parameter", key="data/digest", value=value),) if value else ()
    outcome = AttemptEndOutcome.FAILED if cause else AttemptEndOutcome.DONE
    return AttemptEnd(run=NAME, step=step, attempt=attempt, submission=1, outcome=outcome, cause=cause, outputs=outputs)


def make_pod(api: KubeApi, run: str) -> None:
    labels = {"workflows.argoproj.io/workflow": run, "tiphys.dev/step": "train"}
    made = api.create(PODS, "ml", {"metadata": {"name": f"{run}-train", "labels": labels}, "spec": {"containers": []}})
    api.patch(PODS, "ml", made["metadata"]["name"], {"status": {"phase": "Running"}}, subresource="status")


def end_workflow(api: KubeApi, run: str, phase: str) -> None:
    api.patch(WORKFLOWS, "ml", run, {"status": {"phase": phase}})


def train(promises: ClusterPromises, start: int | None = 4, digest: str = "", prepared: int = 1) -> None:
    """What Argo and Tiphys do with the training: its first pod is deleted after step 4."""
    lineage, layout = f"{NAME}/train", RunLayout(NAME)
    until(lambda: NAME in promises.runs and promises.submitter.find("ml", NAME))
    store = promises.store
    for attempt in range(1, prepared + 1):
        write_claim(store, claim_of(attempt, run=NAME, step="choose-seed"))
    write_claim(store, claim_of(1, run=NAME, step="train"))
    make_pod(promises.api, NAME)
    commit(store, ref(1, 4, lineage))
    until(lambda: not promises.api.list(PODS, "ml").items)
    store.create(layout.attempt_end("train", 1), end_of("train", 1, cause=Cause.PREEMPTION).to_bytes())
    begins_at = None if start is None else ref(1, start, lineage)
    write_claim(store, claim_of(2, begins_at, run=NAME, step="train"))
    answer = digest or train_undisturbed(SEED)
    store.create(layout.attempt_end("train", 2), end_of("train", 2, answer).to_bytes())
    end_workflow(promises.api, NAME, "Succeeded")


def test_a_workflow_that_is_sent_twice_is_made_once_and_goes_on_without_its_pod(promises: ClusterPromises) -> None:
    with meanwhile(lambda: train(promises)):
        found = found_by(promises, "submission", "deleted-pod")
    assert {name: finding.state.value for name, finding in found.items()} == {"submission": "ok", "deleted-pod": "ok"}
    assert found["submission"].sentence == f"two requests under one idempotency key made Workflow {NAME}"
    assert "attempt 2 went on from 1-4" in found["deleted-pod"].sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"start": None}, "attempt 2 started from the beginning"),
        ({"digest": "other"}, "its result is not that of an undisturbed one: other"),
        ({"prepared": 2}, "the finished step before it has 2 attempts"),
    ],
)
def test_a_training_that_goes_on_wrongly_breaks_the_promise(
    promises: ClusterPromises, options: dict[str, Any], sentence: str
) -> None:
    with meanwhile(lambda: train(promises, **options)):
        found = found_by(promises, "submission", "deleted-pod")
    assert found["deleted-pod"].state.value == "failed"
    assert sentence in found["deleted-pod"].sentence


def test_a_request_that_makes_two_workflows_breaks_the_promise(
    promises: ClusterPromises, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run = cluster_promises.start_run

    def start(store: Any, submitter: Any, manifest: Any, run: str, namespace: str, *, key: str) -> Any:
        return start_run(store, submitter, manifest, f"{run}-{random.random()}", namespace)

    monkeypatch.setattr(cluster_promises, "start_run", start)
    found = found_by(promises, "submission")["submission"]
    assert found.state.value == "failed"
    assert "two requests under one key made" in found.sentence


def test_a_workflow_that_fails_before_its_training_saves_is_no_broken_promise(promises: ClusterPromises) -> None:
    assert found_by(promises, "submission")["submission"].sentence.startswith("two requests")
    end_workflow(promises.api, NAME, "Failed")
    found = found_by(promises, "deleted-pod")["deleted-pod"]
    assert (found.state.value, found.sentence) == ("unknown", "it ended as Failed before a first checkpoint: -")


def refuse(promises: ClusterPromises, *, with_pod: bool = False) -> None:
    run = f"{NAME}-quota"
    until(lambda: run in promises.runs and promises.submitter.find("ml", run))
    if with_pod:
        make_pod(promises.api, run)
    end_workflow(promises.api, run, "Failed")


def test_a_request_beyond_its_queue_is_refused_without_a_pod(server: KubeServer, promises: ClusterPromises) -> None:
    server.api("tiphys").create(GPU_LEDGERS, "tiphys", LEDGER)
    with meanwhile(lambda: refuse(promises)):
        found = found_by(promises, "quota")["quota"]
    assert found.state.value == "ok"
    assert found.sentence == "5 GPUs were refused to research; 2 quotas hold 0, none too many"


def test_a_pod_beyond_the_quota_breaks_the_promise(server: KubeServer, promises: ClusterPromises) -> None:
    server.api("tiphys").create(GPU_LEDGERS, "tiphys", LEDGER)
    with meanwhile(lambda: refuse(promises, with_pod=True)):
        found = found_by(promises, "quota")["quota"]
    assert found.state.value == "failed"
    assert f"pods ['{NAME}-quota-train'] were made" in found.sentence


@pytest.mark.parametrize(
    ("changes", "sentence", "remedy"),
    [
        ({"image": ""}, "no image for its programs is named", "--image"),
        ({"store": MemoryStore(url="file:///runs")}, "pods cannot read file:///runs", "--store"),
        ({"store": MemoryStore(url="s3://others/x")}, "the services keep the runs of ml in", STORE),
        ({"observed": replace(CLUSTER, argo_kinds=frozenset())}, "`tiphys doctor --cluster` finds:", "argo"),
        ({"observed": replace(CLUSTER, tiphys=DeploymentSearch(()))}, "the plugin is not installed", "helm install"),
    ],
)
def test_a_missing_part_leaves_promises_untried_with_the_remedy(
    promises: ClusterPromises, changes: dict[str, Any], sentence: str, remedy: str
) -> None:
    found = found_by(replace(promises, **changes), "submission", "deleted-pod", "quota")
    assert {finding.state.value for finding in found.values()} == {"unknown"}
    assert sentence in found["submission"].sentence
    assert remedy in found["submission"].remedy
    assert promises.runs == []


@pytest.mark.parametrize(("queue", "sentence"), [("", "no queue is named"), ("others", "queue others has no quota")])
def test_a_queue_without_a_quota_is_not_tried(
    server: KubeServer, promises: ClusterPromises, queue: str, sentence: str
) -> None:
    server.api("tiphys").create(GPU_LEDGERS, "tiphys", LEDGER)
    found = found_by(replace(promises, queue=queue), "quota")["quota"]
    assert (found.state.value, found.sentence) == ("unknown", sentence)


def test_removal_leaves_neither_workflows_nor_records(server: KubeServer, promises: ClusterPromises) -> None:
    found_by(promises, "submission")
    notes: list[str] = []
    promises.remove(notes.append)
    assert notes == []
    assert server.objects("workflows") == []
    assert list(list_runs(promises.store)) == []


def test_a_run_that_was_never_recorded_is_removed_without_an_error(promises: ClusterPromises) -> None:
    promises.runs.append(NAME)
    promises.remove(pytest.fail)
