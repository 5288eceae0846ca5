"""retryStrategy: what follows a failed attempt, as a pure function.

The order of checks is Argo's (``controller/operator.go``, processNodeRetries):
shutdown, longest duration, back-off, policy, limit, expression. So a failure
that the policy will not retry still waits for its back-off first, here as there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from hera_pipelines.local.expressions.expr import truth_of
from hera_pipelines.local.nodes import NodePhase
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import seconds

_POLICY_PHASE = {"OnFailure": NodePhase.FAILED, "OnError": NodePhase.ERROR}
_POLICIES = ("Always", *_POLICY_PHASE)


class Observation(NamedTuple):
    """The last attempt, and how it came to it. Times are seconds."""

    attempts: int
    phase: NodePhase
    message: str
    exit_code: str | None
    duration: float
    """How long the last attempt took."""
    elapsed: float
    """Since the first attempt began, until the last one ended."""
    stopped: str = ""
    """Why nothing may start any more; empty if all is well."""
    waited: bool = False
    """The back-off after this attempt is over."""


class Wait(NamedTuple):
    """Wait, then ask again."""

    seconds: float
    message: str


class Again(NamedTuple):
    """Start the next attempt; it must be over ``seconds`` from now, if not None."""

    seconds: float | None = None


class GiveUp(NamedTuple):
    """The node ends like its last attempt."""

    message: str


@dataclass(frozen=True)
class RetryStrategy:
    """A retryStrategy, checked."""

    limit: int | None
    policy: str
    expression: str
    backoff: Manifest | None

    @classmethod
    def read(cls, manifest: Manifest) -> "RetryStrategy":
        """Read the manifest's form.

        Raises:
            UsageError: a part of it is not valid, or not supported here.
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

    def after(self, seen: Observation) -> Wait | Again | GiveUp:
        """What follows an attempt that Failed or came to an Error."""
        if seen.stopped:
            return GiveUp(seen.stopped)
        remaining = self._remaining(seen.elapsed)
        if remaining is not None and remaining < 0:
            return GiveUp("Max duration limit exceeded")
        if self.backoff and not seen.waited:
            wait = self.wait_seconds(seen.attempts)
            if remaining is not None and wait > remaining:
                return GiveUp("Backoff would exceed max duration limit")
            if self.limit is not None and seen.attempts <= self.limit:
                return Wait(wait, f"Backoff for {wait:g} seconds")
        return self._judge(seen, remaining)

    def wait_seconds(self, attempts: int) -> float:
        """Back-off after that many attempts: duration × factor^(attempts-1), at most cap."""
        backoff = self.backoff or {}
        base = seconds(str(backoff.get("duration", "0")))
        factor = int(backoff.get("factor") or 0)
        wait = base * factor ** min(attempts - 1, 64) if factor > 0 else base
        return min(wait, seconds(str(backoff["cap"]))) if backoff.get("cap") else wait

    def _remaining(self, elapsed: float) -> float | None:
        longest = (self.backoff or {}).get("maxDuration")
        return seconds(str(longest)) - elapsed if longest else None

    def _judge(self, seen: Observation, remaining: float | None) -> Again | GiveUp:
        if not (self.policy == "Always" or _POLICY_PHASE[self.policy] is seen.phase):
            return GiveUp(seen.message)
        if self.limit is not None and seen.attempts > self.limit:
            return GiveUp("No more retries left")
        if self.expression and not truth_of(self.expression, _environment(seen)):
            return GiveUp("retryStrategy.expression evaluated to false")
        return Again(remaining)


def _environment(seen: Observation) -> dict[str, object]:
    last = {
        "exitCode": "-1" if seen.exit_code is None else seen.exit_code,
        "status": str(seen.phase),
        "duration": f"{seen.duration:g}",
        "message": seen.message,
    }
    return {"retries": str(seen.attempts - 1), "lastRetry": last}


def attempt_variables(attempt: int, last: Observation | None) -> dict[str, str | None]:
    """``retries`` and ``lastRetry.*`` as the next attempt's template sees them."""
    return {
        "retries": str(attempt),
        "lastRetry.exitCode": (last.exit_code if last else None) or "0",
        "lastRetry.status": str(last.phase) if last else "",
        "lastRetry.duration": f"{last.duration:g}" if last else "0",
        "lastRetry.message": last.message if last else "",
    }
