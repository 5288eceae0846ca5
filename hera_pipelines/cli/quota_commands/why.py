"""``tiphys why``: why a step does not have its GPUs, with every reason that there is, and what it failed of.

How attempts of a step have failed, what that was judged by, and what the next one was given for it.
"""

from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import API_VERSION
from tiphys_plugin.quota.lease import Admission, Admitted, Because, Deferred, Lease, Rejected, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, in_line
from tiphys_plugin.quota.preemption.victims import Nobody, Victims
from tiphys_plugin.quota.queues import ANY_TYPE, QueueRules, in_words
from tiphys_plugin.quota.scheduler.decide import State, decide

from hera_pipelines.cli.quota_commands.nodes import on_nodes_of_today, slow_gangs, told_of
from hera_pipelines.cli.quota_commands.preemption_preview import document, leaves, losses, rehearsed, told
from hera_pipelines.cli.quota_commands.queues import NameOption, existing_ledger, understood
from hera_pipelines.cli.screen import Format, Screen, local_time
from hera_pipelines.cli.shared_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from tiphys.errors import NotFoundError
from tiphys.records import AttemptEnd, Outcome, utc_now
from tiphys.store import Attempt, all_attempts, open_store
from tiphys.store.open import PLACEHOLDER


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


EXAMPLES = """\b
Examples:
  tiphys why digits-7xk2p -n tiphys
  tiphys why digits-7xk2p/fit -n tiphys
  tiphys why digits-7xk2p/fit -n tiphys --store 's3://ml/{namespace}/tiphys'
  tiphys why digits-7xk2p -n tiphys -o json | jq -r '.waiting[].reasons[].reason'
"""
_UNKNOWN = "when it starts cannot be said: what it waits for has no deadline, or others are before it"


def why(
    command: typer.Context,
    what: Annotated[str, typer.Argument(metavar="RUN[/STEP]", help="Name of the run, or of one step of it.")],
    name: NameOption = "default",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the answer.")] = Format.TABLE,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            envvar="TIPHYS_STORE",
            help="Where runs are kept, {namespace} in it for those of each; then what trainings would lose is counted "
            "from their last checkpoint, and how the run's own have failed is told.",
        ),
    ] = None,
) -> None:
    """Say why steps of a run wait for GPUs: every reason, who is ahead, and when it can be expected to end.

    It also says which trainings would be asked to save and go for them, or why
    nobody is. It decides anew on what the ledger holds now, as the service
    would, and changes nothing. The namespace is the one that Tiphys is installed
    in.
    """
    screen: Screen = command.obj
    run, _, step = what.partition("/")
    api = connect(kubeconfig, context, namespace)
    command.call_on_close(api.close)
    rules, book = understood(existing_ledger(api, name))
    rules = on_nodes_of_today(api, rules, screen)
    holding = [one for one in book.leases if one.request.run == run and _is_meant(step, one.request.step)]
    waiting = [one for one in book.waiting if one.request.run == run and _is_meant(step, one.request.step)]
    namespaces = [one.request.namespace for one in holding] + [one.request.namespace for one in waiting]
    failed = failures(store, run, step, next(iter(namespaces), ""))
    if not holding and not waiting and not failed:
        more = "" if store else "; with --store URL it is told how its steps have failed"
        raise NotFoundError(
            f"{what} neither holds GPUs nor waits for any in GPULedger {api.namespace}/{name}; "
            f"`tiphys get {run}` shows how its steps are{more}"
        )
    now = utc_now()
    lost = losses(store, now)
    answers = [_Answer(one, _decided(rules, book, one, now), rehearsed(rules, book, one, lost, now)) for one in waiting]
    if output is not Format.TABLE:
        screen.document(_document(what, holding, answers, failed), output)
        return
    for line in chain.from_iterable(map(failure_lines, failed)):
        screen.show(line)
    slow = slow_gangs(store, holding, now)
    for lease in holding:
        screen.show(_holds(lease))
        for line in told_of(lease, slow):
            screen.show(line)
    for answer in answers:
        for line in _waits(answer, now):
            screen.show(line)
        if isinstance(answer.admission, Deferred):
            for line in told(answer.goes, exactly=store is not None):
                screen.show(line)


class _Answer(NamedTuple):
    """What the service would say to one that waits, and who would be asked to leave for it."""

    waiting: Waiting
    admission: Admission
    goes: Victims | Nobody


def _is_meant(asked: str, step: str) -> bool:
    """A fanned-out step stands for all of its items."""
    return asked in ("", step, step.partition(".")[0])


def _decided(rules: QueueRules, book: Book, one: Waiting, now: datetime) -> Admission:
    others = tuple(other for other in in_line(book.waiting, now, FORGET_AFTER) if other is not one)
    return decide(State(rules, book.leases, others, book.history), one.request, one.arrival, now)


def _holds(lease: Lease) -> Text:
    request = lease.request
    gpus = in_words(request.gpus, request.gpu_type if lease.pool == ANY_TYPE else lease.pool)
    return Text(
        f"{request.run}/{request.step} holds {gpus} of queue {request.queue} since {local_time(lease.granted_at)}"
        f"{leaves(lease)}"
    )


def _waits(given: _Answer, now: datetime) -> Iterator[Text]:
    one, answer = given.waiting, given.admission
    request = one.request
    gpus = in_words(request.gpus, request.gpu_type)
    waited = str(now - one.since).split(".")[0]
    yield Text(f"{request.run}/{request.step} has waited {waited} for {gpus} of queue {request.queue}", style="bold")
    match answer:
        case Admitted():
            yield Text("  nothing stands in its way now; it is told when it asks again, within seconds")
        case Rejected():
            yield Text(f"  {answer.reason}: {answer.message}; it is told when it asks again, within seconds")
        case Deferred():
            for because in answer.because:
                yield Text(f"  {because.reason}: {because.message}")
            expected = f"expected to start by {local_time(answer.start)}" if answer.start else _UNKNOWN
            yield Text(f"  position {answer.position}; {expected}")


def _document(what: str, holding: list[Lease], answers: list[_Answer], failed: list[Failure]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "GpuReasons",
        "name": what,
        "holding": [
            {"step": one.request.step, "gpus": one.request.gpus, "since": one.granted_at.isoformat()} for one in holding
        ],
        "waiting": [_waiting(answer) for answer in answers],
        "failures": [as_document(failure) for failure in failed],
    }


def _waiting(given: _Answer) -> dict[str, Any]:
    one, answer = given.waiting, given.admission
    deferred = answer if isinstance(answer, Deferred) else None
    because = deferred.because if deferred else ()
    if isinstance(answer, Rejected):
        because = (Because(answer.reason, answer.message),)
    return {
        "step": one.request.step,
        "gpus": one.request.gpus,
        "queue": one.request.queue,
        "since": one.since.isoformat(),
        "position": deferred.position if deferred else None,
        "expectedStart": deferred.start.isoformat() if deferred and deferred.start else None,
        "reasons": [{"reason": str(each.reason), "message": each.message} for each in because],
        **({"preemption": document(given.goes)} if deferred else {}),
    }
