"""finalize: the workflow's onExit handler, which seals the submission and releases its GPUs.

``argo terminate``, deletion and crashes skip it, so nothing is lost without it:
the next sweep finds a lease that finalize did not release, and the admit of the
next submission an end that it did not record.

It also records the steps without a gate that nobody has recorded, and the ends of
gated steps that a stop separated from their conclude. It waits for the pods of a
stopped workflow, so that the checkpoint that a program saves in its grace period
counts, and its GPUs come back with the last pod.

The sealed record says in one line why the workflow failed. Argo lists all failed
nodes in no order, and most only say that a child has failed. People read the
line, and the controller reads from it whether the end was requested, so the
summary puts the deciding messages first, where the length limit keeps them.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import structlog

from tiphys.faults import failpoint
from tiphys.protocol.auto_resume_policy import has_auto_resume
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import WAKE_TEMPLATE, FinalizeOperation, format_submission_end
from tiphys.protocol.step_spec import StepKind
from tiphys.protocol.workflow_nodes import without_try
from tiphys.recording import RecordedSteps, RunBinding
from tiphys.records import AttemptClaim, AttemptEndOutcome, SubmissionEnd, task_name
from tiphys.store import Attempt, DamagedRecord, end_submission, read_open_attempts
from tiphys_plugin.attempts import pods
from tiphys_plugin.attempts.liveness import is_stop_requested
from tiphys_plugin.operations import conclude, end_attempt, lease_reclaim, program_nodes, recording, run_report
from tiphys_plugin.operations.replies import REFUSED_ERRORS
from tiphys_plugin.runtime.context import PluginContext

_log = structlog.get_logger()
_PARTS = {"admit": "-admit", "run": "-run", "conclude": "-conclude"}
"""The parts of a gated step, each with what the name of its template has after that of the step."""
_CHILD_FAILED = re.compile(r"child '[^']*' failed")


def summarize_failures(
    failures: str, verdicts: Mapping[str, str] | None = None, trainings: Collection[str] = ()
) -> str:
    """Summarize Argo's ``workflow.failures`` in one line. It is JSON, encoded twice, and ``"null"`` without failures.

    Shutdowns come first, each step once, then verdicts on steps, then all other nodes.
    A step's verdict includes the failure of its program, so the program's node is left out.
    ``verdicts`` are those of this call, by the name of the step within the Workflow. A call about one of ``trainings``
    that ended in Error was followed by another try.
    """
    verdicts = verdicts or {}
    nodes = [node for node in _parse_failed_nodes(failures) if node.step or without_try(node.name) not in verdicts]
    nodes += [_FailedNode("conclude", f"{step}-conclude", message, "", "Failed") for step, message in verdicts.items()]
    causes = [node for node in nodes if not (node.says_nothing or node.is_repeated(trainings))] or nodes
    judged_templates = {f"{node.step}-run" for node in causes if node.is_verdict}
    reported = [node for node in causes if node.template not in judged_templates or node.is_shutdown]
    if any(node.is_shutdown and not node.is_workflow for node in reported):
        reported = [node for node in reported if not node.is_shutdown or not node.is_workflow]
    reported.sort(key=lambda node: (not node.is_shutdown, not node.is_verdict, node.text))
    return "; ".join(dict.fromkeys(node.text for node in reported))[: SubmissionEnd.MAX_MESSAGE_CHARACTERS]


class _FailedNode(NamedTuple):
    name: str
    template: str
    message: str
    pod: str
    phase: str

    @property
    def says_nothing(self) -> bool:
        """Whether the node is a timer, or a parent that only repeats a child's failure."""
        is_timer = self.template == WAKE_TEMPLATE
        return is_timer or not self.message or bool(_CHILD_FAILED.fullmatch(self.message))  # a DAG gets no message

    def is_repeated(self, trainings: Collection[str]) -> bool:
        """Whether the node is a call that another try of its training has followed."""
        is_call = self.name in ("admit", "conclude") and self.step in trainings
        return is_call and self.phase == "Error" and not self.is_shutdown

    @property
    def is_workflow(self) -> bool:
        """Whether the node is that of the Workflow itself, whose podName is its name."""
        return self.name == self.pod

    @property
    def step(self) -> str:
        """The gated step of which the node is a part; empty for any other node, such as a step without a gate."""
        ending = _PARTS.get(self.name.partition("(")[0])
        return self.template.removesuffix(ending) if ending and self.template.endswith(ending) else ""

    @property
    def is_shutdown(self) -> bool:
        return is_shutdown_message(self.message)

    @property
    def is_verdict(self) -> bool:
        return bool(self.step) and self.name == "conclude" and not self.is_shutdown

    @property
    def text(self) -> str:
        if self.is_verdict:
            return self.message or f"{self.step}: failed"
        if self.is_shutdown:
            return f"{self.step or without_try(self.name)}: {self.message}"
        return f"{self.template if self.step else self.name}: {self.message or 'failed'}"


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
    stopped = _end_stopped_attempts(context, binding)
    if isinstance(stopped, ExecuteReply):
        return stopped
    recorded = recording.record_workflow(context, binding)
    if isinstance(recorded, ExecuteReply):
        return recorded
    verdicts = {**stopped, **_format_verdicts(context, recorded)}
    # A failure that Argo has seen is the author's to tolerate.
    is_refuted = operation.status == "Succeeded" and bool(recorded.refuted)
    trainings = {name for name, spec in binding.pipeline.steps.items() if spec.kind is StepKind.TRAIN}
    message = summarize_failures(operation.failures, verdicts, trainings)
    status = "Failed" if is_refuted else operation.status
    end = SubmissionEnd(run=binding.run, submission=binding.submission, status=status, message=message)
    sealed, is_ours = end_submission(context.store, end, may_be_resumed=has_auto_resume(binding.pipeline.manifest))
    failpoint("finalize.after_seal")
    if is_ours:
        context.metrics.count_submission_end(sealed.status)
    context.ledger.release_workflow(binding.uid)
    lease_reclaim.reclaim_leases(context, binding.uid)
    why = "" if sealed.status == "Succeeded" else sealed.message  # tries that failed before one succeeded
    ended = format_submission_end(binding.run, binding.submission, sealed.status, why)
    report = run_report.store_report(context.store, binding, sealed)
    return failed_reply(ended, report) if is_refuted else succeeded_reply(ended, report)


