"""finalize: the workflow's onExit handler, which seals the submission and releases its GPUs.

``argo terminate``, deletion and crashes skip it, so nothing is lost without it:
the next sweep finds a lease that finalize did not release, and the admit of the
next submission an end that it did not record.

It also records the ends of steps that have no conclude: of the last step, and of
those that failed or that a stop separated from the step that would have recorded
them. It waits for the pods of a stopped workflow, so that the checkpoint that a
program saves in its grace period counts, and its GPUs come back with the last pod.

The sealed record says in one line why the workflow failed. Argo lists all failed
nodes in no order, and most only say that a child has failed. People read the
line, and the controller reads from it whether the end was requested, so the
summary puts the deciding messages first, where the length limit keeps them.
"""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import structlog

from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import WAKE_TEMPLATE, FinalizeOperation, format_submission_end
from tiphys.protocol.step_spec import StepKind
from tiphys.records import AttemptClaim, SubmissionEnd, task_name
from tiphys.store import Attempt, DamagedRecord, claim_record, read_open_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import is_stop_requested
from tiphys_plugin.attempts.run_binding import RunBinding
from tiphys_plugin.operations import conclude, end_attempt, lease_reclaim, run_report
from tiphys_plugin.operations.replies import REFUSED_ERRORS
from tiphys_plugin.runtime.context import PluginContext

_log = structlog.get_logger()
_MAX_MESSAGE_CHARACTERS = 1000
_STEP_PARTS = ("admit", "run", "settle", "attempts", "conclude")
"""Names of the parts of every step; the names of their templates include the step."""
_VERDICT = re.compile(r"\S+ failed in attempt \d+ by ")
"""Begin of the verdict on a step, which the admit of the next step also repeats."""
_CHILD_FAILED = re.compile(r"child '[^']*' failed")


def summarize_failures(failures: str, verdicts: Mapping[str, str] | None = None) -> str:
    """Summarize Argo's ``workflow.failures`` in one line. It is JSON, encoded twice, and ``"null"`` without failures.

    Shutdowns come first, each step once, then verdicts on steps, then all other nodes.
    A step's verdict includes the failure of its program, so the program's node is left out.
    ``verdicts`` are those of this call, by step.
    """
    nodes = _parse_failed_nodes(failures)
    nodes += [_FailedNode("conclude", f"{step}-conclude", message, "") for step, message in (verdicts or {}).items()]
    causes = [node for node in nodes if not node.repeats_child_failure] or nodes
    judged_templates = {f"{node.step}-run" for node in causes if node.is_verdict}
    reported = [node for node in causes if node.template not in judged_templates or node.is_shutdown]
    if any(node.is_shutdown and not node.is_workflow for node in reported):
        reported = [node for node in reported if not node.is_shutdown or not node.is_workflow]
    reported.sort(key=lambda node: (not node.is_shutdown, not node.is_verdict, node.text))
    return "; ".join(dict.fromkeys(node.text for node in reported))[:_MAX_MESSAGE_CHARACTERS]


class _FailedNode(NamedTuple):
    name: str
    template: str
    message: str
    pod: str
    phase: str = "Failed"

    @property
    def repeats_child_failure(self) -> bool:
        """Whether the node is a parent that only repeats a child's failure."""
        is_timer = self.template == WAKE_TEMPLATE
        return is_timer or not self.message or bool(_CHILD_FAILED.fullmatch(self.message))  # a DAG gets no message

    @property
    def is_workflow(self) -> bool:
        """Whether the node is that of the Workflow itself, whose podName is its name."""
        return self.name == self.pod

    @property
    def step(self) -> str:
        return self.template.rpartition("-")[0]

    @property
    def is_shutdown(self) -> bool:
        return is_shutdown_message(self.message)

    @property
    def is_program(self) -> bool:
        """Whether the node is that of a step's program with all its tries."""
        return self.name == "run"

    @property
    def is_verdict(self) -> bool:
        is_conclusion = self.name == "conclude" or bool(_VERDICT.match(self.message))
        return is_conclusion and not self.is_shutdown

    @property
    def text(self) -> str:
        if self.is_verdict:
            return self.message or f"{self.step}: failed"
        is_step_part = self.name.partition("(")[0] in _STEP_PARTS
        if is_step_part and self.is_shutdown:
            return f"{self.step}: {self.message}"
        return f"{self.template if is_step_part else self.name}: {self.message or 'failed'}"


def _parse_failed_nodes(failures: str) -> list[_FailedNode]:
    document: object = failures
    for _ in range(2):
        try:
            document = json.loads(document) if isinstance(document, str) else document
        except ValueError:
            break
    if not isinstance(document, list):
        return []
    keys = ("displayName", "templateName", "message", "podName", "phase")
    return [_FailedNode(*(str(node.get(key) or "") for key in keys)) for node in document if isinstance(node, dict)]


