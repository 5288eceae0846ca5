"""admit: may this step run now, and from where?

The order of the questions is the order of their cost, and of their finality:
what was answered before, what is finished already, who still runs, which GPUs
are free, which checkpoint to start from. The attempt is claimed last, and the
claim is the recorded answer.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tiphys.errors import ConflictError, FencedError, IntegrityError, NotFoundError, UsageError
from tiphys.faults import failpoint
from tiphys.lineage.select import BEGINNING, Choice
from tiphys.protocol.execute_api import ExecuteReply, failed, pending
from tiphys.protocol.operations import Admit, attempt_of, retry_of
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import AttemptClaim, Cause, Outcome, SubmissionClaim
from tiphys.store import Attempt, Claim, find_record, lineage_of, step_attempts
from tiphys.store import claim as claim_record
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.attempts.liveness import is_stopping
from tiphys_plugin.operations import end_attempt as ending
from tiphys_plugin.operations import lease_reclaim as lapses
from tiphys_plugin.operations import pod_patch as destination
from tiphys_plugin.operations import pod_patch as escalation
from tiphys_plugin.operations import replies as answers
from tiphys_plugin.operations import reuse as adoption
from tiphys_plugin.operations import start_checkpoint as beginnings
from tiphys_plugin.operations.settle import decision
from tiphys_plugin.operations.step_key import StepKey, step_key
from tiphys_plugin.quota.lease import Admission, Admitted, Deferred, LeaseRequest, Rejected, asked_for
from tiphys_plugin.runtime.context import StepCall
from tiphys_plugin.runtime.settings import requeue_seconds


def admit(call: StepCall, operation: Admit, template: dict[str, Any]) -> ExecuteReply:
    """Answer one admit node.

    Raises:
        FencedError: a newer submission of the run has taken over.
        ConflictError: an earlier attempt runs where this plugin cannot look.
    """
    if call.spec.gang is not None:
        call = replace(call, input_keys=gangs.input_keys(call.store, template))
    if (reply := _open_first(call, operation, template)) is not None:
        return reply
    attempts = step_attempts(call.store, call.run, call.step)
    for attempt in attempts:
        if (attempt.claim.uid, attempt.claim.node) == (call.binding.uid, call.node):
            return _replay(call, attempt)
    if (record := adoption.adopted(call)) is not None:
        return answers.skip(_capital(adoption.describe(call, record)))
    key = step_key(call.store, call.spec, operation, template)
    found = adoption.find(call, key.key, attempts)
    if found.end is not None:
        return answers.skip(_capital(adoption.describe(call, adoption.adopt(call, key.key, found.end))))
    _check_newest(call)
    if (refusal := _given_up(call, attempts)) is not None:
        return refusal
    if attempts and attempts[-1].end is None:
        if (waiting := _end_previous(call, attempts[-1].claim)) is not None:
            return waiting
        attempts = step_attempts(call.store, call.run, call.step)
    return _open(call, key, attempts, found.damage)


def _open_first(call: StepCall, operation: Admit, template: dict[str, Any]) -> ExecuteReply | None:
    """Open attempt 1 of a step that nobody has asked about; None if somebody has, or if more has to be asked.

    A claim of attempt 1 that is won says that there was none before, and so
    nothing to repeat, to adopt or to end: one write in the place of the reads
    that would find nothing.
    """
    spec = call.spec
    if call.binding.submission > 1 or retry_of(call.node) or spec.gpu is not None or spec.share or call.family:
        return None
    key = step_key(call.store, spec, operation, template)
    _check_newest(call)
    claim = _claim(call, key, (), None, beginnings.choose(call, ()))
    return answers.go(call, claim.record) if claim.won else None


def _replay(call: StepCall, attempt: Attempt) -> ExecuteReply:
    """The recorded answer, unless the attempt it opened is over.

    Argo asks again with the same node after ``argo retry``, and after a restart
    of its agent. An attempt that has ended must not run a second time: it holds
    no GPUs, and its outputs are judged.
    """
    if attempt.end is None:
        return answers.go(call, attempt.claim)
    number = attempt.claim.attempt
    if attempt.end.outcome is Outcome.DONE:
        return answers.skip(f"Attempt {number} is finished")
    if attempt_of(call.node) is None:
        return failed(
            f"Attempt {number} has ended ({attempt.end.message}) and cannot run again; `tiphys resume {call.run}` "
            "opens a new one"
        )
    if attempt.end.outcome is Outcome.FENCED:
        return answers.skip(f"Attempt {number} was fenced: {attempt.end.message}")
    return failed(f"Attempt {number} has ended ({attempt.end.message}); the next try opens a new one")


def _given_up(call: StepCall, attempts: Sequence[Attempt]) -> ExecuteReply | None:
    """A reply that opens nothing, where this workflow stopped trying; None where it may go on.

    ``argo retry`` makes a try after the last one of a step, and Argo never runs
    its program: an attempt would hold its GPUs for as long as the workflow stands.
    """
    mine = [attempt.end for attempt in attempts if attempt.claim.uid == call.binding.uid]
    last = mine[-1] if mine else None
    if last is None or last.outcome is not Outcome.FAILED or decision(call, attempts, last).again:
        return None
    return answers.skip(
        f"Attempt {last.attempt} was the last of this workflow ({last.message}); `tiphys resume {call.run}` "
        "opens a new one"
    )


def _check_newest(call: StepCall) -> None:
    """Raise `FencedError` if a later submission was claimed. All steps of a workflow ask the same."""
    newer = call.binding.submission + 1
    key = call.layout.submission(newer)
    services = call.services
    taken_over = services.together.ask(
        key, lambda: find_record(call.store, key, SubmissionClaim) is not None, services.settings.lock_seconds
    )
    if taken_over:
        raise FencedError(
            f"submission {newer} has taken over run {call.run}; workflow {call.binding.workflow} may open no more "
            "attempts and can be stopped"
        )


def _end_previous(call: StepCall, previous: AttemptClaim) -> ExecuteReply | None:
    """End the attempt before this one, once its pods are gone; a reply that waits until then."""
    found = pods.of_claim(call.store, call.services.cluster, previous)
    waiting = ending.await_pods(call, previous, found)
    if waiting is None:
        seen = ending.observed(call, previous, found)
        ending.end_failed(call, previous, seen, "nobody saw how it ended, and another attempt was asked for")
    return waiting


def _open(call: StepCall, key: StepKey, attempts: Sequence[Attempt], damage: str) -> ExecuteReply:
    """Get the GPUs, choose the checkpoint, claim the attempt."""
    number = _next(attempts)
    admission = _request_gpus(call, number, attempts)
    match admission:
        case Deferred():
            wait = requeue_seconds(call.services.settings, call.node, admission.position)
            return pending(f"Deferred: {admission.reason}: {admission.message}", wait)
        case Rejected():
            return _refuse(call, key, attempts, f"{admission.reason}: {admission.message}")
    failpoint("admit.after_lease")
    with _released_on_refusal(call, number, admission):
        claim = _claim(call, key, attempts, admission, beginnings.choose(call, attempts)).record
    if not _is_ours(call, claim):
        return _lost(call, claim, admission)
    return answers.go(call, claim, _capital(damage))


def _is_ours(call: StepCall, claim: AttemptClaim) -> bool:
    return (claim.uid, claim.node) == (call.binding.uid, call.node)


def _lost(call: StepCall, winner: AttemptClaim, admission: Admission | None) -> ExecuteReply:
    """Somebody else opened the attempt in the meantime."""
    _give_back(call, winner.attempt, admission)
    return pending(f"Attempt {winner.attempt} was just opened by {winner.node}; looking again", 1)


def _request_gpus(call: StepCall, number: int, attempts: Sequence[Attempt]) -> Admission | None:
    """None for a step without GPUs."""
    gpu = call.spec.gpu
    if gpu is None:
        return None
    services, binding = call.services, call.binding
    if is_stopping(services.cluster, binding):
        services.ledger.withdraw(binding.uid)
        raise FencedError(f"workflow {binding.workflow} is stopping, so {call.step} gets no GPUs")
    request = _lease_request(call, gpu, number, attempts)
    answer = _ask_ledger(call, request)
    if isinstance(answer, Deferred) and lapses.sweep(services):
        answer = _ask_ledger(call, request)
    if isinstance(answer, Admitted):
        services.metrics.gpu_wait_seconds.observe(answer.waited_seconds)
    return answer


def _ask_ledger(call: StepCall, request: LeaseRequest) -> Admission:
    metrics = call.services.metrics
    with metrics.gpu_decision_seconds.time():
        answer = call.services.ledger.request(request)
    metrics.gpu_requests.labels(answer="Admitted" if isinstance(answer, Admitted) else answer.reason.value).inc()
    return answer


def _lease_request(call: StepCall, gpu: GpuRequest, number: int, attempts: Sequence[Attempt]) -> LeaseRequest:
    binding = call.binding
    avoids_spot = gpu.spot != "no" and escalation.leaves_spot(call, attempts)
    return LeaseRequest(
        uid=binding.uid,
        step=call.step,
        node=call.node,
        namespace=binding.namespace,
        workflow=binding.workflow,
        instance=call.instance,
        run=call.run,
        attempt=number,
        attained=sum(_gpus_of(gpu, one.claim) * _held_seconds(one) for one in attempts),
        first_start=min((one.claim.written_at.timestamp() for one in attempts if one.claim.lease), default=None),
        **{**asked_for(gpu), **({"spot": "avoided"} if avoids_spot else {})},
    )


def _gpus_of(gpu: GpuRequest, claim: AttemptClaim) -> int:
    return gpu.gpus // gpu.members * (claim.members or gpu.members)


def _held_seconds(attempt: Attempt) -> float:
    """How long an attempt that is over has had its GPUs; none where it had none, or its end is not known."""
    if attempt.end is None or not attempt.claim.lease:
        return 0.0
    return max(0.0, (attempt.end.written_at - attempt.claim.written_at).total_seconds())


def _refuse(call: StepCall, key: StepKey, attempts: Sequence[Attempt], why: str) -> ExecuteReply:
    """Record an attempt that may never run. A Failed answer would have Argo try it again for ever."""
    claim = _claim(call, key, attempts, None, BEGINNING).record
    if not _is_ours(call, claim):
        return _lost(call, claim, None)
    if claim.lease:  # another service, with another queue file, has admitted this very call
        return answers.go(call, claim)
    ending.end(call, claim, Outcome.FAILED, cause=Cause.USER_ERROR, message=why)
    return answers.skip(f"Rejected: {why}")


def _next(attempts: Sequence[Attempt]) -> int:
    return attempts[-1].claim.attempt + 1 if attempts else 1


def _claim(
    call: StepCall, key: StepKey, attempts: Sequence[Attempt], admission: Admission | None, choice: Choice
) -> Claim[AttemptClaim]:
    """Claim the attempt after ``attempts``; what its key holds afterwards, ours or another caller's."""
    lease = admission if isinstance(admission, Admitted) else None
    number, escalated = _next(attempts), escalation.escalated(call, attempts, key.key)
    wanted = AttemptClaim(
        run=call.run,
        step=call.step,
        attempt=number,
        submission=call.binding.submission,
        uid=call.binding.uid,
        node=call.node,
        instance=call.instance,
        step_key=key.key,
        parameters=key.parameters,
        dataset=key.dataset,
        lineage=lineage_of(call.run, call.step) if call.spec.checkpoints is not None else "",
        starts_from=choice.checkpoint,
        skipped=choice.skipped,
        pod_patch=escalation.with_escalation(destination.pod_patch(call, lease), call, escalated),
        escalation=escalated,
        lease=lease.lease if lease else "",
        nodes=lease.nodes if lease else (),
        flavor=lease.flavor.name if lease and lease.flavor else "",
        members=lease.members if lease else None,
    )
    failpoint("admit.before_claim")
    held = claim_record(call.store, call.layout.attempt(call.step, number), wanted)
    failpoint("admit.after_claim")
    return held


@contextlib.contextmanager
def _released_on_refusal(call: StepCall, number: int, admission: Admission | None) -> Iterator[None]:
    """An attempt that is refused for good keeps no GPUs. One that storage failed asks again, and finds its own."""
    try:
        yield
    except (UsageError, NotFoundError, ConflictError, IntegrityError):
        _give_back(call, number, admission)
        raise


def _give_back(call: StepCall, number: int, admission: Admission | None) -> None:
    """Release GPUs that were got for attempt ``number``, unless it runs on them: another node may have opened it."""
    if not isinstance(admission, Admitted):
        return
    opened = find_record(call.store, call.layout.attempt(call.step, number), AttemptClaim)
    if opened is None or opened.lease != admission.lease:
        call.services.ledger.release(admission.lease)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
