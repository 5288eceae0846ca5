"""What storage services and Argo Events send, and which objects it names.

| body | objects |
|---|---|
| Records of S3, of MinIO, of versitygw | those that were created; a key with `%` or `+` as it is, too |
| the same in SQS, SNS, or both | the same |
| EventBridge, or bucket and key from a Sensor | the key as it is |
| a deletion, a tag, a test of the connection | none |
| anything else | refused, with the place of the mistake |
"""

import json
from typing import Any

import pytest
from tiphys_controller.submit.triggers.notification import (
    MAX_OBJECTS_PER_DELIVERY,
    NotifiedObject,
    parse_notification,
)

from tiphys.errors import UsageError

AWS = {
    "eventVersion": "2.1",
    "eventSource": "aws:s3",
    "awsRegion": "us-west-2",
    "eventTime": "1970-01-01T00:00:00.000Z",
    "eventName": "ObjectCreated:Put",
    "s3": {
        "s3SchemaVersion": "1.0",
        "configurationId": "testConfigRule",
        "bucket": {"name": "raw", "arn": "arn:aws:s3:::raw"},
        "object": {
            "key": "ml/red+flower%2B1.csv",
            "size": 1024,
            "eTag": "d41d8cd98f00b204e9800998ecf8427e",
            "versionId": "096fKKXTRTtl3on89fVO.nfljtsv6qko",
            "sequencer": "0055AED6DCD90281E5",
        },
    },
}
"""The example of the S3 User Guide."""
DECODED = NotifiedObject("raw", ("ml/red flower+1.csv", "ml/red+flower%2B1.csv"))


def record(key: str, name: str = "s3:ObjectCreated:Put", bucket: str = "raw") -> dict[str, Any]:
    return {"eventName": name, "s3": {"bucket": {"name": bucket}, "object": {"key": key, "sequencer": "1"}}}


def aws(*records: Any) -> dict[str, Any]:
    return {"Records": list(records)}


def sqs(document: Any) -> dict[str, Any]:
    return {"Records": [{"eventSource": "aws:sqs", "messageId": "1", "body": json.dumps(document)}]}


def sns(document: Any) -> dict[str, Any]:
    return {"Type": "Notification", "TopicArn": "arn:aws:sns:…", "Message": json.dumps(document)}


def event_bridge(kind: str = "Object Created") -> dict[str, Any]:
    detail = {"version": "0", "bucket": {"name": "raw"}, "object": {"key": "ml/a+b.csv", "size": 5, "etag": "b1"}}
    return {"version": "0", "source": "aws.s3", "detail-type": kind, "detail": detail}


@pytest.mark.parametrize(
    ("body", "objects"),
    [
        pytest.param(aws(AWS), [DECODED], id="s3"),
        pytest.param({"EventName": "s3:ObjectCreated:Put", "Key": "raw/a", **aws(AWS)}, [DECODED], id="minio"),
        pytest.param(aws(record("ml/a b")), [NotifiedObject("raw", ("ml/a b",))], id="versitygw"),
        pytest.param(sqs(aws(AWS)), [DECODED], id="sqs"),
        pytest.param(sns(aws(AWS)), [DECODED], id="sns"),
        pytest.param(sqs(sns(aws(AWS))), [DECODED], id="sns in sqs"),
        pytest.param(event_bridge(), [NotifiedObject("raw", ("ml/a+b.csv",))], id="eventbridge"),
        pytest.param({"bucket": "raw", "key": "ml/a%20b"}, [NotifiedObject("raw", ("ml/a%20b",))], id="sensor"),
        pytest.param(aws(record("x", "ObjectCreated:CompleteMultipartUpload")), [("raw", ("x",))], id="multipart"),
        pytest.param(aws(record("x"), record("x"), record("y")), [("raw", ("x",)), ("raw", ("y",))], id="repeated"),
        pytest.param(aws(record("<script>\x1b[2J")), [("raw", ("<script>\x1b[2J",))], id="html and escapes"),
        pytest.param(aws(record("k" * 1024)), [("raw", ("k" * 1024,))], id="1024 bytes"),
        pytest.param(aws(record("%C3%A9" * 512)), [("raw", ("é" * 512,))], id="1024 bytes, encoded"),
        pytest.param(aws(record("é" * 513)), [("raw", ())], id="1026 bytes"),
        pytest.param(aws(record("%ff")), [("raw", ("%ff",))], id="encoded bytes that are no text"),
        pytest.param(aws(record("\ud800")), [("raw", ())], id="half a surrogate"),
        pytest.param(aws(record("x", "s3:ObjectRemoved:Delete")), [], id="deleted"),
        pytest.param(aws(record("x", "ObjectTagging:Put")), [], id="tagged"),
        pytest.param(event_bridge("Object Deleted"), [], id="eventbridge: deleted"),
        pytest.param({"Service": "S3", "Event": "s3:TestEvent", "Bucket": "raw"}, [], id="test of the connection"),
        pytest.param(aws(), [], id="no record"),
    ],
)
def test_a_notification_names_objects(body: Any, objects: list[NotifiedObject]) -> None:
    assert parse_notification(json.loads(json.dumps(body))) == objects


@pytest.mark.parametrize(
    ("body", "mistake"),
    [
        ([], "the body is no notification about objects"),
        ({}, "neither Records"),
        ({"Records": "x"}, "neither Records"),
        ({"alerts": [], "version": "4"}, "neither Records"),
        (aws("x"), r"Records\[0\] is no JSON object"),
        (aws(record("x"), {"s3": {}}), r"Records\[1\] has no eventName"),
        (aws({"eventName": "ObjectCreated:Put"}), r"Records\[0\].s3 is no JSON object"),
        (aws({"eventName": "ObjectCreated:Put", "s3": {"bucket": "raw"}}), r"Records\[0\].s3.bucket is no JSON object"),
        (aws(record("")), r"s3.object.key is not a text of 1 to 3072"),
        (aws(record("k" * 3073)), r"s3.object.key is not a text of 1 to 3072"),
        (aws(record("x", bucket="b" * 256)), r"s3.bucket.name is not a text of 1 to 255"),
        ({"bucket": {"name": "raw"}, "key": "x"}, "bucket is not a text"),
        ({"detail-type": "Object Created"}, "detail is no JSON object"),
        (aws({"eventSource": "aws:sqs"}), r"Records\[0\].body is no notification"),
        (aws({"eventSource": "aws:sqs", "body": "{"}), r"Records\[0\].body is not JSON"),
        (sqs(sqs(sqs(sqs(aws())))), "is wrapped too often"),
        (sns("x"), "Message is no notification about objects"),
        ({"Type": "SubscriptionConfirmation", "SubscribeURL": "http://10.0.0.1/"}, "which Tiphys does not make"),
    ],
)
def test_an_invalid_notification_is_refused_with_the_place_of_the_mistake(body: Any, mistake: str) -> None:
    with pytest.raises(UsageError, match=mistake):
        parse_notification(body)


def test_a_delivery_names_a_limited_number_of_objects() -> None:
    records = [record(f"{number}") for number in range(MAX_OBJECTS_PER_DELIVERY)]
    assert len(parse_notification(aws(*records, *records))) == MAX_OBJECTS_PER_DELIVERY
    with pytest.raises(UsageError, match="send fewer in a batch"):
        parse_notification(aws(*records, record("one more")))
