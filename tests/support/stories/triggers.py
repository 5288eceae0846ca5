"""Triggers without a cluster and without a bucket: templates, objects, and a worker that tests drive."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tiphys_controller.submit.triggers.bucket import ObjectPage
from tiphys_controller.submit.triggers.catalog import ObjectSources, TriggerCatalog
from tiphys_controller.submit.triggers.worker import TriggerWorker

from support.builders.compiled_workflows import gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from tiphys.errors import StoreError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import ObjectVersion, TriggerSpec
from tiphys.records.trigger import TRIGGER_ANNOTATION
from tiphys.store import Store

CREATED = datetime(2026, 5, 4, 12, tzinfo=UTC)
"""When all templates were created."""
SOURCE = "s3://raw/{namespace}"
STORE_URL = "s3://runs/{namespace}/tiphys"


def template(name: str = "digits", namespace: str = "ml", *, parameter: str = "source", **spec: Any) -> Manifest:
    """A compiled WorkflowTemplate with the parameter `source` and a trigger; without ``objects`` it has none."""
    workflow = pipeline_of(gated("prep"), parameters={"source": "none"})
    metadata: Manifest = {"name": name, "namespace": namespace, "creationTimestamp": f"{CREATED:%Y-%m-%dT%H:%M:%SZ}"}
    if spec:
        given = {"parameters": {} if spec.get("resume") else {parameter: "url"}, **spec}
        metadata["annotations"] = {TRIGGER_ANNOTATION: TriggerSpec(**given).model_dump_json(exclude_defaults=True)}
    inherited = {"labels": {PIPELINE_ANNOTATION: "digits"}, "annotations": workflow["metadata"]["annotations"]}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": metadata,
        "spec": {**workflow["spec"], "workflowMetadata": inherited},
    }


def version(key: str, content: str = "1", bucket: str = "raw", after_seconds: float = 60.0) -> ObjectVersion:
    """An object, modified so long after the templates were created."""
    etag = hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()
    modified = CREATED + timedelta(seconds=after_seconds)
    return ObjectVersion(bucket=bucket, key=key, etag=etag, size=len(content), modified=modified)


class FakeBuckets:
    """Buckets in memory; `tests/unit/controller/submit/triggers/test_bucket.py` holds them against a server."""

    def __init__(self, page_objects: int = 1000) -> None:
        self.objects: dict[tuple[str, str], ObjectVersion] = {}
        self.page_objects = page_objects
        self.is_down = False
        self.requests = 0

    def put(self, *versions: ObjectVersion) -> None:
        self.objects |= {(one.bucket, one.key): one for one in versions}

    def find(self, bucket: str, key: str) -> ObjectVersion | None:
        self._enter()
        return self.objects.get((bucket, key))

    def list_page(self, bucket: str, prefix: str, after: str) -> ObjectPage:
        self._enter()
        keys = sorted(key for own, key in self.objects if own == bucket and key.startswith(prefix) and key > after)
        page = tuple(self.objects[bucket, key] for key in keys[: self.page_objects])
        return ObjectPage(page, page[-1].key if len(keys) > len(page) else "")

    def _enter(self) -> None:
        self.requests += 1
        if self.is_down:
            raise StoreError("the bucket does not answer")


class CountedRuns:
    """What a worker reports, and how often."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.failures = 0
        self.waiting = self.problems = 0

    def observe_triggered_run(self, source: str) -> None:
        self.made[source] += 1

    def observe_trigger_failure(self) -> None:
        self.failures += 1

    def set_trigger_state(self, waiting: int, problems: int) -> None:
        self.waiting, self.problems = waiting, problems


class TriggerWorld:
    """Two tenants, ``ml`` and ``nlp``, their templates, one cluster and one bucket."""

    def __init__(
        self, folder: Path, open_store: Callable[[str], Store], *templates: Manifest, source: str = SOURCE
    ) -> None:
        self._source = source
        self.templates = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in templates}
        self.buckets = FakeBuckets()
        self.submitter = FakeSubmitter(folder / "cluster")
        self.metrics = CountedRuns()
        self.rates: dict[str, int] = {}
        """Runs that may still be started, by namespace; without an entry there is no limit."""
        self.now = 0.0
        self._open_store = open_store
        self.worker = self.new_worker()

    def new_worker(self) -> TriggerWorker:
        """A second replica, or the same after a restart: it remembers nothing."""
        return TriggerWorker(
            TriggerCatalog(
                lambda: list(self.templates.values()), ObjectSources([self._source], STORE_URL), lambda: self.now
            ),
            self.buckets,
            self._open_store,
            lambda: self.submitter,  # type: ignore[arg-type]
            lambda namespace, name: self.templates.get((namespace, name)),
            self._take_start,
            self.metrics,
            lambda: self.now,
            60.0,
        )

    def parameters(self, run: str, namespace: str = "ml") -> Mapping[str, str]:
        """Parameters of the first Workflow of a run."""
        manifest = self.submitter.manifest(run, namespace)
        return {one["name"]: one["value"] for one in manifest["spec"]["arguments"]["parameters"]}

    def sources(self, namespace: str = "ml") -> list[str]:
        """The parameter `source` of every Workflow of a namespace."""
        own = [path.stem.partition("_") for path in self.submitter.folder.glob("*.json")]
        return sorted(self.parameters(name, namespace)["source"] for where, _, name in own if where == namespace)

    def _take_start(self, namespace: str) -> float:
        if namespace not in self.rates:
            return 0.0
        self.rates[namespace] -= 1
        return 0.0 if self.rates[namespace] >= 0 else 1.0
