"""Argo Events carries notifications to the controller, by the files of `templates/events` as they are.

Needs a cluster with Argo Events. TIPHYS_TEST_EVENT_BUS is the spec of the EventBus as JSON, for a cluster that cannot
have the bus that Argo Events makes itself.

| what happens | what must hold |
|---|---|
| both files are applied in a namespace that enforces the restricted standard | their pods get ready |
| an object is reported, again and again | one Workflow, because a notification named the object |
| the token of the controller is sent to the EventSource, or none | 401 |
"""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cluster.client import Cluster, Store
from support.checks.chart import CHART, ROOT, find_helm, helm
from support.stories.triggers import template

from tiphys.protocol.step_spec import STORE_ANNOTATION
from tiphys.records.trigger import TRIGGER_LABEL, TRIGGER_LABEL_VALUE

if not find_helm():
    pytest.skip("there is no helm on PATH, nor in the cache of the test cluster", allow_module_level=True)

BUS = json.loads(os.environ.get("TIPHYS_TEST_EVENT_BUS", '{"jetstream": {"version": "latest"}}'))
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
API_TOKEN, OBJECTS_TOKEN = "token-of-the-api", "token-of-the-objects"
NAME, KEY = "tiphys-objects", "in/a.csv"


@pytest.fixture(autouse=True)
def argo_events(cluster: Cluster) -> None:
    if "/sensors.argoproj.io" not in cluster.kubectl("get", "crd", "-o", "name"):
        pytest.skip("this cluster has no Argo Events")


@pytest.fixture
def tenant(
    cluster: Cluster, kinds: None, namespace: str, images: dict[str, str], cluster_store: Store
) -> Iterator[str]:
    """A namespace with a trigger; ``namespace`` has a controller that serves it, a bus, and both files."""
    release, tenant = f"r{uuid.uuid4().hex[:8]}", f"{namespace}-runs"
    cluster.kubectl("create", "namespace", tenant)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    for name, content in (
        ("tiphys-control", cluster_store.environment),
        ("tiphys-api", {"token": API_TOKEN}),
        (NAME, {"token": OBJECTS_TOKEN}),
    ):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": content}
        cluster.apply(secret, namespace=namespace)
    repository, _, tag = images["tiphys"].rpartition(":")
    settings = {
        "namespaces[0]": tenant,
        "store.url": cluster_store.url,
        "image.repository": repository,
        "image.tag": tag,
        "api.tokenSecret": "tiphys-api",
        "triggers.sources[0]": f"s3://{cluster_store.bucket}/in",
        "triggers.intervalSeconds": "3600",
        "networkPolicy.callers[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name": namespace,
    }
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    where = [f"--kubeconfig={cluster.kubeconfig}", "--namespace", namespace]
    helm("install", release, CHART, "--wait", "--timeout=20m", *given, *where, timeout=3000)
    trigger = template(namespace=tenant, objects=f"s3://{cluster_store.bucket}/in/", since=LONG_AGO)
    trigger["metadata"]["labels"] = {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}
    trigger["spec"]["workflowMetadata"]["annotations"][STORE_ANNOTATION] = cluster_store.url
    cluster.apply(trigger, namespace=tenant)
    metadata = {"name": "default"}
    cluster.apply(
        {"apiVersion": "argoproj.io/v1alpha1", "kind": "EventBus", "metadata": metadata, "spec": BUS},
        namespace=namespace,
    )
    source, sensor = (yaml.safe_load(file.read_text()) for file in files())
    http = sensor["spec"]["triggers"][0]["template"]["http"]
    http["url"] = http["url"].replace("tiphys-controller.tiphys.", f"{release}-controller.{namespace}.")
    cluster.apply(source, sensor, namespace=namespace)
    yield tenant
    helm("uninstall", release, "--wait", "--timeout=20m", *where, timeout=3000)
    cluster.kubectl("delete", "namespace", tenant, "--wait=false")


def files() -> list[Path]:
    return [ROOT / "templates" / "events" / f"objects-{name}.yaml" for name in ("source", "sensor")]


def is_ready(cluster: Cluster, namespace: str, kind: str) -> bool:
    found = cluster.get("deployment", "-l", f"{kind}-name={NAME}", namespace=namespace)["items"]
    return any(one["status"].get("readyReplicas") for one in found)


@contextmanager
def event_source(cluster: Cluster, namespace: str) -> Iterator[str]:
    """The URL at which this machine reaches the EventSource."""
    where = [f"--kubeconfig={cluster.kubeconfig}", "--namespace", namespace]
    command = [cluster.program, "port-forward", *where, f"service/{NAME}-eventsource-svc", ":12000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            [port] = re.findall(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            yield f"http://127.0.0.1:{port}/objects"
        finally:
            forwarding.terminate()


def send(url: str, bucket: str, token: str) -> int:
    record = {"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": bucket}, "object": {"key": KEY, "size": 1}}}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.post(url, json={"Records": [record]}, headers=headers, trust_env=False, timeout=60).status_code


def test_an_object_that_is_reported_again_and_again_has_one_workflow(
    cluster: Cluster, namespace: str, tenant: str, cluster_store: Store
) -> None:
    for kind in ("eventsource", "sensor"):
        cluster.wait(f"the pod of the {kind} is ready", lambda kind=kind: is_ready(cluster, namespace, kind), 1200)  # type: ignore[misc]
    cluster_store.client().put_object(Bucket=cluster_store.bucket, Key=KEY, Body=b"1")
    with event_source(cluster, namespace) as url:
        assert send(url, cluster_store.bucket, API_TOKEN) == 401
        assert send(url, cluster_store.bucket, "") == 401

        def workflows() -> list[Any]:
            assert send(url, cluster_store.bucket, OBJECTS_TOKEN) == 200
            found: list[Any] = cluster.get("workflows", namespace=tenant)["items"]
            return found

        cluster.wait("the object has a Workflow", workflows)
        for _ in range(5):
            assert len(workflows()) == 1
    cluster.wait("an Event says why", lambda: cluster.get("events", namespace=tenant)["items"])
    reasons = [one["message"] for one in cluster.get("events", namespace=tenant)["items"]]
    assert any("a notification named it" in one for one in reasons), reasons
