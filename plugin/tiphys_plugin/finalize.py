"""finalize: the workflow's onExit. Seals the submission and has its GPUs looked after.

Terminate, deletion and crashes skip it, so nothing depends on it: a lease it
does not release is found by the next sweep.
"""

import json

from tiphys.faults import failpoint
from tiphys.protocol.operations import Finalize
from tiphys.protocol.wire import ExecuteReply, succeeded
from tiphys.records import RunSealed
from tiphys.store import claim
from tiphys_plugin import lapses
from tiphys_plugin.identity import Binding
from tiphys_plugin.services import Services

_LONGEST_MESSAGE = 1000


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


def summarize(failures: str) -> str:
    """Argo's ``workflow.failures`` as one line. It is JSON, encoded twice, and ``"null"`` without failures."""
    nodes: object = failures
    for _ in range(2):
        try:
            nodes = json.loads(nodes) if isinstance(nodes, str) else nodes
        except ValueError:
            break
    if not isinstance(nodes, list):
        return ""
    said = [f"{n.get('displayName', '?')}: {n.get('message') or 'failed'}" for n in nodes if isinstance(n, dict)]
    return "; ".join(said)[:_LONGEST_MESSAGE]
