"""Dying in the middle of something, within the test's own process."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from tiphys import faults


@contextmanager
def dying_at(point: str) -> Iterator[None]:
    """The block must end at the failpoint ``point``, and nowhere else."""
    armed = patch.dict(os.environ, {"TIPHYS_FAILPOINTS": f"{point}=raise"})
    with armed, patch.object(faults, "_calls", Counter()), pytest.raises(faults.InjectedFaultError, match=point):
        yield
