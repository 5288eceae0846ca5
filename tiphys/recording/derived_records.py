"""Writes the records that follow from the end of a finished attempt.

The end record decides. These are written after it and can be derived from it again, so a
crash in between loses nothing.
"""

import contextlib

from tiphys.errors import ObjectExistsError
from tiphys.faults import failpoint
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptEnd, MemoRecord
from tiphys.store import RunLayout, Store, claim_record, find_output_fault, list_outputs, memo_key, outputs_digest
from tiphys.store.outputs import outputs_prefix


def write_derived_records(store: Store, spec: StepSpec, end: AttemptEnd) -> None:
    """Write the records that follow from a done end, if missing: the projection, and the memo if the step is shared.

    A projection states that the listed outputs are intact. If an object has
    vanished since the end was written, no projection is written, and readers
    use the end record.
    """
    layout = RunLayout(end.run)
    if next(store.list(layout.done_marker(end.step, end.attempt, "")), None) is None:
        below = outputs_prefix(end)
        listed = list_outputs(store, end) if any(output.objects for output in end.outputs) else {}
        if find_output_fault(end, listed) is None:
            rows = [(key.removeprefix(below), info.size, info.version) for key, info in listed.items()]
            with contextlib.suppress(ObjectExistsError):  # another process derived it at the same time
                store.create(layout.done_marker(end.step, end.attempt, outputs_digest(rows)), b"")
    failpoint("conclude.after_projection")
    if spec.share:
        claim_record(store, memo_key(end.step_key), MemoRecord(run=end.run, step=end.step, attempt=end.attempt))
