"""How much of its usual batch a program is advised to take, because a GPU was too small for it before."""

import os
from collections.abc import Mapping

from tiphys.errors import UsageError
from tiphys.protocol.environment import BATCH_SCALE


def batch_scale(environ: Mapping[str, str] = os.environ) -> float:
    """1.0 as a rule, and outside of Tiphys; 0.5, then 0.25 in the attempts after a GPU ran out of memory.

    A program that takes ``int(batch * batch_scale())`` samples at once, and
    adds up gradients over as many more micro-batches, trains as before.

    Raises:
        UsageError: the variable was set by somebody else, to what is no such share.
    """
    text = environ.get(BATCH_SCALE) or "1"
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise UsageError(f"{BATCH_SCALE}={text!r} is not valid: it is a share of the batch, above 0 and at most 1")
    return scale
