"""Notifications about objects by way of Argo Events, for a storage service that cannot reach the controller.

The EventSource takes what the storage service posts, and keeps it on the event bus;
the Sensor posts it to the controller, and repeats that while the controller is away.
What the objects start is said by the triggers of WorkflowTemplates alone, so both
objects stay as they are when triggers come and go.
"""

from tiphys.protocol.compiled_workflow import Manifest

OBJECTS_NAME = "tiphys-objects"
"""Name of both objects, and of the event."""
_API_VERSION = "argoproj.io/v1alpha1"
_MAX_DELIVERIES = 60
"""1 to 2 seconds apart, so they outlast a restart of the controller. Not more, because those behind a notification wait
until it is answered or given up, and a listing finds the objects of one that is given up."""
_RESTRICTED_POD: Manifest = {
    # The image of Argo Events names no user.
    "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
    "container": {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    },
}
"""What the Pod Security Standard `restricted` asks of the pods, and a root file system that cannot be written."""


def object_event_source(secret: str) -> Manifest:
    """The EventSource: a webhook on port 12000 at the path ``/objects``.

    Args:
        secret: Name of the Secret whose key ``token`` a caller must send as bearer token. Not that of the controller's
            API: a caller can name objects here, and do nothing else.
    """
    webhook = {
        "port": "12000",
        "endpoint": "/objects",
        "method": "POST",
        "authSecret": {"name": secret, "key": "token"},
    }
    return {
        "apiVersion": _API_VERSION,
        "kind": "EventSource",
        "metadata": {"name": OBJECTS_NAME},
        "spec": {
            "service": {"ports": [{"port": 12000, "targetPort": 12000}]},
            "template": _RESTRICTED_POD,
            "webhook": {OBJECTS_NAME: webhook},
        },
    }


def object_sensor(url: str, secret: str, records: str = "body.Records") -> Manifest:
    """The Sensor that posts the records of each event to the controller, if one of them is about a created object.

    Args:
        url: URL of the controller's ``/v1/storage-events``.
        secret: Name of the Secret whose key ``token`` the controller accepts for storage events.
        records: Where an event holds the records: ``body.Records`` of a webhook or of SQS with ``jsonBody``,
            ``notification`` of the EventSource for MinIO.
    """
    source = {"dependencyName": OBJECTS_NAME, "dataKey": records, "useRawData": True}
    http = {
        "url": url,
        "method": "POST",
        "headers": {"Content-Type": "application/json"},
        # The controller takes the token as the password; a header would need `Bearer` within the Secret.
        "basicAuth": {"password": {"name": secret, "key": "token"}},
        "payload": [{"src": source, "dest": "Records"}],
    }
    trigger = {
        "template": {"name": "controller", "http": http},
        # 400 and 413: the controller refuses the notification, and would do so each time.
        "policy": {"status": {"allow": [200, 400, 413]}},
        "retryStrategy": {"steps": _MAX_DELIVERIES},
        "atLeastOnce": True,
    }
    # An event without records, such as the test event of S3, has no such path and is discarded.
    created = {"path": f"{records}.#.eventName", "type": "string", "value": ["ObjectCreated:"]}
    dependency = {
        "name": OBJECTS_NAME,
        "eventSourceName": OBJECTS_NAME,
        "eventName": OBJECTS_NAME,
        "filters": {"data": [created]},
    }
    return {
        "apiVersion": _API_VERSION,
        "kind": "Sensor",
        "metadata": {"name": OBJECTS_NAME},
        "spec": {"template": _RESTRICTED_POD, "dependencies": [dependency], "triggers": [trigger]},
    }
