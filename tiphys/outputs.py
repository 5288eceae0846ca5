"""Where a program of a compiled step puts its declared outputs.

The paths are chosen where the pipeline is written; a program that asks for them
by name runs unchanged in a pod, in the local engine and by hand.
"""

import os
from pathlib import Path

from tiphys.errors import UsageError
from tiphys.protocol.environment import output_path_variable


def path(name: str) -> Path:
    """Path of the declared output ``name``; its folder exists afterwards.

    Raises:
        UsageError: the step declares no such output, or the program runs outside of Tiphys.
    """
    variable = output_path_variable(name)
    if not (value := os.environ.get(variable)):
        raise UsageError(
            f"output {name!r} has no path: {variable} is not set; declare the output in the step, "
            f"or set {variable} to run the program by hand"
        )
    found = Path(value)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found
