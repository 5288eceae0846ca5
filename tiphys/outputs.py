"""Paths of the declared outputs of a compiled step.

The pipeline definition chooses the paths and passes them in environment
variables. A program that calls `path` therefore runs unchanged in a pod, in the
local engine and from a shell. `tiphys.inputs` is the counterpart.
"""

import os
from pathlib import Path

from tiphys.errors import UsageError
from tiphys.protocol.environment import output_path_variable


def path(name: str) -> Path:
    """Path of the declared output ``name``; creates its parent folder.

    Raises:
        UsageError: the step declares no such output, or the program runs outside Tiphys.
    """
    variable = output_path_variable(name)
    if not (value := os.environ.get(variable)):
        raise UsageError(
            f"output {name!r} has no path: {variable} is not set; declare the output in the step, "
            f"or set {variable} to run the program by hand"
        )
    output_path = Path(value)
    output_path.parent.mkdir(parents=True, exist_ok=True)
    return output_path
