"""Paths of the input artifacts of a compiled step.

Argo mounts each input at a path that the compiled Workflow sets in an
environment variable. A program that calls `path` therefore runs unchanged in a
pod, in the local engine and from a shell. `tiphys.outputs` is the counterpart.
"""

import os
from pathlib import Path

from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.environment import input_path_variable


def path(name: str) -> Path:
    """Path of the input artifact ``name``.

    Raises:
        UsageError: the step has no such input, or the program runs outside Tiphys.
        NotFoundError: no file or folder exists at the path.
    """
    variable = input_path_variable(name)
    if not (value := os.environ.get(variable)):
        raise UsageError(
            f"input {name!r} has no path: {variable} is not set; give the step an input artifact of that name, "
            f"or set {variable} to run the program by hand"
        )
    artifact_path = Path(value)
    if not artifact_path.exists():
        raise NotFoundError(
            f"input {name!r}: {variable} names {artifact_path}, which does not exist; "
            "if the input is optional, the step ran without it"
        )
    return artifact_path
