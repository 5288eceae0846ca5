"""Reads the triggers of WorkflowTemplates, and refuses those that look where their namespace may not.

The controller lists buckets with its own credentials, so a trigger may name only
what the administrator allows to its namespace (`ObjectSources`). Objects in a
run store start nothing: a run that reacts to what runs write would never end.
"""

import re
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from pydantic import ValidationError

from tiphys.errors import TiphysError, UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TEMPLATES
from tiphys.protocol.compiled_workflow import Manifest, read_annotation
from tiphys.records import ObjectVersion, TriggerSpec
from tiphys.records.trigger import (
    TRIGGER_ANNOTATION,
    TRIGGER_LABEL,
    TRIGGER_LABEL_VALUE,
    is_recent,
    split_object_url,
)
from tiphys.store.open import PLACEHOLDER

MAX_TRIGGERS_PER_NAMESPACE = 100
_REPAIR = "; compile the pipeline again and apply its WorkflowTemplate"


class Trigger(NamedTuple):
    """The trigger of a WorkflowTemplate."""

    namespace: str
    template: str
    spec: TriggerSpec
    created_at: datetime

    @property
    def since(self) -> datetime:
        return self.spec.since or self.created_at

    def wants(self, version: ObjectVersion) -> bool:
        """Whether an object starts a run, unless it has done so before."""
        return self.spec.matches(version.bucket, version.key) and is_recent(version, self.since)


class TriggerProblem(NamedTuple):
    """A trigger that has no effect, and why."""

    namespace: str
    template: str
    reason: str


class TriggerList(NamedTuple):
    """The triggers of the served namespaces."""

    triggers: tuple[Trigger, ...] = ()
    problems: tuple[TriggerProblem, ...] = ()


class ObjectSources:
    """What the triggers of a namespace may look at.

    Args:
        urls: ``s3://bucket/prefix``, with ``{namespace}`` in the place of the namespace.
        store_url: URL of the run stores, with the same placeholder.

    Raises:
        UsageError: a URL names no bucket, or has another placeholder.
    """

    def __init__(self, urls: Sequence[str], store_url: str) -> None:
        self._urls = tuple(urls)
        for url in self._urls:
            if "{" in url.replace(PLACEHOLDER, ""):
                raise UsageError(f"{url} holds a placeholder other than {PLACEHOLDER}, which is the only one there is")
            split_object_url(url.replace(PLACEHOLDER, "namespace"))
        path = store_url.removeprefix("s3://").rstrip("/")
        own = "[^/]+".join(re.escape(part) for part in path.split(PLACEHOLDER))
        self._stored = re.compile(own + "/.*", re.DOTALL) if store_url.startswith("s3://") else None

    def check(self, namespace: str, spec: TriggerSpec) -> None:
        """Check that a trigger of ``namespace`` looks only where it may.

        Raises:
            UsageError: it looks elsewhere; the message names what is allowed.
        """
        allowed = [url.replace(PLACEHOLDER, namespace) for url in self._urls]
        if not any(_lies_below(spec, *split_object_url(url)) for url in allowed):
            raise UsageError(
                f"it looks at {spec.objects}, and the administrator allows triggers of namespace {namespace} only "
                f"{', '.join(allowed) or 'nothing'}; move the objects, or have triggers.sources of the chart extended"
            )
        if self.is_stored_by_tiphys(spec.bucket, spec.prefix):
            raise UsageError(f"it looks at {spec.objects}, which is a run store, whose objects start nothing")

    def is_stored_by_tiphys(self, bucket: str, key: str) -> bool:
        """Whether an object lies in the run store of a namespace."""
        return self._stored is not None and self._stored.fullmatch(f"{bucket}/{key}") is not None


def _lies_below(spec: TriggerSpec, bucket: str, prefix: str) -> bool:
    """Whether all objects of a trigger lie in the folder ``prefix``: `ml` does not cover `ml-2/…`."""
    folder = prefix.rstrip("/")
    return spec.bucket == bucket and (not folder or spec.prefix.startswith(f"{folder}/"))


def list_trigger_templates(api: KubeApi, namespace: str | None) -> list[Manifest]:
    """Name, age and trigger of each WorkflowTemplate with a trigger, without its steps; None: of all namespaces."""
    selector = f"{TRIGGER_LABEL}={TRIGGER_LABEL_VALUE}"
    return api.list(WORKFLOW_TEMPLATES, namespace, selector, transform=_keep_trigger).items


def _keep_trigger(template: Manifest) -> Manifest:
    metadata = template["metadata"]
    text = (metadata.get("annotations") or {}).get(TRIGGER_ANNOTATION, "")
    kept = {field: metadata[field] for field in ("namespace", "name", "creationTimestamp")}
    return {"metadata": {**kept, "annotations": {TRIGGER_ANNOTATION: text}}}


def read_trigger(template: Manifest) -> Trigger | None:
    """The trigger of a WorkflowTemplate; None without one.

    Raises:
        UsageError: its annotation is damaged.
    """
    metadata = template["metadata"]
    spec = read_annotation(template, TRIGGER_ANNOTATION, TriggerSpec, _REPAIR)
    if spec is None:
        return None
    created_at = datetime.fromisoformat(metadata["creationTimestamp"])
    return Trigger(metadata["namespace"], metadata["name"], spec, created_at)


def read_triggers(templates: Sequence[Manifest], sources: ObjectSources) -> TriggerList:
    """The triggers of some WorkflowTemplates, by namespace and name."""
    triggers: list[Trigger] = []
    problems: list[TriggerProblem] = []
    counts: dict[str, int] = {}
    for template in sorted(templates, key=lambda found: (found["metadata"]["namespace"], found["metadata"]["name"])):
        namespace, name = template["metadata"]["namespace"], template["metadata"]["name"]
        try:
            if (trigger := read_trigger(template)) is None:
                continue
            sources.check(namespace, trigger.spec)
            counts[namespace] = counts.get(namespace, 0) + 1
            if counts[namespace] > MAX_TRIGGERS_PER_NAMESPACE:
                raise UsageError(f"a namespace may have {MAX_TRIGGERS_PER_NAMESPACE} triggers, and this is one more")
            triggers.append(trigger)
        except (TiphysError, ValidationError, ValueError) as error:
            problems.append(TriggerProblem(namespace, name, str(error)))
    return TriggerList(tuple(triggers), tuple(problems))


class TriggerCatalog:
    """The triggers of the served namespaces, read from the API server and kept for some seconds. Thread-safe."""

    def __init__(
        self,
        list_templates: Callable[[], Sequence[Manifest]],
        sources: ObjectSources,
        monotonic: Callable[[], float],
    ) -> None:
        self.sources = sources
        self._list_templates = list_templates
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._last = TriggerList()

    def read(self, max_age_seconds: float) -> TriggerList:
        """The triggers as they were less than ``max_age_seconds`` ago.

        Raises:
            StoreError: the API server does not answer.
        """
        with self._lock:  # of several callers one asks the API server
            now = self._monotonic()
            if now - self._read_at >= max_age_seconds:
                self._last = read_triggers(self._list_templates(), self.sources)
                self._read_at = now
            return self._last
