"""Triggers: which objects of a bucket start or resume a run, and the record of each object that did.

A WorkflowTemplate carries its trigger in the annotation ``tiphys.dev/trigger``,
so that the rule and what it starts are applied and deleted together.
"""

import fnmatch
import hashlib
import re
from datetime import datetime
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from tiphys.errors import UsageError
from tiphys.records.base import Record, StoredRecord, Timestamp
from tiphys.records.names import canonical_json, check_run_name

TRIGGER_ANNOTATION = "tiphys.dev/trigger"
TRIGGER_LABEL = TRIGGER_ANNOTATION
"""Label of each WorkflowTemplate with a trigger. The API server selects objects by labels only."""
TRIGGER_LABEL_VALUE = "object"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MAX_KEY_BYTES = 1024

ObjectField = Literal["url", "bucket", "key", "name", "etag", "size", "modified"]
"""What a parameter of a triggered run may hold; ``name`` is the part of the key after the last ``/``."""


def split_object_url(url: str) -> tuple[str, str]:
    """(bucket, prefix) of ``s3://bucket/prefix``.

    Raises:
        UsageError: it is no such URL, or listings of its bucket are not ordered.
    """
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "s3" or "?" in url or not _BUCKET.fullmatch(parts.netloc):
        raise UsageError(f"{url!r} names no bucket and prefix of S3: write s3://bucket/prefix/")
    if parts.netloc.endswith("--x-s3"):
        raise UsageError(f"{parts.netloc} is a directory bucket (S3 Express), whose listings are not ordered")
    prefix = parts.path.removeprefix("/")
    if len(prefix.encode(errors="surrogatepass")) > _MAX_KEY_BYTES:
        raise UsageError(f"the prefix {prefix[:60]!r}… is longer than {_MAX_KEY_BYTES} bytes, so no key begins with it")
    return parts.netloc, prefix


class ObjectVersion(Record):
    """One object as a listing shows it. A changed object has another etag."""

    bucket: str
    key: str
    etag: str
    size: NonNegativeInt
    modified: Timestamp

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def digest(self) -> str:
        """Identifies bucket, key and content; the time is no part of it, so that a repeated upload changes nothing."""
        return hashlib.sha256(canonical_json([self.bucket, self.key, self.etag])).hexdigest()

    def read_field(self, field: ObjectField) -> str:
        """The value of a parameter."""
        match field:
            case "name":
                return self.key.rpartition("/")[2]
            case "modified":
                return self.model_dump(mode="json")["modified"]  # type: ignore[no-any-return]
            case _:
                return str(getattr(self, field))


class TriggerSpec(Record):
    """The trigger of a WorkflowTemplate.

    Exactly one run is started, or one resume made, for each object that matches,
    and again when the object has changed.
    """

    objects: str = Field(max_length=1200)
    """``s3://bucket/prefix``: objects whose key begins with the prefix."""
    pattern: str = Field(default="*", min_length=1, max_length=200)
    """Shell pattern (``*``, ``?``, ``[…]``) for the part of the key behind the prefix; ``*`` matches ``/`` as well."""
    parameters: dict[str, ObjectField] = Field(default={}, max_length=100)
    """What parameters of the run hold, by parameter."""
    since: Timestamp | None = None
    """Objects that were last modified before start nothing; None: before the WorkflowTemplate was created."""
    resume: str = ""
    """Name of a run to resume; empty: a run of the WorkflowTemplate is started."""

    @field_validator("objects")
    @classmethod
    def _is_object_url(cls, url: str) -> str:
        try:
            split_object_url(url)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return url

    @field_validator("resume")
    @classmethod
    def _is_run_name(cls, run: str) -> str:
        try:
            return run and check_run_name(run)
        except UsageError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _resumes_without_parameters(self) -> "TriggerSpec":
        if self.resume and self.parameters:
            raise ValueError("a resume keeps the parameters of its run: give either resume or parameters")
        return self

    @property
    def bucket(self) -> str:
        return split_object_url(self.objects)[0]

    @property
    def prefix(self) -> str:
        return split_object_url(self.objects)[1]

    def matches(self, bucket: str, key: str) -> bool:
        """Whether the trigger is about an object. Names of folders, which end with ``/``, never match."""
        own_bucket, prefix = split_object_url(self.objects)
        return (
            bucket == own_bucket
            and key.startswith(prefix)
            and not key.endswith("/")
            and fnmatch.fnmatchcase(key[len(prefix) :], self.pattern)
        )


TriggerSource = Literal["delivered", "found"]
"""How an object became known: by a notification, or by listing the bucket."""


class TriggeredRunRecord(StoredRecord):
    """``triggers/<template>/objects/<digest>.json``: an object whose run was started or resumed.

    Written after the Workflow was created, so an object without it is looked at again. A copy, for
    people, is written before it as ``triggers/<template>/<age>-<digest>.json``.
    """

    object: ObjectVersion
    source: TriggerSource
    run: str
    submission: NonNegativeInt
    """The submission that was made; 0 if the run to resume had no missing step."""


def is_recent(version: ObjectVersion, since: datetime) -> bool:
    """Whether an object was modified at or after ``since``. Whole seconds are compared: some servers list no others."""
    return version.modified.replace(microsecond=0) >= since.replace(microsecond=0)
