"""Which commit the code of a run is from, for the facts of its checkpoints and its record.

Compile itself is a function from one document to another and looks at no
checkout, or the same pipeline would compile to something else in every clone.
So this is done to its result, by whoever knows where the code lies.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from tiphys.protocol import environment
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import CODE_VERSION_ANNOTATION, PIPELINE_ANNOTATION

_PATIENCE_SECONDS = 5.0


def commit_of(folder: Path) -> str:
    """The commit that is checked out around ``folder``, with ``-dirty`` if tracked files differ; empty if unknown."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes or changes is None else commit


def record_code_version(manifest: Manifest, commit: str) -> None:
    """Have a compiled Workflow, or CronWorkflow, tell ``commit`` to its training programs; nothing for an empty one."""
    if not commit:
        return
    for metadata in (manifest.get("metadata"), manifest["spec"].get("workflowMetadata")):
        annotations = (metadata or {}).get("annotations") or {}
        if PIPELINE_ANNOTATION in annotations:
            annotations[CODE_VERSION_ANNOTATION] = commit
    for template in manifest["spec"].get("workflowSpec", manifest["spec"]).get("templates", []):
        variables: list[dict[str, Any]] = (template.get("container") or template.get("script") or {}).get("env") or []
        names = [variable["name"] for variable in variables]
        if environment.LINEAGE in names and environment.GIT_COMMIT not in names:
            variables.append({"name": environment.GIT_COMMIT, "value": commit})


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None without git or a checkout, or if it takes long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
