"""Where a program of a compiled step finds its input artifacts; see `tiphys.outputs`."""

import os
from pathlib import Path

from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.environment import input_path_variable


def path(name: str) -> Path:
    """Path of the input artifact ``name``.

    Raises:
        UsageError: the step has no such input, or the program runs outside of Tiphys.
        NotFoundError: nothing lies at the path.
    """
    variable = input_path_variable(name)
    if not (value := os.environ.get(variable)):
        raise UsageError(
            f"input {name!r} has no path: {variable} is not set; give the step an input artifact of that name, "
            f"or set {variable} to run the program by hand"
        )
    found = Path(value)
    if not found.exists():
        raise NotFoundError(f"input {name!r}: nothing lies at {found}, which {variable} names; was it optional?")
    return found
