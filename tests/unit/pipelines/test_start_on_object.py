"""Argo Events as the way of notifications: the files below `templates/events`, and what they make of an event.

| event | what the Sensor does |
|---|---|
| a record of a created object, alone or among others | posts all records |
| deletions only, the test event of S3, what is no notification | nothing |

| answer | what the Sensor does |
|---|---|
| 200 | goes on |
| 400, 413: the controller refuses the notification | goes on, because the answer would stay the same |
| another, or none | repeats, for a minute at least |
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiphys_controller.submit.triggers.catalog import ObjectSources, read_triggers
from tiphys_controller.submit.triggers.notification import NotifiedObject, parse_notification

from hera_pipelines.pipelines.start_on_object import OBJECTS_NAME, object_sensor
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records.trigger import TRIGGER_ANNOTATION, TRIGGER_LABEL, TRIGGER_LABEL_VALUE

FOLDER = Path(__file__).parents[3] / "templates" / "events"
RECORD = {
    "eventName": "s3:ObjectCreated:Put",
    "s3": {"bucket": {"name": "raw"}, "object": {"key": "a+b", "size": 1, "sequencer": "17"}},
}

DELETION = {**RECORD, "eventName": "s3:ObjectRemoved:Delete"}


def committed(name: str) -> Manifest:
    loaded: Manifest = yaml.safe_load((FOLDER / name).read_text())
    return loaded


def post(sensor: Manifest, data: Any) -> Manifest:
    """The body that the Sensor makes of the data of an event (argo-events, `pkg/sensors/triggers/params.go`)."""
    body: Manifest = {}
    for one in sensor["spec"]["triggers"][0]["template"]["http"]["payload"]:
        value = data
        for name in one["src"]["dataKey"].split("."):
            value = value[name]
        assert one["src"]["useRawData"], "otherwise the value is a text"
        body[one["dest"]] = value
    return body


def passes(sensor: Manifest, data: Any) -> bool:
    """Whether the filter lets an event pass (argo-events, `pkg/sensors/dependencies/filter.go`): a regular expression
    is searched in the text of what the path leads to."""
    [filtered] = sensor["spec"]["dependencies"][0]["filters"]["data"]
    assert filtered["type"] == "string"
    outer, _, inner = filtered["path"].partition(".#.")
    for name in outer.split("."):
        if name not in data:
            return False
        data = data[name]
    text = json.dumps([one[inner] for one in data if inner in one])
    return any(re.search(value, text) for value in filtered["value"])


def test_heras_models_of_argo_events_know_every_field() -> None:
    # Its import takes half a second, which each process that collects tests would pay.
    from hera.events.models.github.com.argoproj.argo_events.pkg.apis.events.v1alpha1 import (
        EventSourceSpec,
        SensorSpec,
        WebhookContext,
    )

    source, sensor = committed("objects-source.yaml")["spec"], committed("objects-sensor.yaml")["spec"]
    [webhook] = source.pop("webhook").values()  # its fields lie one level deeper in the model
    for kind, document in ((EventSourceSpec, source), (WebhookContext, webhook), (SensorSpec, sensor)):
        read = kind.model_validate(document)
        assert read.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True) == document


@pytest.mark.parametrize("name", ["objects-source.yaml", "objects-sensor.yaml"])
def test_the_pods_meet_the_restricted_standard(name: str) -> None:
    """Pod Security Standards, restricted. A namespace that enforces it gets no pod otherwise, and Argo Events reports
    both objects as deployed."""
    template = committed(name)["spec"]["template"]
    pod, container = template["securityContext"], template["container"]["securityContext"]
    assert pod["runAsNonRoot"]
    assert pod["runAsUser"] > 0, "the image names no user, so it would run as root"
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_the_sensor_listens_to_the_source() -> None:
    [dependency] = committed("objects-sensor.yaml")["spec"]["dependencies"]
    source = committed("objects-source.yaml")
    assert dependency["eventSourceName"] == source["metadata"]["name"] == OBJECTS_NAME
    assert dependency["eventName"] in source["spec"]["webhook"]


@pytest.mark.parametrize(
    ("records", "data"),
    [
        ("body.Records", {"header": {}, "body": {"EventName": "…", "Key": "raw/a b", "Records": [RECORD, RECORD]}}),
        ("notification", {"notification": [RECORD]}),
    ],
    ids=["webhook or sqs", "minio"],
)
def test_the_controller_understands_what_the_sensor_posts(records: str, data: Manifest) -> None:
    sensor = object_sensor("http://controller/v1/storage-events", "tiphys-storage-events", records)
    assert parse_notification(post(sensor, data)) == [NotifiedObject("raw", ("a b", "a+b"))]


def test_the_storage_service_does_not_get_the_token_of_the_controller() -> None:
    """That token starts, resumes and reads the runs of all tenants."""
    [webhook] = committed("objects-source.yaml")["spec"]["webhook"].values()
    http = committed("objects-sensor.yaml")["spec"]["triggers"][0]["template"]["http"]
    assert webhook["authSecret"] == {"name": "tiphys-objects", "key": "token"}
    assert http["basicAuth"] == {"password": {"name": "tiphys-storage-events", "key": "token"}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"Records": [RECORD]}, True),
        ({"Records": [DELETION, RECORD]}, True),
        ({"Records": [{**RECORD, "eventName": "ObjectCreated:CompleteMultipartUpload"}]}, True),
        ({"Records": [DELETION]}, False),
        ({"Records": []}, False),
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "raw"}, False),
        ({"anything": "else"}, False),
    ],
    ids=["created", "created among others", "in parts", "deleted", "no records", "test event", "no notification"],
)
def test_only_events_about_created_objects_reach_the_controller(body: Manifest, expected: bool) -> None:
    assert passes(committed("objects-sensor.yaml"), {"header": {}, "body": body}) is expected
    if records := body.get("Records"):
        minio = object_sensor("http://controller/v1/storage-events", "tiphys-storage-events", "notification")
        assert passes(minio, {"notification": records}) is expected


def test_a_notification_is_repeated_while_the_controller_is_away() -> None:
    [trigger] = committed("objects-sensor.yaml")["spec"]["triggers"]
    assert trigger["retryStrategy"] == {"steps": 60}, "Argo Events waits 1 to 2 s between two if nothing else is said"
    assert trigger["atLeastOnce"]
    assert 503 not in trigger["policy"]["status"]["allow"]


def test_a_notification_that_the_controller_refuses_does_not_hold_up_those_behind_it() -> None:
    [trigger] = committed("objects-sensor.yaml")["spec"]["triggers"]
    assert trigger["policy"]["status"]["allow"] == [200, 400, 413]


def test_the_committed_template_has_a_trigger_that_the_controller_reads() -> None:
    template = committed("start-on-object.yaml")
    assert template["metadata"]["labels"][TRIGGER_LABEL] == TRIGGER_LABEL_VALUE
    assert TRIGGER_ANNOTATION not in template["spec"]["workflowMetadata"]["annotations"]
    template["metadata"] |= {"namespace": "ml", "creationTimestamp": "2026-05-04T12:00:00Z"}
    read = read_triggers([template], ObjectSources(["s3://ml-raw/{namespace}"], "s3://ml-runs/tiphys"))
    assert read.problems == ()
    assert [(one.spec.bucket, one.spec.prefix, one.spec.pattern) for one in read.triggers] == [
        ("ml-raw", "ml/incoming/", "*.csv")
    ]
