"""finalize: the workflow's onExit handler, which seals the submission and releases its GPUs.

``argo terminate``, deletion and crashes skip it, so nothing depends on it: the
next sweep finds a lease that finalize did not release.

The sealed record says in one line why the workflow failed. Argo lists all failed
nodes in no order, and most only say that a child has failed. People read the
line, and the controller reads from it whether the end was requested, so the
summary puts the deciding messages first, where the length limit keeps them.
"""

import json
import re
from typing import NamedTuple

from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.protocol.execute_api import ExecuteReply, succeeded_reply
from tiphys.protocol.operations import FinalizeOperation
from tiphys.records import SubmissionEnd
from tiphys.store import claim_record
from tiphys_plugin.attempts.run_binding import RunBinding
from tiphys_plugin.operations import end_attempt, lease_reclaim
from tiphys_plugin.runtime.context import PluginContext

_MAX_MESSAGE_CHARACTERS = 1000
_STEP_PARTS = ("admit", "run", "settle", "attempts", "conclude")
"""Names of the parts of every step; the names of their templates include the step."""
_CHILD_FAILED = re.compile(r"child '[^']*' failed")


def summarize_failures(failures: str) -> str:
    """Summarize Argo's ``workflow.failures`` in one line. It is JSON, encoded twice, and ``"null"`` without failures.

    Shutdowns come first, each step once, then verdicts on steps, then all other nodes.
    A step's verdict includes the failure of its program, so the program's node is left out.
    """
    nodes = _parse_failed_nodes(failures)
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

    @property
    def repeats_child_failure(self) -> bool:
        """Whether the node is a parent that only repeats a child's failure."""
        return bool(_CHILD_FAILED.fullmatch(self.message)) or (self.is_workflow and not self.message)

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
    def is_verdict(self) -> bool:
        return self.name == "conclude" and not self.is_shutdown

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
    keys = ("displayName", "templateName", "message", "podName")
    return [_FailedNode(*(str(node.get(key) or "") for key in keys)) for node in document if isinstance(node, dict)]


def finalize(context: PluginContext, binding: RunBinding, operation: FinalizeOperation) -> ExecuteReply:
    """Answer the finalize node; a repeated call gets the record that was sealed first."""
    message = summarize_failures(operation.failures)
    if context.settings.end_stopped_attempts and is_shutdown_message(message):
        end_attempt.end_stopped_attempts(context, binding)
    end = SubmissionEnd(run=binding.run, submission=binding.submission, status=operation.status, message=message)
    sealed = claim_record(context.store, binding.layout.submission_end(binding.submission), end).record
    failpoint("finalize.after_seal")
    context.ledger.release_workflow(binding.uid)
    lease_reclaim.reclaim_leases(context)
    return succeeded_reply(f"Run {binding.run}, submission {binding.submission}: {sealed.status}")
