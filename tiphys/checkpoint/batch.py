"""How much of its usual batch a program is advised to take, because a GPU was too small for it before."""

import os
from collections.abc import Mapping

from tiphys.checkpoint.journal import tell
from tiphys.checkpoint.settings import Settings
from tiphys.errors import StoreError, UsageError
from tiphys.protocol.environment import BATCH_SCALE, EX_UNAVAILABLE
from tiphys.records import AttemptClaim
from tiphys.store import RunLayout, find_record, open_store


def batch_scale(environ: Mapping[str, str] = os.environ) -> float:
    """1.0 as a rule, and outside of Tiphys; 0.5, then 0.25 in the attempts after a GPU ran out of memory.

    A program that takes ``int(batch * batch_scale())`` samples at once, and
    adds up gradients over as many more micro-batches, trains as before. Every
    rank of an attempt is told the same. Costs a read in all attempts but the first.

    Raises:
        UsageError: the variable was set by somebody else, to what is no such share.
        SystemExit: with code 69, storage is out of reach; the attempt is tried again.
    """
    if text := environ.get(BATCH_SCALE):
        return _share(text)
    settings = Settings.from_environment(environ)
    if settings is None or settings.attempt == 1:
        return 1.0
    # No variable reaches the pods of a training on several nodes.
    key = RunLayout(settings.run).attempt(settings.step, settings.attempt)
    try:
        claim = find_record(open_store(settings.store, must_exist=True), key, AttemptClaim)
    except StoreError as error:
        tell(str(error))
        raise SystemExit(EX_UNAVAILABLE) from error
    return claim.escalation.batch_scale if claim is not None and claim.escalation is not None else 1.0


def _share(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise UsageError(f"{BATCH_SCALE}={text!r} is not valid: it is a share of the batch, above 0 and at most 1")
    return scale
