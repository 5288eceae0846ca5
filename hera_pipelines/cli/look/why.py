"""``tiphys why``: explains why steps of a run wait for GPUs, and how their last attempts failed.

The command repeats the service's admission decision on the current ledger, and
previews preemption. With a store, it also shows the newest failure of each step:
its cause, the rule that classified it, and what the next attempt received.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text
from tiphys_controller.doctor import Obstacle, distinct_obstacles, observe_obstacles
from tiphys_plugin.quota.lease import (
    Admission,
    Admitted,
    DeferralReason,
    Deferred,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
    Rejected,
)
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection
from tiphys_plugin.quota.queue import ANY_TYPE
from tiphys_plugin.quota.queues import format_gpus
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import decide_pending, format_step_name

from hera_pipelines.cli.gpus.kueue import find_kueue
from hera_pipelines.cli.gpus.nodes import apply_cluster_nodes, describe_slow_ranks, observe_slow_gangs
from hera_pipelines.cli.gpus.preemption_preview import (
    build_loss_estimate,
    describe_eviction,
    describe_preemption,
    preemption_document,
    preview_preemption,
)
from hera_pipelines.cli.gpus.queues import (
    LedgerNameOption,
    describe_used_shares,
    existing_ledger,
    find_ledger,
    parse_ledger,
)
from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import (
    FormatOption,
    InstallationOptions,
    RunStepArgument,
    existing_default_store,
    named_store,
    with_option_groups,
)
from hera_pipelines.cli.target import is_on_cluster
from tiphys.errors import ForbiddenError, NotFoundError
from tiphys.kube import KubeApi
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import selects_step
from tiphys.records import AttemptEnd, AttemptEndOutcome, utc_now
from tiphys.store import Attempt, open_store
from tiphys.store.open import PLACEHOLDER


class NewestFailure(NamedTuple):
    """Newest failure of a step, and the resources that the next attempt received because of failures."""

    end: AttemptEnd
    escalation: str
    step_name: str
    """Name of the step or item for people."""


def _open_history(url: str | None, run: str, namespace: str = "") -> RunHistory | None:
    """The history of a run; None if its store is not known, or is that of a namespace that is not known."""
    if url is None or (PLACEHOLDER in url and not namespace):
        return None
    return RunHistory.for_display(open_store(url.replace(PLACEHOLDER, namespace), must_exist=True), run)


def find_newest_failures(history: RunHistory, step: str) -> list[NewestFailure]:
    """The newest failure of each step of a run that ``step`` selects, except where its last attempt is done."""
    if not history.attempt_numbers:
        return []
    names = history.names
    attempts = history.read_attempts(step=names.resolve(step) if step else "")
    newest = (_newest_failure(attempts[step_id], names.name(step_id)) for step_id in names.sort(attempts))
    return [failure for failure in newest if failure is not None]


def _newest_failure(attempts: Sequence[Attempt], step_name: str) -> NewestFailure | None:
    ends = [attempt.end for attempt in attempts if attempt.end]
    failed = [end for end in ends if end.outcome is AttemptEndOutcome.FAILED]
    last = attempts[-1].end
    if not failed or (last is not None and last.outcome is AttemptEndOutcome.DONE):
        return None
    newest = max(failed, key=lambda end: end.attempt)
    next_claims = [attempt.claim for attempt in attempts if attempt.claim.attempt == newest.attempt + 1]
    escalation = "".join(claim.escalation.explanation for claim in next_claims if claim.escalation)
    return NewestFailure(newest, escalation, step_name)


def describe_failure(failure: NewestFailure) -> Iterator[Text]:
    end, evidence = failure.end, failure.end.evidence
    cause = f" by {end.cause.display_name}" if end.cause else ""
    yield Text(f"{end.run}/{failure.step_name} attempt {end.attempt} ended{cause}: {end.message}")
    if evidence is not None:
        matched = f", which matched: {evidence.matched_text}" if evidence.matched_text else ""
        node = f"; it ran on {evidence.node}" if evidence.node else ""
        yield Text(f"  classified by the rule {evidence.rule}{matched}{node}")
    if failure.escalation:
        yield Text(f"  attempt {end.attempt + 1} therefore received: {failure.escalation}")


def failure_document(failure: NewestFailure) -> dict[str, Any]:
    """Describe a failure as JSON types."""
    end = failure.end
    return {
        "step": end.step,
        "attempt": end.attempt,
        "cause": end.cause.value if end.cause else None,
        "message": end.message,
        "evidence": end.evidence.model_dump(mode="json") if end.evidence else None,
        "nextAttempt": failure.escalation,
    }


EXAMPLES = """\b
Examples:
  tiphys why digits-7xk2p -n tiphys
  tiphys why digits-7xk2p/fit -n tiphys
  tiphys why digits-7xk2p/fit -n tiphys --store 's3://ml-runs/{namespace}/tiphys'
  tiphys why digits-7xk2p -n tiphys -o json | jq -r '.waiting[].reasons[].reason'
