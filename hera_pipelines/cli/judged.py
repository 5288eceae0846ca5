"""How attempts of a step have failed, what that was judged by, and what the next one was given for it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.text import Text

from tiphys.records import AttemptEnd, Outcome
from tiphys.store import Attempt, all_attempts, open_store
from tiphys.store.tenants import PLACEHOLDER


class Failure(NamedTuple):
    """The newest failed end of a step; ``given`` is what the attempt after it has because of failures, if anything."""

    end: AttemptEnd
    given: str


def failures(url: str | None, run: str, step: str, namespace: str) -> list[Failure]:
    """The newest failure of each step of ``run`` that ``step`` stands for; none where the store is not known."""
    if url is None or (PLACEHOLDER in url and not namespace):
        return []
    store = open_store(url.replace(PLACEHOLDER, namespace), must_exist=True)
    found = sorted(all_attempts(store, run).items())
    newest = [_newest(attempts) for name, attempts in found if step in ("", name, name.partition(".")[0])]
    return [failure for failure in newest if failure is not None]


def _newest(attempts: list[Attempt]) -> Failure | None:
    last = max((one.end.attempt for one in attempts if one.end and one.end.outcome is Outcome.FAILED), default=None)
    if last is None or any(one.end and one.end.outcome is Outcome.DONE for one in attempts[-1:]):
        return None
    end = next(one.end for one in attempts if one.end and one.end.attempt == last)
    given = [one.claim.escalation.words for one in attempts if one.claim.attempt == last + 1 and one.claim.escalation]
    return Failure(end, "".join(given))


def failure_lines(failure: Failure) -> Iterator[Text]:
    """For a person."""
    end, evidence = failure.end, failure.end.evidence
    cause = f" by {end.cause.words}" if end.cause else ""
    yield Text(f"{end.run}/{end.step} attempt {end.attempt} ended{cause}: {end.message}")
    if evidence is not None:
        found = f", which found: {evidence.words}" if evidence.words else ""
        on = f"; it ran on {evidence.node}" if evidence.node else ""
        yield Text(f"  judged by the rule {evidence.rule}{found}{on}")
    if failure.given:
        yield Text(f"  attempt {end.attempt + 1} has for that: {failure.given}")


def as_document(failure: Failure) -> dict[str, Any]:
    """For a program."""
    end = failure.end
    return {
        "step": end.step,
        "attempt": end.attempt,
        "cause": end.cause.value if end.cause else None,
        "message": end.message,
        "evidence": end.evidence.model_dump(mode="json") if end.evidence else None,
        "nextAttempt": failure.given,
    }
