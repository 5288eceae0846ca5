"""finalize: the workflow's onExit handler, which seals the submission and releases its GPUs.

``argo terminate``, deletion and crashes skip it, so nothing depends on it: the
next sweep finds a lease that finalize did not release.

It also records the ends of steps that have no conclude: of the last step, and of
those that failed or that a stop separated from the step that would have recorded
them.

The sealed record says in one line why the workflow failed. Argo lists all failed
nodes in no order, and most only say that a child has failed. People read the
line, and the controller reads from it whether the end was requested, so the
summary puts the deciding messages first, where the length limit keeps them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import structlog

from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, succeeded_reply
from tiphys.protocol.operations import FinalizeOperation, format_submission_end
from tiphys.protocol.step_spec import StepKind
from tiphys.records import AttemptClaim, SubmissionEnd
from tiphys.store import Attempt, DamagedRecord, claim_record, read_open_attempts
from tiphys_plugin.attempts.run_binding import RunBinding
from tiphys_plugin.operations import conclude, end_attempt, lease_reclaim
from tiphys_plugin.runtime.context import PluginContext

_log = structlog.get_logger()
_MAX_MESSAGE_CHARACTERS = 1000
_STEP_PARTS = ("admit", "run", "settle", "attempts", "conclude")
"""Names of the parts of every step; the names of their templates include the step."""
_NO_VERDICTS: Mapping[str, str] = MappingProxyType({})
_VERDICT = re.compile(r"\S+ failed in attempt \d+ by ")
"""Begin of the verdict on a step, which the admit of the next step also repeats."""
_CHILD_FAILED = re.compile(r"child '[^']*' failed")


def summarize_failures(failures: str, verdicts: Mapping[str, str] = _NO_VERDICTS) -> str:
    """Summarize Argo's ``workflow.failures`` in one line. It is JSON, encoded twice, and ``"null"`` without failures.

    Shutdowns come first, each step once, then verdicts on steps, then all other nodes.
    A step's verdict includes the failure of its program, so the program's node is left out.
    ``verdicts`` are those of this call, by step.
    """
    nodes = _parse_failed_nodes(failures)
    nodes += [_FailedNode("conclude", f"{step}-conclude", message, "") for step, message in verdicts.items()]
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
        return bool(_CHILD_FAILED.fullmatch(self.message)) or not self.message  # a DAG gets no message

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
    verdicts: dict[str, str] = {}
    for step, reply in _record_ends(context, binding, operation):
        if reply.node is None or reply.node.phase == "Pending":
            return reply
        if reply.node.phase == "Failed":
            verdicts[step] = reply.node.message
    message = summarize_failures(operation.failures, verdicts)
    if context.settings.end_stopped_attempts and is_shutdown_message(message):
        end_attempt.end_stopped_attempts(context, binding, _read_open_attempts(context, binding))
    status = "Failed" if verdicts else operation.status
    end = SubmissionEnd(run=binding.run, submission=binding.submission, status=status, message=message)
    sealed = claim_record(context.store, binding.layout.submission_end(binding.submission), end).record
    failpoint("finalize.after_seal")
    context.ledger.release_workflow(binding.uid)
    lease_reclaim.reclaim_leases(context)
    ended = format_submission_end(binding.run, binding.submission, sealed.status, sealed.message)
    # Where Argo has seen no failure, this node has to be one.
    return failed_reply(ended) if verdicts and operation.status == "Succeeded" else succeeded_reply(ended)


def _record_ends(
    context: PluginContext, binding: RunBinding, operation: FinalizeOperation
) -> Iterator[tuple[str, ExecuteReply]]:
    """Record the ends of steps without a conclude; yields each step with the reply about its end."""
    if operation.after and operation.status == "Succeeded":
        reply = conclude.record_previous_end(context, binding, operation.after)
        if reply is not None:
            yield operation.after, reply
    failed = {node.step: node for node in _parse_failed_nodes(operation.failures) if node.is_program}
    for claim in _read_open_attempts(context, binding):
        call = end_attempt.attempt_call(context, binding, claim)
        if call.spec.kind is not StepKind.STEP or call.spec.fan_out:
            continue
        node = failed.get(claim.step)
        if node is None and end_attempt.is_program_done(call, claim):
            yield claim.step, conclude.conclude_attempt(call, Attempt(claim, None), "Succeeded", "0")
        elif node is not None and not node.is_shutdown:
            exit_code = end_attempt.find_argo_exit_code(call, claim)
            yield claim.step, conclude.conclude_attempt(call, Attempt(claim, None), node.phase, exit_code)


def _read_open_attempts(context: PluginContext, binding: RunBinding) -> list[AttemptClaim]:
    """Claims of the open attempts of the workflow; those that cannot be read are logged."""
    damaged: list[DamagedRecord] = []
    claims = read_open_attempts(context.store, binding.run, damaged)
    for record in damaged:
        _log.warning("attempt.unreadable", key=record.key, error=record.message)
    return [claim for claim in claims if claim.uid == binding.uid]
