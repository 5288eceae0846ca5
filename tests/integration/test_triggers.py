"""Controllers as processes, an API server and a bucket: each object has one Workflow, whoever notices it, and when."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.processes.controller import ControllerProcess, kubeconfig
from support.processes.polling import until
from support.servers import http
from support.servers.kube_server import serving
from support.stories.triggers import template

from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TEMPLATES, WORKFLOWS
from tiphys.records.trigger import TRIGGER_LABEL, TRIGGER_LABEL_VALUE
from tiphys.store import open_store, read_events
from tiphys.store.buckets.s3_client import make_client

TOKEN = "a-secret-token"


def sources(api: KubeApi) -> list[str]:
    """The parameter `source` of each Workflow."""
    found = api.list(WORKFLOWS, "ml").items
    parameters = [one["spec"]["arguments"]["parameters"] for one in found]
    return sorted(each["value"] for one in parameters for each in one if each["name"] == "source")


def notify(controller: ControllerProcess, bucket: str, key: str) -> dict[str, Any]:
    record = {"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": bucket}, "object": {"key": key}}}
    answer = http.post(
        f"{controller.url}/v1/storage-events",
        json={"Records": [record]},
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=600,
    )
    assert answer.status_code == 200, answer.text
    counts: dict[str, Any] = answer.json()
    return counts


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_delivered_again_lost_and_found(tmp_path: Path, bucket: str, s3_endpoint: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    client = make_client()
    client.put_object(Bucket=bucket, Key="raw/ml/before", Body=b"0")
    with ExitStack() as parts:
        server = parts.enter_context(serving())
        server.add_namespace("tiphys")
        api = server.api("ml")
        document = template(objects=f"s3://{bucket}/raw/ml/", pattern="*.csv", since="2020-01-01T00:00:00Z")
        document["metadata"] |= {"labels": {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}}
        api.create(WORKFLOW_TEMPLATES, "ml", document)
        given = [f"--store=s3://{bucket}/runs", "--namespace=ml", f"--token-file={tmp_path / 'token'}"]
        given += [f"--trigger-source=s3://{bucket}/raw/{{namespace}}", "--trigger-interval-seconds=1"]
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path)), "AWS_ENDPOINT_URL_S3": s3_endpoint}

        def start(pod: str) -> ControllerProcess:
            return parts.enter_context(ControllerProcess(given, {**environment, "POD_NAME": pod}))

        first, second = start("controller-1"), start("controller-2")
        client.put_object(Bucket=bucket, Key="raw/ml/a b+c.csv", Body=b"1")
        counts = [notify(one, bucket, "raw/ml/a+b%2Bc.csv") for one in (first, second, first)]
        assert sum(one["started"] for one in counts) <= 1, "a listing may have been faster"
        assert sources(api) == [f"s3://{bucket}/raw/ml/a b+c.csv"]
        for one in (first, second):
            one.send(signal.SIGKILL)
            one.ended()
        client.put_object(Bucket=bucket, Key="raw/ml/b.csv", Body=b"2")
        client.put_object(Bucket=bucket, Key="raw/ml/b.txt", Body=b"3")
        third = start("controller-3")
        until(lambda: third.said("trigger.started"), seconds=600.0)
        notify(third, bucket, "raw/ml/b.csv")
        assert sources(api) == [f"s3://{bucket}/raw/ml/a b+c.csv", f"s3://{bucket}/raw/ml/b.csv"]
        _, metrics = third.get("/metrics")
        assert 'tiphys_controller_triggered_runs_total{source="found"} 1.0' in metrics
        [found] = [one for one in third.log if one["event"] == "trigger.started"]
        assert (found["object"], found["source"]) == (f"s3://{bucket}/raw/ml/b.csv", "found")
        [event] = read_events(open_store(f"s3://{bucket}/runs"), found["run"])
        assert event.name == "run.triggered"
        assert [one.noise for one in (first, second, third)] == [[], [], []]
