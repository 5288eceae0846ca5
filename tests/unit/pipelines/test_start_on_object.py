"""Argo Events as the way of notifications: the files below `templates/events`, and what they make of an event."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hera.events.models.github.com.argoproj.argo_events.pkg.apis.events.v1alpha1 import (
    EventSourceSpec,
    SensorSpec,
    WebhookContext,
)
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


def test_heras_models_of_argo_events_know_every_field() -> None:
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


def test_a_notification_that_is_not_answered_is_repeated() -> None:
    [trigger] = committed("objects-sensor.yaml")["spec"]["triggers"]
    assert trigger["policy"]["status"]["allow"] == [200]
    assert trigger["retryStrategy"]["steps"] > 1
    assert trigger["atLeastOnce"]


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
