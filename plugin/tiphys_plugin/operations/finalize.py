"""Why did a Workflow fail? Argo names all nodes that failed, in no order, and most only say that a child has failed.

One line of it tells people, and the controller whether somebody wanted the end.
So what counts comes first, where no limit cuts it off.

finalize: the workflow's onExit. Seals the submission and has its GPUs looked after.

Terminate, deletion and crashes skip it, so nothing depends on it: a lease it
does not release is found by the next sweep.
"""

import json
import re
from typing import NamedTuple

from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import tells_of_shutdown
from tiphys.protocol.execute_api import ExecuteReply, succeeded
from tiphys.protocol.operations import Finalize
from tiphys.records import RunSealed
from tiphys.store import claim
from tiphys_plugin.attempts.run_binding import Binding
from tiphys_plugin.operations import lease_reclaim as lapses
from tiphys_plugin.runtime.context import Services

_LONGEST_MESSAGE = 1000
_OF_EACH_STEP = ("admit", "run", "settle", "attempts", "conclude")
"""What the parts of every step are called; their templates are called after it."""
_CHILD_FAILED = re.compile(r"child '[^']*' failed")


def summarize(failures: str) -> str:
    """Argo's ``workflow.failures`` as one line. It is JSON, encoded twice, and ``"null"`` without failures.

    Shutdowns come first, then verdicts on steps, which tell of their programs as well, then all else.
    """
    nodes = _nodes(failures)
    telling = [node for node in nodes if not node.repeats_others] or nodes
    judged = {f"{node.step}-run" for node in telling if node.is_verdict}
    told = [node for node in telling if node.template not in judged or node.is_shut_down]
    told.sort(key=lambda node: (not node.is_shut_down, not node.is_verdict, node.line))
    return "; ".join(dict.fromkeys(node.line for node in told))[:_LONGEST_MESSAGE]


class _Node(NamedTuple):
    name: str
    template: str
    message: str
    pod: str

    @property
    def repeats_others(self) -> bool:
        """A parent, whose failure is that of a child. The Workflow itself has its own name as that of its pod."""
        return bool(_CHILD_FAILED.fullmatch(self.message)) or (self.name == self.pod and not self.message)

    @property
    def step(self) -> str:
        return self.template.rpartition("-")[0]

    @property
    def is_shut_down(self) -> bool:
        return tells_of_shutdown(self.message)

    @property
    def is_verdict(self) -> bool:
        return self.name == "conclude" and not self.is_shut_down

    @property
    def line(self) -> str:
        if self.is_verdict:
            return self.message or f"{self.step}: failed"
        own = self.name.partition("(")[0] in _OF_EACH_STEP
        return f"{self.template if own else self.name}: {self.message or 'failed'}"


def _nodes(failures: str) -> list[_Node]:
    found: object = failures
    for _ in range(2):
        try:
            found = json.loads(found) if isinstance(found, str) else found
        except ValueError:
            break
    if not isinstance(found, list):
        return []
    keys = ("displayName", "templateName", "message", "podName")
    return [_Node(*(str(one.get(key) or "") for key in keys)) for one in found if isinstance(one, dict)]


def finalize(services: Services, binding: Binding, operation: Finalize) -> ExecuteReply:
    """Answer the finalize node; a repeated call gets what was sealed first."""
    wanted = RunSealed(
        run=binding.run,
        submission=binding.submission,
        status=operation.status,
        message=summarize(operation.failures),
    )
    sealed = claim(services.store, binding.layout.submission_end(binding.submission), wanted).record
    failpoint("finalize.after_seal")
    services.ledger.release_workflow(binding.uid)
    lapses.sweep(services)
    return succeeded(f"Run {binding.run}, submission {binding.submission}: {sealed.status}")