"""
_START_UNKNOWN = "no expected start: other requests are ahead, or the GPUs that it waits for have no deadline"


@with_option_groups
def why(
    command: typer.Context,
    what: RunStepArgument,
    *,
    name: LedgerNameOption = "default",
    installation: InstallationOptions,
    output: FormatOption = Format.TABLE,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Store of the runs, with {namespace} in place of a namespace's name; then lost work counts from the "
            "last checkpoint, and the newest failure of each step is shown. Default: the variable TIPHYS_STORE.",
        ),
    ] = None,
) -> None:
    """Explain why a run does not go on: what it waits for, or how its steps failed.

    Shows what keeps its pods from starting (image, node, Secret, quota of the namespace,
    …), with the remedy. Of GPUs it shows every reason, the requests that are ahead, and the expected start; also
    the training steps that would be preempted, or why none would be. The command
    repeats the service's decision on the current ledger and changes nothing. The
    namespace is the one that Tiphys is installed in. A run that has ended, or ran on
    this machine, needs no cluster: its store tells how its steps failed.
    """
    screen: Screen = command.obj
    run, _, step = what.partition("/")
    store = named_store(screen, store)
    if installation == InstallationOptions():
        known = _open_history(store or existing_default_store(), run)
        last = known.last_submission if known else None
        if known is not None and last is not None and (last.end is not None or not is_on_cluster(last)):
            _explain_from_storage(screen, known, step, output)
            return
    api = installation.connect(command)
    now = utc_now()
    ledger = find_ledger(api, name)
    if ledger is None and (obstacles := _find_obstacles(api, {run}, step, now)):  # its namespace may not be served
        _show(screen, what, output, [], obstacles)
        return
    if (kueue := find_kueue(api, ledger)) is not None:
        place, share_hints, ledger_state = "Kueue", "", kueue.ledger_state
    else:
        place = f"GPULedger {api.namespace}/{name}"
        ledger_state = apply_cluster_nodes(api, parse_ledger(existing_ledger(api, name)), screen.note)
        share_hints = "".join(f"; {note}" for note in describe_used_shares(ledger_state))
    leases = [lease for lease in ledger_state.leases if _is_of_step(lease.request, run, step)]
    waiting = [pending for pending in ledger_state.pending if _is_of_step(pending.request, run, step)]
    requests = [lease.request for lease in leases] + [pending.request for pending in waiting]
    history = _open_history(store, run, requests[0].namespace if requests else "")
    failures = find_newest_failures(history, step) if history else []
    obstacles = _find_obstacles(api, {run, *(request.workflow for request in requests)}, step, now)
    if not any((leases, waiting, failures, obstacles)):
        if history is not None and history.last_submission is not None and history.last_submission.end is not None:
            _explain_from_storage(screen, history, step, output)
            return
        store_hint = "" if store else "; with --store URL this command also shows how its steps failed"
        raise NotFoundError(
            f"{what} neither holds GPUs nor waits for any in {place}; "
            f"`tiphys get {run}` shows the state of its steps{store_hint}{share_hints}"
        )
    if kueue is not None:
        explanations = [_PendingExplanation(pending, kueue.explain(pending), None) for pending in waiting]
    else:
        lost, cache = build_loss_estimate(store, now), SchedulerCache()
        explanations = [
            _PendingExplanation(
                pending,
                decide_waiting_request(ledger_state, pending, now, cache),
                preview_preemption(ledger_state, pending, lost, now, cache),
            )
            for pending in waiting
        ]
    _show(screen, what, output, failures, obstacles, leases, explanations)
    if output is Format.TABLE:
        _show_gpus(screen, leases, explanations, store, now)


def _show_gpus(
    screen: Screen,
    leases: Sequence[Lease],
    explanations: Sequence["_PendingExplanation"],
    store: str | None,
    now: datetime,
) -> None:
    slow = observe_slow_gangs(store, leases, now)
    for lease in leases:
        for line in (_describe_holder(lease), *describe_slow_ranks(lease, slow)):
            screen.show(line)
    for explanation in explanations:
        _show_pending(screen, explanation, now, is_exact=store is not None)


def _find_obstacles(api: KubeApi, workflows: set[str], step: str, now: datetime) -> list[Obstacle]:
    """What keeps Workflows from going on, or the items of one of their steps; empty if it may not be read."""
    found: list[Obstacle] = []
    for namespace in (None, api.namespace):
        with suppress(ForbiddenError):
            found = observe_obstacles(api, namespace, now, workflows)
            break
    task = re.split(r"[.\[]", step, maxsplit=1)[0]
    return distinct_obstacles(obstacle for obstacle in found if obstacle.task in ("", task) or not task)


def _show(
    screen: Screen,
    what: str,
    output: Format,
    failures: list[NewestFailure],
    obstacles: Sequence[Obstacle] = (),
    leases: Sequence[Lease] = (),
    explanations: Sequence["_PendingExplanation"] = (),
) -> None:
    """Show everything as a document, or as text what does not concern GPUs."""
    if output is not Format.TABLE:
        screen.typed_document(
            "GpuReasons",
            output,
            name=what,
            holding=[
                {"step": lease.request.step, "gpus": lease.request.gpus, "since": lease.granted_at.isoformat()}
                for lease in leases
            ],
            waiting=[_pending_document(explanation) for explanation in explanations],
            failures=[failure_document(failure) for failure in failures],
            obstacles=[obstacle._asdict() for obstacle in obstacles],
        )
        return
    for line in chain.from_iterable(map(describe_failure, failures)):
        screen.show(line)
    for obstacle in obstacles:
        screen.show(Text(f"{obstacle}\n  {obstacle.remedy}"))


def _show_pending(screen: Screen, explanation: "_PendingExplanation", now: datetime, *, is_exact: bool) -> None:
    for line in _describe_pending(explanation, now):
        screen.show(line)
    if isinstance(explanation.admission, Deferred) and explanation.preemption is not None:
        for line in describe_preemption(explanation.preemption, is_exact=is_exact):
            screen.show(line)


def _explain_from_storage(screen: Screen, history: RunHistory, step: str, output: Format) -> None:
    """Show how the steps of a run failed that waits in no ledger, as it has ended or runs on this machine."""
    run, failures = history.run, find_newest_failures(history, step)
    what = f"{run}/{step}" if step else run
    _show(screen, what, output, failures)
    if failures or output is not Format.TABLE:
        return
    end = history.last_submission.end if history.last_submission else None
    waits = "waits for nothing" if end else "waits for no GPUs of a cluster"
    if step:
        screen.write(f"{what} {waits}{_describe_failed_attempts(history, step)}")
    elif end and end.status == "Succeeded":
        screen.write(f"run {run} succeeded: it {waits}{_describe_earlier_submissions(history)}")
    else:
        screen.write(f"run {run} {waits}, and none of its steps failed last; `tiphys get {run}` shows them")


def _describe_failed_attempts(history: RunHistory, step: str) -> str:
    attempts = chain.from_iterable(history.read_attempts(step=history.names.resolve(step)).values())
    failed = sum(attempt.end is not None and attempt.end.outcome is AttemptEndOutcome.FAILED for attempt in attempts)
    if not failed:
        return ", and did not fail"
    return f"; {failed} attempt{'s' if failed > 1 else ''} before the last failed, which `tiphys get` shows"


def _describe_earlier_submissions(history: RunHistory) -> str:
    *earlier, _ = history.submissions
    failed = sum(submission.end is None or submission.end.status != "Succeeded" for submission in earlier)
    if not failed:
        return ", and did not fail"
    which = f"{failed} submission{'s' if failed > 1 else ''} before the last"
    return f"; {which} did not succeed, which `tiphys get` shows"


class _PendingExplanation(NamedTuple):
    """The decision on a pending request, and the victims that the service would select; None if Kueue selects them."""

    pending: PendingRequest
    admission: Admission
    preemption: VictimSelection | NoVictims | None


def _is_of_step(request: LeaseRequest, run: str, step: str) -> bool:
    return request.run == run and (selects_step(step, request.step) or step == request.step_name)


def decide_waiting_request(
    state: LedgerState, pending: PendingRequest, now: datetime, cache: SchedulerCache
) -> Admission:
    """What the service would decide now on a pending request of the ledger."""
    return decide_pending(replace(state, pending=cache.select_active(state, now)), pending, now, cache)


def _describe_holder(lease: Lease) -> Text:
    request = lease.request
    gpus = format_gpus(request.gpus, request.type_text if lease.pool == ANY_TYPE else lease.pool)
    return Text(
        f"{format_step_name(request)} holds {gpus} of queue {request.queue} since "
        f"{format_local_time(lease.granted_at)}"
        f"{describe_eviction(lease)}"
    )


def _describe_pending(explanation: _PendingExplanation, now: datetime) -> Iterator[Text]:
    pending, admission = explanation.pending, explanation.admission
    request = pending.request
    gpus = format_gpus(request.gpus, request.type_text)
    waited = str(now - pending.since).split(".")[0]
    yield Text(f"{format_step_name(request)} has waited {waited} for {gpus} of queue {request.queue}", style="bold")
    for reason, sentence in list_reasons(admission):
        yield Text(f"  {reason}: {sentence}")
    if isinstance(admission, Deferred):
        start = admission.expected_start
        expected = f"expected to start by {format_local_time(start)}" if start else _START_UNKNOWN
        yield Text(f"  position {admission.position}; {expected}")


def list_reasons(admission: Admission | None) -> Iterator[tuple[str, str]]:
    """What a pending request would be answered now: each a name and a sentence; nothing where that is not known."""
    match admission:
        case Admitted():
            yield "Admitted", "the GPUs are free; the step gets them at its next request, within seconds"
        case Rejected():
            yield str(admission.reason), f"{admission.message}; the step fails at its next request, within seconds"
        case Deferred():
            for reason in admission.reasons or (admission,):
                yield str(reason.reason), reason.message


def _pending_document(explanation: _PendingExplanation) -> dict[str, Any]:
    pending, admission = explanation.pending, explanation.admission
    deferred = admission if isinstance(admission, Deferred) else None
    reasons = deferred.reasons if deferred else ()
    if isinstance(admission, Rejected):
        reasons = (DeferralReason(admission.reason, admission.message),)
    return {
        "step": pending.request.step,
        "gpus": pending.request.gpus,
        "queue": pending.request.queue,
        "since": pending.since.isoformat(),
        "position": deferred.position if deferred else None,
        "expectedStart": deferred.expected_start.isoformat() if deferred and deferred.expected_start else None,
        "reasons": [{"reason": str(deferral.reason), "message": deferral.message} for deferral in reasons],
        **({"preemption": preemption_document(explanation.preemption)} if deferred and explanation.preemption else {}),
    }
