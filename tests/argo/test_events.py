"""The files of `templates/events` that resume runs, on a real argo-server, which gets what Alertmanager sends.

| delivery | what must hold |
|---|---|
| the alert is over | nothing is submitted |
| it fires | the run is resumed, by a Workflow of the account that comes with the files |
| it fires, and was delivered before | nothing more is resumed |
"""

import json
import os
import shutil
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import check_starts, version

from hera_pipelines.pipelines.resume_on_alert import CONTROL_SECRET, RESUME_OBJECT_NAME
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.store import read_submissions

from .test_auto_resume import NEVER, STEPS, next_of
from .world import Workflow, World, command

FILES = Path(__file__).parents[2] / "templates" / "events"
NAMES = ("account.yaml", "resume-on-alert.yaml", "resume.yaml")
_MADE_BY = f"workflows.argoproj.io/workflow-event-binding={RESUME_OBJECT_NAME}"


@pytest.fixture
def installed(world: World) -> Iterator[World]:
    """The files as an administrator applies them: with a namespace, an image and a store of their own."""
    if not world.settings.argo_server:
        pytest.skip("TIPHYS_ARGO_SERVER names no argo-server")
    if not shutil.which("kubectl"):
        pytest.skip("to apply the files takes kubectl on PATH")
    text = "\n---\n".join(yaml.safe_dump(one) for one in adapted(world))
    kubectl = ["kubectl", "--namespace", world.settings.namespace]
    command([*kubectl, "apply", "--filename", "-"], given=text)
    yield world
    command([*kubectl, "delete", "--filename", "-"], given=text)


def adapted(world: World) -> list[dict[str, Any]]:
    """All in the namespace of the runs: the tests have no other that Argo serves."""
    documents = [one for name in NAMES for one in yaml.safe_load_all((FILES / name).read_text())]
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    documents.append(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CONTROL_SECRET}, "stringData": variables}
    )
    labels = "app.kubernetes.io/name=tiphys,app.kubernetes.io/component=controller"
    [pod, *_] = world.api.list(PODS, world.settings.system_namespace, labels=labels).items
    given = {"image": pod["spec"]["containers"][0]["image"], "store": world.settings.store}
    for one in documents:
        one["metadata"].pop("namespace", None)
        for subject in one.get("subjects", []):
            subject["namespace"] = world.settings.namespace
        if one["kind"] == "WorkflowTemplate":
            for parameter in one["spec"]["arguments"]["parameters"]:
                parameter["value"] = given.get(parameter["name"], parameter.get("value", ""))
    return documents


def notification(run: str, status: str) -> dict[str, Any]:
    """What Alertmanager posts for a group of one alert (version 4)."""
    labels = {"alertname": "RunFailed", "tiphys_run": run, "severity": "warning"}
    over = "2026-03-01T12:05:00Z" if status == "resolved" else "0001-01-01T00:00:00Z"
    one = {"status": status, "labels": labels, "annotations": {}, "fingerprint": "a1b2c3d4e5f60718"}
    one |= {"startsAt": "2026-03-01T12:00:00.123Z", "endsAt": over, "generatorURL": "http://prometheus.test/graph"}
    group = {"version": "4", "groupKey": f'{{}}/{{}}:{{tiphys_run="{run}"}}', "truncatedAlerts": 0, "status": status}
    group |= {"receiver": "argo", "groupLabels": {"tiphys_run": run}, "commonLabels": labels, "commonAnnotations": {}}
    return {**group, "externalURL": "http://alertmanager.test", "alerts": [one]}


def deliver(world: World, notified: dict[str, Any]) -> None:
    """Post to the argo-server, with the caller's settings of Argo's own command."""
    secure = os.environ.get("ARGO_SECURE", "true") != "false"
    place = f"{world.settings.argo_server}/api/v1/events/{world.settings.namespace}/{RESUME_OBJECT_NAME}"
    headers = {"Authorization": os.environ.get("ARGO_TOKEN", ""), "Content-Type": "application/json"}
    url = f"{'https' if secure else 'http'}://{place}"
    request = urllib.request.Request(url, json.dumps(notified).encode(), headers)
    context = ssl._create_unverified_context() if os.environ.get("ARGO_INSECURE_SKIP_VERIFY") == "true" else None
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        assert answer.status == 200


def made(world: World, number: int) -> list[Workflow]:
    """Wait until Argo's events have made so many Workflows, and all of them have succeeded."""

    def found() -> list[Workflow]:
        listed = world.api.list(WORKFLOWS, world.settings.namespace, labels=_MADE_BY).items
        return [Workflow(world, one["metadata"]["name"], one["metadata"]["uid"]) for one in listed]

    world.until(f"{number} Workflows are made by events", lambda: len(found()) >= number)
    for one in found():
        one.wait()
    return found()


def test_an_alert_that_argo_server_takes_has_a_run_resumed_once(installed: World) -> None:
    world = installed
    before = len(made(world, 0))
    first = world.submit(story(world.place, steps=STEPS, pause=0.5, training=NEVER).compile())
    world.api.delete(PODS, world.settings.namespace, first.trains())
    first.wait("Failed")

    deliver(world, notification(first.run, "resolved"))
    deliver(world, notification(first.run, "firing"))
    next_of(world, first.run).wait()
    deliver(world, notification(first.run, "firing"))
    assert len(made(world, before + 2)) == before + 2
    assert [one.claim.submission for one in read_submissions(world.store, first.run)] == [1, 2]
    assert version(world.store, first.run) == expected_version(STEPS)
    check_starts(world.store, first.run)
