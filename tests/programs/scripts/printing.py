"""What the programs of this folder print beside what their tutorials print: a JSON object in each line.

The harness reads the lines to choose the moment of a fault, and to compare states and samples with
an undisturbed run. ``PROGRAM_TRACE`` names the file. A line is one write, so that lines of several
processes never mix, and no line is lost in a buffer when a process is killed.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping
from typing import Any


def say(event: str, **facts: Any) -> None:
    """Print one line; ``rank`` is that of torchrun."""
    line = {"event": event, "rank": int(os.environ.get("RANK", "0")), **facts}
    file = os.open(os.environ.get("PROGRAM_TRACE", "/dev/stdout"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def digest(*parts: Any) -> str:
    """A digest of arrays, tensors, numbers and texts in mappings and sequences."""
    state = hashlib.sha256()
    _add(state, parts)
    return state.hexdigest()[:16]


def generators() -> str:
    """A digest of the global random generators of Python, NumPy and PyTorch, as far as they are loaded."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return digest(
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy else None,
        torch.get_rng_state() if torch else None,
    )


def _add(state: Any, part: Any) -> None:
    if isinstance(part, Mapping):
        for name in sorted(part, key=repr):
            state.update(repr(name).encode())
            _add(state, part[name])
    elif isinstance(part, list | tuple):
        state.update(str(len(part)).encode())
        for item in part:
            _add(state, item)
    elif hasattr(part, "detach"):
        _add(state, part.detach().cpu().numpy())
    elif hasattr(part, "__array__"):
        import numpy

        array = numpy.asarray(part)
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(array.tobytes())
    else:
        state.update(repr(part).encode())
