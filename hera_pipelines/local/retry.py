"""Decides what follows a failed attempt under a ``retryStrategy``. Pure.

The order of the checks is Argo's (``controller/operator.go``,
processNodeRetries): shutdown, maximum duration, back-off, policy, limit,
expression. But a failure that no attempt follows does not wait for its back-off,
whose end would change nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hera_pipelines.local.expressions.expr import evaluate_condition
from hera_pipelines.local.nodes import NodePhase
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import parse_argo_duration_seconds

_POLICY_PHASE = {"OnFailure": NodePhase.FAILED, "OnError": NodePhase.ERROR}
_POLICIES = ("Always", *_POLICY_PHASE)


class RetryObservation(NamedTuple):
    """Facts about the attempts of a node, for `RetryStrategy.decide`."""

    attempts: int
    phase: NodePhase
    message: str
    exit_code: str | None
    duration_seconds: float
    """Duration of the last attempt."""
    elapsed_seconds: float
    """Time from the start of the first attempt to the end of the last one."""
    stop_reason: str = ""
    """Why no attempt may start any more; empty if one may."""
    has_waited: bool = False
    """Whether the back-off after the last attempt is over."""


class BackoffWait(NamedTuple):
    """Wait for the back-off, then decide again."""

    seconds: float
    message: str


class NextAttempt(NamedTuple):
    """Start the next attempt; it must end within ``remaining_seconds``, if not None."""

    remaining_seconds: float | None = None


class NoRetry(NamedTuple):
    """Do not retry: the node ends with the phase of its last attempt."""

    message: str


@dataclass(frozen=True)
class RetryStrategy:
    """A validated ``retryStrategy``."""

    limit: int | None
    policy: str
    expression: str
    backoff: Manifest | None

    @classmethod
    def parse(cls, manifest: Manifest) -> "RetryStrategy":
        """Parse a ``retryStrategy`` of a template.

        Raises:
            UsageError: a field is invalid, or the local engine does not support it.
        """
        expression = manifest.get("expression", "")
        policy = manifest.get("retryPolicy") or ("Always" if expression else "OnFailure")
        if policy not in _POLICIES:
            raise UsageError(f"retryPolicy {policy!r} is not supported here; use {', '.join(_POLICIES)}")
        backoff = manifest.get("backoff")
        if backoff is not None and not backoff.get("duration"):
            raise UsageError("retryStrategy.backoff has no duration")
        limit = manifest.get("limit")
        try:
            return cls(None if limit is None else int(limit), policy, expression, backoff)
        except ValueError as error:
            raise UsageError(f"retryStrategy.limit {limit!r} is not a whole number") from error

    def decide(self, observation: RetryObservation) -> BackoffWait | NextAttempt | NoRetry:
        """Decide what follows an attempt that ended in Failed or Error."""
        if observation.stop_reason:
            return NoRetry(observation.stop_reason)
        remaining = self._remaining_seconds(observation.elapsed_seconds)
        if remaining is not None and remaining < 0:
            return NoRetry("Max duration limit exceeded")
        decision = self._apply_policy(observation, remaining)
        if isinstance(decision, NextAttempt) and self.backoff and not observation.has_waited:
            wait = self.backoff_seconds(observation.attempts)
            if remaining is not None and wait > remaining:
                return NoRetry("Backoff would exceed max duration limit")
            if self.limit is not None:
                return BackoffWait(wait, f"Backoff for {wait:g} seconds")
        return decision

    def backoff_seconds(self, attempts: int) -> float:
        """Back-off in seconds after ``attempts`` attempts: duration × factor^(attempts-1), at most cap."""
        backoff = self.backoff or {}
        base = parse_argo_duration_seconds(str(backoff.get("duration", "0")))
        factor = int(backoff.get("factor") or 0)
        wait = base * factor ** min(attempts - 1, 64) if factor > 0 else base
        return min(wait, parse_argo_duration_seconds(str(backoff["cap"]))) if backoff.get("cap") else wait

    def _remaining_seconds(self, elapsed: float) -> float | None:
        longest = (self.backoff or {}).get("maxDuration")
        return parse_argo_duration_seconds(str(longest)) - elapsed if longest else None

    def _apply_policy(self, observation: RetryObservation, remaining: float | None) -> NextAttempt | NoRetry:
        if not (self.policy == "Always" or _POLICY_PHASE[self.policy] is observation.phase):
            return NoRetry(observation.message)
        if self.limit is not None and observation.attempts > self.limit:
            return NoRetry("No more retries left")
        if self.expression and not evaluate_condition(self.expression, _expression_variables(observation)):
            return NoRetry("retryStrategy.expression evaluated to false")
        return NextAttempt(remaining)


def _expression_variables(observation: RetryObservation) -> dict[str, object]:
    last = {
        "exitCode": "-1" if observation.exit_code is None else observation.exit_code,
        "status": str(observation.phase),
        "duration": f"{observation.duration_seconds:g}",
        "message": observation.message,
    }
    return {"retries": str(observation.attempts - 1), "lastRetry": last}


def attempt_variables(attempt: int, last: RetryObservation | None) -> dict[str, str | None]:
    """Variables ``retries`` and ``lastRetry.*`` for the template of the next attempt."""
    return {
        "retries": str(attempt),
        "lastRetry.exitCode": (last.exit_code if last else None) or "0",
        "lastRetry.status": str(last.phase) if last else "",
        "lastRetry.duration": f"{last.duration_seconds:g}" if last else "0",
        "lastRetry.message": last.message if last else "",
    }
