"""What retention leaves in storage: what people pinned, and what is about to go."""

from tiphys.records.base import StoredRecord
from tiphys.records.manifest import CheckpointRef


class PinRecord(StoredRecord):
    """``pins/<k>-<step>/<name>.json``: this checkpoint stays until the pin is taken away."""

    checkpoint: CheckpointRef
    name: str
    by: str = ""
    """Who wants it: a person, or ``fork`` for another lineage that goes on from it."""


class ExpiryRecord(StoredRecord):
    """``expired/<k>-<step>.json``: no rule keeps this checkpoint, so that it will be deleted.

    Under ``expired/<k>-<step>.<nonce>.json`` the same record announces that
    somebody deletes it now, unless he still finds a reference.
    """

    checkpoint: CheckpointRef
