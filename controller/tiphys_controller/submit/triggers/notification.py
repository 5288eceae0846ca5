"""Parses notifications about objects, in the forms in which storage services and Argo Events send them.

| sender | form | key |
|---|---|---|
| S3, MinIO, versitygw | ``{"Records": [{"eventName": …, "s3": {"bucket": …, "object": …}}]}`` | URL-encoded |
| SQS, as for a Lambda | ``{"Records": [{"eventSource": "aws:sqs", "body": "<JSON>"}]}`` | as its content |
| SNS | ``{"Type": "Notification", "Message": "<JSON>"}`` | as its content |
| EventBridge | ``{"detail-type": "Object Created", "detail": {"bucket": …, "object": …}}`` | plain |
| a Sensor of Argo Events | ``{"bucket": …, "key": …}`` | plain |

Sources: Amazon S3 User Guide, "Event message structure" and "EventBridge event
message structure" (a space is encoded as ``+``); MinIO, ``internal/event/target/webhook.go``; versitygw,
``s3event/event.go``, which does not encode keys.

A notification is a hint: it says where to look. What an object is, a listing of
the bucket tells.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from tiphys.errors import UsageError
from tiphys.protocol.json_documents import parse_json

MAX_OBJECTS_PER_DELIVERY = 100
MAX_NOTIFICATION_BYTES = 512 << 10
"""Largest notification; S3 sends some 1 KiB for an object, and up to 3 KiB more for a key that is encoded."""
MAX_NOTIFICATION_VALUES = 20_000
_MAX_ENVELOPES = 3
"""SQS around SNS around S3."""
_MAX_KEY_BYTES = 1024
_CREATED = "ObjectCreated:"
_TEST_EVENT = "s3:TestEvent"


class NotifiedObject(NamedTuple):
    """An object that a notification names. ``keys`` has two entries if the sender may have encoded the key or not."""

    bucket: str
    keys: tuple[str, ...]


def parse_notification(document: Any) -> list[NotifiedObject]:
    """The created objects that a notification names, each once. Other events, such as deletions, name none.

    Raises:
        UsageError: it has none of the known forms, or names more than `MAX_OBJECTS_PER_DELIVERY` objects.
    """
    found: dict[NotifiedObject, None] = {}
    for notified in _parse(document, "the body", _MAX_ENVELOPES):
        found[notified] = None
        if len(found) > MAX_OBJECTS_PER_DELIVERY:
            raise UsageError(
                f"the notification names more than {MAX_OBJECTS_PER_DELIVERY} objects, the limit of one delivery; "
                "nothing was done: send fewer in a batch"
            )
    return list(found)


def _parse(document: Any, where: str, envelopes: int) -> Iterator[NotifiedObject]:
    if not isinstance(document, Mapping):
        raise UsageError(f"{where} is no notification about objects: it is no JSON object")
    if document.get("Type") in ("SubscriptionConfirmation", "UnsubscribeConfirmation"):
        raise UsageError(
            "SNS asks to confirm a subscription by a call of a URL that the request names, which Tiphys does not make; "
            "send events by an API destination of EventBridge, or by SQS and Argo Events (docs/triggers.md)"
        )
    if document.get("Type") == "Notification" and "Message" in document:
        yield from _parse_text(document["Message"], f"{where}: Message", envelopes)
    elif isinstance(records := document.get("Records"), list):
        for index, record in enumerate(records):
            yield from _parse_record(record, f"{where}: Records[{index}]", envelopes)
    elif "detail-type" in document:
        if document["detail-type"] == "Object Created":
            detail = f"{where}: detail"
            yield _plain(_mapping(document, "detail", where), detail, ("bucket", "name"), ("object", "key"))
    elif "bucket" in document and "key" in document:
        yield _plain(document, where, ("bucket",), ("key",))
    elif document.get("Event") != _TEST_EVENT:
        raise UsageError(
            f"{where} is no notification about objects: it has neither Records, as S3 sends them, nor detail, as "
            "EventBridge does, nor bucket and key"
        )


def _parse_text(text: Any, where: str, envelopes: int) -> Iterator[NotifiedObject]:
    if not isinstance(text, str) or envelopes == 0:
        raise UsageError(f"{where} is no notification about objects: it is no text, or is wrapped too often")
    yield from _parse(parse_json(text, where, MAX_NOTIFICATION_VALUES), where, envelopes - 1)


def _parse_record(record: Any, where: str, envelopes: int) -> Iterator[NotifiedObject]:
    if not isinstance(record, Mapping):
        raise UsageError(f"{where} is no JSON object")
    if record.get("eventSource") == "aws:sqs":
        yield from _parse_text(record.get("body"), f"{where}.body", envelopes)
        return
    name = record.get("eventName")
    if not isinstance(name, str):
        raise UsageError(f"{where} has no eventName, which says what happened to the object")
    if name.removeprefix("s3:").startswith(_CREATED):
        bucket, key = _bucket_and_key(
            _mapping(record, "s3", where), f"{where}.s3", ("bucket", "name"), ("object", "key")
        )
        keys = (key,) if "%" not in key and "+" not in key else (unquote_plus(key, errors="surrogateescape"), key)
        yield NotifiedObject(bucket, tuple(candidate for candidate in keys if _is_key(candidate)))


def _plain(document: Mapping[str, Any], where: str, bucket: tuple[str, ...], key: tuple[str, ...]) -> NotifiedObject:
    named, text = _bucket_and_key(document, where, bucket, key)
    return NotifiedObject(named, (text,) if _is_key(text) else ())


def _is_key(text: str) -> bool:
    """Whether an object can have this key. An encoded key may be longer, and decode to what is no text."""
    try:
        return 0 < len(text.encode()) <= _MAX_KEY_BYTES
    except UnicodeEncodeError:
        return False


def _bucket_and_key(
    document: Mapping[str, Any], where: str, bucket: tuple[str, ...], key: tuple[str, ...]
) -> tuple[str, str]:
    return _text(document, where, bucket, 255), _text(document, where, key, 3 * _MAX_KEY_BYTES)


def _text(document: Mapping[str, Any], where: str, path: tuple[str, ...], longest: int) -> str:
    for name in path[:-1]:
        document, where = _mapping(document, name, where), f"{where}.{name}"
    value = document.get(path[-1])
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise UsageError(f"{where}.{path[-1]} is not a text of 1 to {longest} characters")
    return value


def _mapping(document: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = document.get(name)
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}.{name} is no JSON object")
    return value
