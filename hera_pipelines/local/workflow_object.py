"""The Workflow object while it runs, as an API server would hold it.

The templates of a workflow, with the workflow's defaults merged in.
"""

import asyncio
import copy
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any
from uuid import UUID

from tiphys_plugin.cluster.interface import DirectoryCluster

from hera_pipelines.local.nodes import NodePhase, NodeTable, rfc3339
from tiphys.protocol.compiled_workflow import Manifest, parameters_of
from tiphys.protocol.compiled_workflow import template as find_template

_FLUSH_SECONDS = 0.2


class LiveObject:
    """Keeps the stored object in step with what happens."""

    def __init__(self, cluster: DirectoryCluster, manifest: Manifest, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._document = manifest
        self._changed = False

    def begin(self) -> None:
        """The workflow is running."""
        self._status(phase="Running", startedAt=rfc3339(self._clock()))

    def touch(self) -> None:
        """Some node has changed; the object is written soon, but not for every change."""
        self._changed = True

    def shut_down(self, strategy: str) -> None:
        """Stop or terminate was asked for: seen by the plugin before any node ends by it."""
        self._document["spec"]["shutdown"] = strategy
        with suppress(OSError):  # on a full disk, too, a person must be able to stop it
            self._cluster.write_workflow(self._document)

    def end(self, phase: NodePhase, message: str, nodes: NodeTable) -> None:
        """The workflow is over."""
        self._status(phase=str(phase), message=message, finishedAt=rfc3339(self._clock()), nodes=nodes.document())

    async def keep_written(self, nodes: NodeTable) -> None:
        """Write the nodes now and then, until cancelled. What cannot be written now is tried again, last by `end`."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            if self._changed:
                with suppress(OSError):
                    self._status(nodes=nodes.document())
                    self._changed = False

    def _status(self, **fields: Any) -> None:
        self._document["status"] = {**(self._document.get("status") or {}), **fields}
        self._cluster.write_workflow(self._document)


def created(manifest: Manifest, now: datetime) -> Manifest:
    """``manifest`` as the API server returns it after a create: with uid, name and time."""
    document = copy.deepcopy(manifest)
    metadata = document["metadata"]
    metadata.setdefault("name", metadata.get("generateName", "") + secrets.token_hex(3)[:5])
    metadata.setdefault("namespace", "default")
    metadata["uid"] = str(UUID(bytes=secrets.token_bytes(16), version=4))
    metadata["creationTimestamp"] = rfc3339(now)
    document["status"] = {"phase": "Pending"}
    return document


def workflow_variables(manifest: Manifest) -> dict[str, str | None]:
    """``workflow.*`` as every template sees them (Argo: setGlobalParameters)."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    made = datetime.fromisoformat(metadata["creationTimestamp"])
    variables: dict[str, str | None] = {
        "workflow.name": metadata["name"],
        "workflow.namespace": metadata["namespace"],
        "workflow.uid": metadata["uid"],
        "workflow.mainEntrypoint": spec["entrypoint"],
        "workflow.serviceAccountName": spec.get("serviceAccountName", ""),
        "workflow.creationTimestamp": metadata["creationTimestamp"],
        "workflow.creationTimestamp.s": str(int(made.timestamp())),
        "workflow.creationTimestamp.RFC3339": metadata["creationTimestamp"],
        "workflow.parameters": json.dumps((spec.get("arguments") or {}).get("parameters") or []),
        "workflow.labels": json.dumps(metadata.get("labels") or {}),
        "workflow.annotations": json.dumps(metadata.get("annotations") or {}),
    }
    for directive in "YmdHMS":
        variables[f"workflow.creationTimestamp.{directive}"] = made.strftime(f"%{directive}")
    for kind in ("labels", "annotations"):
        variables |= {f"workflow.{kind}.{key}": str(value) for key, value in (metadata.get(kind) or {}).items()}
    return variables | {f"workflow.parameters.{name}": value for name, value in parameters_of(manifest).items()}


@dataclass(frozen=True)
class Definitions:
    """What the workflow defines."""

    manifest: Manifest

    @property
    def workflow(self) -> str:
        """Name of the Workflow object."""
        return str(self.manifest["metadata"]["name"])

    def template(self, name: str) -> Manifest:
        """The template called ``name``, its defaults merged in; `UsageError` if there is none."""
        found = find_template(self.manifest, name)
        defaults = self.manifest["spec"].get("templateDefaults") or {}
        return merge(_applicable(defaults, found), found)

    @cached_property
    def uses_results(self) -> bool:
        """Whether anything refers to what a program printed."""
        return ".outputs.result" in json.dumps(self.manifest)


def merge(defaults: Manifest, own: Manifest) -> Manifest:
    """``own`` over ``defaults``; maps are merged, lists and texts replaced."""
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = merge(defaults[key], own[key])
    return merged


def _applicable(defaults: Manifest, own: Manifest) -> Manifest:
    """Defaults of another template type do not turn a template into it."""
    return {key: value for key, value in defaults.items() if key not in ("container", "script") or key in own}
