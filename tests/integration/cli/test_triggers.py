"""`tiphys triggers`, as docs/triggers.md prints it, and what it says of an object."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.builders.hostile_text import HOSTILE
from support.processes.controller import kubeconfig
from support.servers import http
from support.servers.kube_server import KubeServer, serving
from support.stories.triggers import template
from tiphys_controller.submit.triggers.bucket import S3Buckets
from tiphys_controller.submit.triggers.catalog import read_trigger

from tiphys.kube.resources import WORKFLOW_TEMPLATES
from tiphys.records import ObjectVersion, TriggeredRunRecord
from tiphys.records.trigger import TRIGGER_ANNOTATION, TRIGGER_LABEL, TRIGGER_LABEL_VALUE
from tiphys.store import DirectoryStore
from tiphys.store.buckets.s3_client import make_client
from tiphys.store.layout import triggered_run_key

from .conftest import Command

PAGE = (Path(__file__).parents[3] / "docs" / "triggers.md").read_text()
RUN, BUCKET = "on-object-7xk2p", "ml-raw"


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with serving() as found:
        found.api("ml")
        yield found


@pytest.fixture
def objects(bucket: str, s3_endpoint: str) -> Iterator[S3Buckets]:
    """The bucket of the page, with two objects."""
    http.put(f"{s3_endpoint}/{BUCKET}", timeout=60).raise_for_status()
    client = make_client()
    keys = ("ml/incoming/a.csv", "ml/incoming/b.txt", "ml/incoming/c.csv")
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"1")
    yield S3Buckets()
    for key in keys:
        client.delete_object(Bucket=BUCKET, Key=key)
    client.delete_bucket(Bucket=BUCKET)


def declare(server: KubeServer, name: str, **spec: str) -> None:
    document = template(name, objects="s3://ml-raw/ml/incoming/", pattern="*.csv", **spec)
    document["metadata"] |= {"labels": {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}}
    server.api("ml").create(WORKFLOW_TEMPLATES, "ml", document)


def record(store: DirectoryStore, version: ObjectVersion, run: str = RUN) -> None:
    made = TriggeredRunRecord(object=version, source="delivered", run=run, submission=1).to_bytes()
    store.create(triggered_run_key("on-object", version.digest, int(version.modified.timestamp())), made)
    store.create(triggered_run_key("on-object", version.digest), made)


def test_the_page_prints_what_the_command_prints(
    tiphys: Command, server: KubeServer, objects: S3Buckets, tmp_path: Path
) -> None:
    declare(server, "on-object", since="2026-05-04T12:00:00Z")
    store = DirectoryStore(tmp_path / "store")
    made = objects.find(BUCKET, "ml/incoming/a.csv")
    assert made is not None
    record(store, made)
    printed = PAGE.partition("```console\n")[2].partition("```")[0]
    calls = [part.partition("\n") for part in printed.split("$ tiphys ")[1:]]
    assert len(calls) == 2
    for line, _, expected in calls:
        words = [str(store.folder) if word.startswith("s3://ml-runs") else word for word in line.split()]
        answer = tiphys(*words, "--kubeconfig", kubeconfig(server, tmp_path))
        assert (answer.code, answer.out) == (0, expected)


@pytest.mark.parametrize(
    ("url", "since", "answer"),
    [
        ("s3://ml-raw/ml/incoming/c.csv", "2020-01-01T00:00:00Z", "would start a run with source=s3://ml-raw/"),
        ("s3://ml-raw/ml/incoming/c.csv", "2200-01-01T00:00:00Z", "no run: it was modified at "),
        ("s3://ml-raw/ml/incoming/a.csv", "2020-01-01T00:00:00Z", f"has had its run: {RUN}"),
        ("s3://ml-raw/ml/incoming/d.csv", "2020-01-01T00:00:00Z", "no run: there is no such object"),
        ("s3://ml-raw/ml/outgoing/a.csv", "2020-01-01T00:00:00Z", "no run: it does not lie below s3://ml-raw/ml/inc"),
    ],
)
def test_an_object_is_tried_out(
    tiphys: Command, server: KubeServer, objects: S3Buckets, tmp_path: Path, url: str, since: str, answer: str
) -> None:
    declare(server, "on-object", since=since)
    store = DirectoryStore(tmp_path / "store")
    made = objects.find(BUCKET, "ml/incoming/a.csv")
    assert made is not None
    record(store, made)
    said = tiphys(
        "triggers", "-n", "ml", "--store", "store", "--test", url, "--kubeconfig", kubeconfig(server, tmp_path)
    )
    assert said.out.startswith(f"on-object: {answer}")
    assert len(list(store.list(""))) == 2, "nothing is started"


def test_a_damaged_trigger_and_a_hostile_object_are_shown(tiphys: Command, server: KubeServer, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    document = template("damaged", objects="s3://ml-raw/ml/")
    document["metadata"] |= {"labels": {TRIGGER_LABEL: TRIGGER_LABEL_VALUE}, "annotations": {TRIGGER_ANNOTATION: "{"}}
    server.api("ml").create(WORKFLOW_TEMPLATES, "ml", document)
    declare(server, "on-object")
    trigger = read_trigger(template("on-object", objects="s3://ml-raw/ml/"))
    assert trigger is not None
    hostile = ObjectVersion(bucket=BUCKET, key=HOSTILE, etag="1", size=1, modified=trigger.created_at)
    record(store, hostile)
    arguments = ("triggers", "-n", "ml", "--store", "store", "--kubeconfig", kubeconfig(server, tmp_path))
    shown, document_text = tiphys(*arguments), tiphys(*arguments, "-o", "json")
    assert "damaged" in shown.out
    assert "annotation tiphys.dev/trigger is damaged" in shown.err
    assert "\x1b" not in shown.out + shown.err + document_text.out
    damaged, other = json.loads(document_text.out)["items"]
    assert "is damaged" in damaged["problem"]
    assert other["last"]["object"]["key"] == HOSTILE


def test_a_namespace_without_triggers_says_so(tiphys: Command, server: KubeServer, tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "store")
    said = tiphys("triggers", "-n", "ml", "--store", "store", "--kubeconfig", kubeconfig(server, tmp_path))
    assert (said.code, said.out) == (0, "")
    assert "has no WorkflowTemplate with a trigger" in said.err