def _format_verdicts(context: PluginContext, recorded: RecordedSteps) -> dict[str, str]:
    """What to say of each step without a gate that failed, by its name within the Workflow."""
    verdicts = {name: f"{name}: its end cannot be recorded: {fault}" for name, fault in recorded.faults.items()}
    for step, end in recorded.ends.items():
        if end.outcome is AttemptEndOutcome.FAILED:
            name = recording.instance_display_name(recorded.names[step])
            verdicts[recorded.names[step]] = recording.format_verdict(context, name, end)
    return verdicts


def _end_stopped_attempts(context: PluginContext, binding: RunBinding) -> dict[str, str] | ExecuteReply:
    """End the gated attempts that a stop left open, and return the verdicts on them; a Pending reply while pods live.

    A refusal is a verdict, too, because the submission ends in any case. Attempts that are open for another reason
    are left to a resume.
    """
    open_claims = _read_open_attempts(context, binding)
    if not open_claims or not is_stop_requested(context.cluster, binding.namespace, binding.workflow, binding.uid):
        return {}
    verdicts: dict[str, str] = {}
    waiting: ExecuteReply | None = None
    for step, claim in open_claims.items():
        spec = binding.pipeline.steps.get(task_name(step))
        if spec is None or not spec.is_gated:
            continue
        try:
            call = end_attempt.attempt_call(context, binding, claim)
            pod_statuses = pods.list_attempt_pods(context.store, context.cluster, claim)
            # Only a conclude knows what the program has printed.
            is_done = (
                spec.kind is StepKind.STEP
                and not spec.has_result
                and program_nodes.is_program_done(call, claim, pod_statuses)
            )
            status, code = ("Succeeded", "0") if is_done else ("Failed", "")
            reply = conclude.conclude_attempt(call, Attempt(claim, None), status, code)
        except REFUSED_ERRORS as error:
            reply = failed_reply(f"{step}: its end cannot be recorded: {error}")
        if reply.phase == "Pending":
            waiting = reply  # the GPUs of the other steps come back without delay
        elif reply.phase == "Failed":
            verdicts[step] = reply.message
    return waiting or verdicts


def _read_open_attempts(context: PluginContext, binding: RunBinding) -> dict[str, AttemptClaim]:
    """Claims of the open attempts of the workflow by step; those that cannot be read are logged."""
    damaged: list[DamagedRecord] = []
    claims = read_open_attempts(context.store, binding.run, damaged)
    for record in damaged:
        _log.warning("attempt.unreadable", key=record.key, error=record.message)
    return {claim.step: claim for claim in claims if claim.uid == binding.uid}
