"""Objects start runs on a real API server: versitygw notifies the controller by itself, under the rights of the chart.

| what happens | what must hold |
|---|---|
| an object is written | versitygw's notification has one Workflow made |
| it is reported again: by versitygw, by hand, many times at once | still one |
| another content, another key | another Workflow |
| it is deleted, or does not match | nothing |
| the controller is down, so the notification is lost | the next controller finds the object, and makes one Workflow |
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.client import Cluster
from cluster.harness.settings import Settings
from cluster.rights import new_account
from support.processes.controller import ControllerProcess
from support.processes.polling import until
from support.servers.ports import free_ports
from support.stories.triggers import template

from tiphys.kube import KubeApi
from tiphys.kube.resources import EVENTS, WORKFLOW_TEMPLATES, WORKFLOWS
from tiphys.protocol.step_spec import STORE_ANNOTATION
from tiphys.records.trigger import TRIGGER_LABEL, TRIGGER_LABEL_VALUE
from tiphys.store import DirectoryStore
from tiphys.store.buckets.s3_client import make_client

TOKEN, BUCKET = "a-secret-token", "raw"
KEYS = {"AWS_ACCESS_KEY_ID": "raw", "AWS_SECRET_ACCESS_KEY": "raw-secret", "AWS_REGION": "us-east-1"}
PATIENCE = 600.0
RULES = [
    {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["list", "watch", "patch", "get", "create"]},
    {"apiGroups": ["argoproj.io"], "resources": ["workflowtemplates"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["kube-root-ca.crt"], "verbs": ["get"]},
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "get", "update"]},
]


def find_versitygw() -> str:
    built = Settings.read().bin / "versitygw"
    return str(built) if built.exists() else shutil.which("versitygw") or ""


@contextmanager
def gateway(folder: Path, port: int, webhook: str) -> Iterator[None]:
    """versitygw over a folder, which posts each event to ``webhook``; it does not start unless that answers."""
    names = {"ROOT_ACCESS_KEY_ID": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_ACCESS_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
    environment = {**os.environ, **names, "VGW_EVENT_WEBHOOK_URL": webhook}
    (folder / "data").mkdir()
    command = [find_versitygw(), "--quiet", f"--port=127.0.0.1:{port}", "posix", str(folder / "data")]
    with (folder / "versitygw.log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            started.kill()
            started.wait()


class ObjectStory:
    """A namespace with a trigger, a bucket that notifies, and controllers one after another."""

    def __init__(self, api: KubeApi, kubeconfig: Path, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.controller_port, self.gateway_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.controller_port}/v1/storage-events"
        endpoint = f"http://127.0.0.1:{self.gateway_port}"
        self.client = make_client({**KEYS, "AWS_ENDPOINT_URL_S3": endpoint})
        (folder / "token").write_text(TOKEN)
        self._environment = {**KEYS, "AWS_ENDPOINT_URL_S3": endpoint, "KUBECONFIG": str(kubeconfig)}
        document = template(namespace=api.namespace, objects=f"s3://{BUCKET}/in/", pattern="*.csv", since=LONG_AGO)
        document["metadata"]["labels"] = {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}
        document["spec"]["workflowMetadata"]["annotations"][STORE_ANNOTATION] = DirectoryStore(folder / "store").url
        api.create(WORKFLOW_TEMPLATES, api.namespace, document)

    def controller(self) -> ControllerProcess:
        """It lists the bucket when it begins to lead, and then not for an hour."""
        given = [f"--store={self.folder / 'store'}", f"--namespace={self.api.namespace}"]
        given += [f"--lease-namespace={self.api.namespace}", f"--token-file={self.folder / 'token'}"]
        given += [f"--port={self.controller_port}", f"--trigger-source=s3://{BUCKET}/in"]
        return ControllerProcess([*given, "--trigger-interval-seconds=3600"], self._environment)

    def put(self, key: str, content: str) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content.encode())

    def create_bucket(self) -> None:
        until(self._creates_bucket, PATIENCE)

    def _creates_bucket(self) -> bool:
        try:
            self.client.create_bucket(Bucket=BUCKET)
        except Exception as error:
            if "Could not connect" in str(error) or "Connection" in type(error).__name__:
                return False
            raise
        return True

    def sources(self) -> list[str]:
        """The object of each Workflow."""
        found = [one["spec"]["arguments"]["parameters"] for one in self.api.list(WORKFLOWS, self.api.namespace).items]
        return sorted(each["value"] for one in found for each in one if each["name"] == "source")

    def post(self, key: str) -> dict[str, Any]:
        """A notification in the form of S3, which encodes keys."""
        record = {"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": BUCKET}, "object": {"key": key}}}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(self.url, json={"Records": [record]}, headers=headers, timeout=PATIENCE)
        assert answer.status_code in (200, 503), answer.text
        counts: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return counts

    def reasons(self) -> list[str]:
        """Reasons of the Events beside the Workflows that tell of a trigger."""
        found = self.api.list(EVENTS, self.api.namespace).items
        return [one["message"] for one in found if one["reason"] == "RunTriggered"]


LONG_AGO = "2020-01-01T00:00:00Z"


def tell(story: ObjectStory) -> None:
    first, second = f"s3://{BUCKET}/in/a.csv", f"s3://{BUCKET}/in/b <b>+c%20.csv"
    with story.controller() as controller:
        until(lambda: controller.said("trigger.refused"), PATIENCE)  # it cannot list, and tries again in an hour
        with gateway(story.folder, story.gateway_port, story.url.replace("://", f"://versitygw:{TOKEN}@")):
            story.create_bucket()
            story.put("in/a.csv", "1")
            until(lambda: story.sources() == [first], PATIENCE)
            story.put("in/a.csv", "1")
            story.put("in/b <b>+c%20.csv", "1")
            # Before the many: versitygw sends once, and what the controller is too busy for is made in an hour.
            until(lambda: story.sources() == [first, second], PATIENCE)
            with ThreadPoolExecutor(8) as callers:
                counts = list(callers.map(story.post, ["in/a.csv"] * 24))
            assert story.sources() == [first, second]
            assert sum(one.get("started", 0) for one in counts) <= 1, "the second upload has another time"
            story.put("in/a.csv", "2")
            until(lambda: story.sources() == [first, first, second], PATIENCE)
            story.put("in/a.txt", "1")
            story.client.delete_object(Bucket=BUCKET, Key="in/b <b>+c%20.csv")
            assert story.post("in/a.csv")["started"] == 0
            started = [one for one in controller.log if one.get("event") == "trigger.started"]
            assert {one["source"] for one in started} == {"delivered"}
            until(lambda: len(story.reasons()) >= 3, PATIENCE)
            assert all("a notification named it" in one for one in story.reasons())
            controller.send(signal.SIGKILL)
            controller.ended()
            story.put("in/lost.csv", "1")
            with story.controller() as following:
                until(lambda: following.said("trigger.started"), PATIENCE)
                lost = f"s3://{BUCKET}/in/lost.csv"
                assert story.sources() == [first, first, second, lost]
                assert story.post("in/lost.csv")["repeated"] == 1
                [found] = [one for one in following.log if one["event"] == "trigger.started"]
                assert (found["object"], found["source"]) == (lost, "found")
            assert story.sources() == [first, first, second, lost]


@pytest.fixture
def story(cluster: Cluster, api: KubeApi, namespace: str, tmp_path: Path) -> ObjectStory:
    if not find_versitygw():
        pytest.skip("there is no versitygw, neither of `make cluster` nor on PATH")
    return ObjectStory(api, new_account(cluster, namespace, "controller", RULES, tmp_path), tmp_path)


def test_an_object_has_one_workflow_however_it_is_noticed(story: ObjectStory) -> None:
    tell(story)
