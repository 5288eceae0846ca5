"""Gives a compiled Workflow its name, run and submission, and takes off what a server had put on.

The recorded Workflow may come from a live object, whose owner, phase and
shutdown must not pass to the next one.
"""

import hashlib
from copy import deepcopy
from typing import NamedTuple

from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import RUN_LABEL, RUN_PARAMETER, SUBMISSION_PARAMETER

_LONGEST_NAME = 63
_HASH_DIGITS = 8
_KEPT_METADATA = ("annotations", "labels")
# Argo finds a Workflow by these, takes it for finished, or counts it to a schedule.
_SERVER_LABELS = frozenset(
    f"workflows.argoproj.io/{name}"
    for name in (
        "completed",
        "phase",
        "workflow-archiving-status",
        "resubmitted-from-workflow",
        "cron-workflow",
        "creator",
        "creator-email",
        "creator-preferred-username",
        "actor",
        "actor-email",
        "actor-preferred-username",
        "action",
    )
)
_SERVER_SPEC = ("shutdown",)


class Identity(NamedTuple):
    """What tells one Workflow of a run from the others."""

    run: str
    submission: int
    name: str
    namespace: str


def workflow_name(run: str, submission: int) -> str:
    """Name of the n-th Workflow of a run, at most 63 characters: Argo puts it into a label."""
    suffix = "" if submission == 1 else f"-{submission}"
    if len(run) + len(suffix) <= _LONGEST_NAME:
        return run + suffix
    digits = hashlib.sha256(run.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{run[: _LONGEST_NAME - _HASH_DIGITS - 1 - len(suffix)].rstrip('-.')}-{digits}{suffix}"


def identified(manifest: Manifest, identity: Identity) -> Manifest:
    """A copy of ``manifest`` that is ready to be created under ``identity``."""
    spec = {name: deepcopy(value) for name, value in manifest["spec"].items() if name not in _SERVER_SPEC}
    spec["arguments"] = _arguments(spec.get("arguments") or {}, identity)
    top = {name: deepcopy(value) for name, value in manifest.items() if name not in ("metadata", "spec", "status")}
    return {**top, "metadata": _metadata(manifest.get("metadata") or {}, identity), "spec": spec}


def anonymous(manifest: Manifest) -> Manifest:
    """A copy of ``manifest`` that belongs to no run yet, as compile makes it."""
    spec = deepcopy(manifest["spec"])
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        if parameter["name"] in (RUN_PARAMETER, SUBMISSION_PARAMETER):
            parameter["value"] = ""
    return {**manifest, "spec": spec}


def _metadata(metadata: Manifest, identity: Identity) -> Manifest:
    kept = {name: deepcopy(metadata[name]) for name in _KEPT_METADATA if metadata.get(name)}
    labels = {name: value for name, value in kept.get("labels", {}).items() if name not in _SERVER_LABELS}
    kept["labels"] = {**labels, RUN_LABEL: identity.run}
    return {"name": identity.name, "namespace": identity.namespace, **kept}


def _arguments(arguments: Manifest, identity: Identity) -> Manifest:
    ours = {RUN_PARAMETER: identity.run, SUBMISSION_PARAMETER: str(identity.submission)}
    parameters = [p for p in arguments.get("parameters") or [] if p["name"] not in ours]
    return {**arguments, "parameters": [*parameters, *({"name": n, "value": v} for n, v in ours.items())]}