def finalize(context: PluginContext, binding: RunBinding, operation: FinalizeOperation) -> ExecuteReply:
    """Answer the finalize node; a repeated call gets the record that was sealed first."""
    open_claims = _read_open_attempts(context, binding)
    replies = _record_ends(context, binding, operation, open_claims)
    if waiting := next((reply for reply in replies.values() if reply.phase == "Pending"), None):
        return waiting
    verdicts = {step: reply.message for step, reply in replies.items() if reply.phase == "Failed"}
    # A failure that Argo has seen is the author's to tolerate.
    is_refuted = operation.status == "Succeeded" and operation.after in verdicts
    message = summarize_failures(operation.failures, verdicts)
    status = "Failed" if is_refuted else operation.status
    end = SubmissionEnd(run=binding.run, submission=binding.submission, status=status, message=message)
    sealed, is_ours = claim_record(context.store, binding.layout.submission_end(binding.submission), end)
    failpoint("finalize.after_seal")
    if is_ours:
        context.metrics.count_submission_end(sealed.status)
    context.ledger.release_workflow(binding.uid)
    lease_reclaim.reclaim_leases(context)
    why = "" if sealed.status == "Succeeded" else sealed.message  # tries that failed before one succeeded
    ended = format_submission_end(binding.run, binding.submission, sealed.status, why)
    report = run_report.store_report(context.store, binding, sealed)
    return failed_reply(ended, report) if is_refuted else succeeded_reply(ended, report)


def _record_ends(
    context: PluginContext, binding: RunBinding, operation: FinalizeOperation, open_claims: Mapping[str, AttemptClaim]
) -> dict[str, ExecuteReply]:
    """Record the ends of steps without a conclude, and return what is to be said of each step.

    Argo's failures name the steps whose programs failed. A repeated call finds their ends recorded, and returns the
    same verdicts. A refusal is a verdict, too, because the submission ends in any case.
    """
    failed = {node.step: node for node in _parse_failed_nodes(operation.failures) if node.is_program}
    last = operation.after if operation.status == "Succeeded" else ""
    is_stopped = is_stop_requested(context.cluster, binding.namespace, binding.workflow, binding.uid)
    replies: dict[str, ExecuteReply] = {}
    for step in dict.fromkeys(filter(None, [last, *open_claims, *failed])):
        try:
            if step == last:
                reply = conclude.record_previous_end(context, binding, step)
            else:
                reply = _record_end(context, binding, step, open_claims.get(step), failed.get(step))
                if reply is None and is_stopped and (claim := open_claims.get(step)) is not None:
                    call = end_attempt.attempt_call(context, binding, claim)
                    reply = conclude.conclude_attempt(call, Attempt(claim, None), "Failed", "")
        except REFUSED_ERRORS as error:
            reply = failed_reply(f"{step}: its end cannot be recorded: {error}")
        if reply is not None:
            replies[step] = reply
    return replies


def _record_end(
    context: PluginContext, binding: RunBinding, step: str, open_claim: AttemptClaim | None, node: _FailedNode | None
) -> ExecuteReply | None:
    """The verdict on ``step``, whose program failed as ``node`` says; None if a resume has to see to it."""
    spec = binding.pipeline.steps.get(task_name(step))
    if spec is None or spec.kind is not StepKind.STEP or spec.fan_out or (node is not None and node.is_shutdown):
        return None
    attempt = Attempt(open_claim, None) if open_claim else conclude.find_own_attempt(context, binding, step)
    if attempt is None:
        return None
    call = end_attempt.attempt_call(context, binding, attempt.claim)
    if node is not None:
        exit_code = end_attempt.find_argo_exit_code(call, attempt.claim)
        return conclude.conclude_attempt(call, attempt, node.phase, exit_code)
    pod_statuses = pods.list_attempt_pods(context.store, context.cluster, attempt.claim)
    if spec.has_result or not end_attempt.is_program_done(call, attempt.claim, pod_statuses):
        return None  # only a conclude knows what the program has printed
    return conclude.conclude_attempt(call, attempt, "Succeeded", "0")


def _read_open_attempts(context: PluginContext, binding: RunBinding) -> dict[str, AttemptClaim]:
    """Claims of the open attempts of the workflow by step; those that cannot be read are logged."""
    damaged: list[DamagedRecord] = []
    claims = read_open_attempts(context.store, binding.run, damaged)
    for record in damaged:
        _log.warning("attempt.unreadable", key=record.key, error=record.message)
    return {claim.step: claim for claim in claims if claim.uid == binding.uid}
