"""What a program has said of its own end, and what its end was judged by.

Pods tell an exit code, and every error of a Python program is 1. What the
session of a training left in storage tells a full GPU from a typing error, so
it is heard before the verdict; what decided is kept with the end.
"""

from dataclasses import replace

import structlog

from tiphys.errors import IntegrityError
from tiphys.lineage.classify import Observation, Verdict
from tiphys.lineage.suspects import crash_of
from tiphys.records import AttemptClaim, CrashRecord, Evidence
from tiphys_plugin.services import StepCall

_log = structlog.get_logger()
_LONGEST_WORDS = 300


def crash(call: StepCall, claim: AttemptClaim) -> CrashRecord | None:
    """What the program of an attempt left about its end; None if it left nothing that can be read."""
    if not claim.lineage:
        return None
    try:
        return crash_of(call.store, claim.run, claim.step, claim.attempt)
    except IntegrityError as error:  # a program that dies may leave anything; its end is judged without it
        _log.warning("crash.unreadable", run=claim.run, step=claim.step, attempt=claim.attempt, error=str(error))
        return None


def heard(seen: Observation, left: CrashRecord | None) -> Observation:
    """``seen``, and what the program has left."""
    if left is None:
        return seen
    return replace(seen, account=left.error, stuck_seconds=left.stuck_seconds)


def evidence(claim: AttemptClaim, seen: Observation, verdict: Verdict) -> Evidence | None:
    """What is kept of a verdict; None where there was nothing to judge."""
    if not verdict.rule:
        return None
    alone = claim.nodes[0] if len(claim.nodes) == 1 else ""
    return Evidence(rule=verdict.rule, words=verdict.words[:_LONGEST_WORDS], node=seen.node or alone)
