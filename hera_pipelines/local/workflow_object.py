"""The Workflow object of a local run, as an API server would store it, and the templates that it defines.

`StoredWorkflow` writes the object's status while the workflow runs, so that the
plugin can read it. `WorkflowDefinition` returns templates with the workflow's
defaults merged in.
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

from hera_pipelines.local.nodes import NodePhase, NodeTable, format_rfc3339
from tiphys.protocol.compiled_workflow import Manifest, find_template, read_workflow_parameters

_FLUSH_SECONDS = 0.2


class StoredWorkflow:
    """Writes the state of a running workflow to its stored object."""

    def __init__(self, cluster: DirectoryCluster, manifest: Manifest, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._document = manifest
        self._changed = False

    def mark_running(self) -> None:
        """Record that the workflow runs."""
        self._write_status(phase="Running", startedAt=format_rfc3339(self._clock()))

    def mark_changed(self) -> None:
        """Note that a node has changed; `write_periodically` writes the object soon, once for many changes."""
        self._changed = True

    def set_shutdown(self, strategy: str) -> None:
        """Record the shutdown strategy, so that the plugin reads it before a node ends because of it."""
        self._document["spec"]["shutdown"] = strategy
        with suppress(OSError):  # a person must be able to stop the workflow even if the disk is full
            self._cluster.write_workflow(self._document)

    def write_nodes(self, nodes: NodeTable) -> None:
        """Write the nodes now; a failed write is repeated by `write_periodically`."""
        with suppress(OSError):
            self._write_status(nodes=nodes.status_nodes())

    def mark_finished(self, phase: NodePhase, message: str, nodes: NodeTable) -> None:
        """Record the end of the workflow."""
        self._write_status(
            phase=str(phase), message=message, finishedAt=format_rfc3339(self._clock()), nodes=nodes.status_nodes()
        )

    async def write_periodically(self, nodes: NodeTable) -> None:
        """Write changed nodes periodically until cancelled; a failed write is repeated, at last by `mark_finished`."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            if self._changed:
                with suppress(OSError):
                    self._write_status(nodes=nodes.status_nodes())
                    self._changed = False

    def _write_status(self, **fields: Any) -> None:
        self._document["status"] = {**(self._document.get("status") or {}), **fields}
        self._cluster.write_workflow(self._document)


def add_server_fields(manifest: Manifest, now: datetime) -> Manifest:
    """Return ``manifest`` with the fields that an API server adds on create: uid, name and creation time."""
    document = copy.deepcopy(manifest)
    metadata = document["metadata"]
    metadata.setdefault("name", metadata.get("generateName", "") + secrets.token_hex(3)[:5])
    metadata.setdefault("namespace", "default")
    metadata["uid"] = str(UUID(bytes=secrets.token_bytes(16), version=4))
    metadata["creationTimestamp"] = format_rfc3339(now)
    document["status"] = {"phase": "Pending"}
    return document


def workflow_variables(manifest: Manifest) -> dict[str, str | None]:
    """Variables ``workflow.*``, which every template may use (Argo: setGlobalParameters)."""
    metadata, spec = manifest["metadata"], manifest["spec"]
    created_at = datetime.fromisoformat(metadata["creationTimestamp"])
    variables: dict[str, str | None] = {
        "workflow.name": metadata["name"],
        "workflow.namespace": metadata["namespace"],
        "workflow.uid": metadata["uid"],
        "workflow.mainEntrypoint": spec["entrypoint"],
        "workflow.serviceAccountName": spec.get("serviceAccountName", ""),
        "workflow.creationTimestamp": metadata["creationTimestamp"],
        "workflow.creationTimestamp.s": str(int(created_at.timestamp())),
        "workflow.creationTimestamp.RFC3339": metadata["creationTimestamp"],
    }
    for directive in "YmdHMS":
        variables[f"workflow.creationTimestamp.{directive}"] = created_at.strftime(f"%{directive}")
    documents = {"parameters": (spec.get("arguments") or {}).get("parameters") or []}
    documents |= {kind: metadata.get(kind) or {} for kind in ("labels", "annotations")}
    for kind, document in documents.items():  # expressions cannot use the first form
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        variables |= {f"workflow.{kind}": text, f"workflow.{kind}.json": text}
    for kind in ("labels", "annotations"):
        variables |= {f"workflow.{kind}.{key}": str(value) for key, value in (metadata.get(kind) or {}).items()}
    return variables | {
        f"workflow.parameters.{name}": value for name, value in read_workflow_parameters(manifest).items()
    }


@dataclass(frozen=True)
class WorkflowDefinition:
    """The definition of a workflow: its manifest and templates."""

    manifest: Manifest

    @property
    def workflow_name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def template(self, name: str) -> Manifest:
        """Return the template ``name`` with its defaults merged in; raises `UsageError` if it does not exist."""
        template = find_template(self.manifest, name)
        defaults = self.manifest["spec"].get("templateDefaults") or {}
        return merge_defaults(_applicable_defaults(defaults, template), template)

    @cached_property
    def uses_results(self) -> bool:
        """Whether any template refers to ``outputs.result``, the standard output of a program."""
        return ".outputs.result" in json.dumps(self.manifest)


def merge_defaults(defaults: Manifest, own: Manifest) -> Manifest:
    """Merge ``own`` over ``defaults``: maps are merged, lists and texts replaced."""
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = merge_defaults(defaults[key], own[key])
    return merged


def _applicable_defaults(defaults: Manifest, own: Manifest) -> Manifest:
    """Drop defaults for ``container`` or ``script`` if the template has another type."""
    return {key: value for key, value in defaults.items() if key not in ("container", "script") or key in own}
