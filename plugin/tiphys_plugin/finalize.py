"""finalize: the workflow's onExit. Seals the submission and has its GPUs looked after.

Terminate, deletion and crashes skip it, so nothing depends on it: a lease it
does not release is found by the next sweep.
"""

from tiphys.faults import failpoint
from tiphys.protocol.operations import Finalize
from tiphys.protocol.wire import ExecuteReply, succeeded
from tiphys.records import RunSealed
from tiphys.store import claim
from tiphys_plugin import lapses
from tiphys_plugin.failures import summarize
from tiphys_plugin.identity import Binding
from tiphys_plugin.services import Services


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
