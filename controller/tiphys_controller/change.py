"""Another Workflow that a run shall go on with, because somebody changed its code."""

from collections.abc import Mapping
from typing import NamedTuple

from tiphys.errors import IntegrityError, UsageError
from tiphys.protocol.drift import DriftPolicy, drift_policy_of, overridden
from tiphys.protocol.pipeline import CompiledPipeline, Manifest
from tiphys.records import RunRecord, WorkflowRecord, digest
from tiphys_controller.drifting import Difference, changed, differences
from tiphys_controller.identity import Identity, identified, workflow_name
from tiphys_controller.starting import authored_name, code_version, own_parameters
from tiphys_controller.versions import Installed


class Change(NamedTuple):
    """``workflow`` is compiled, with its parameters; None: what the last submission was made of.

    ``drift`` are actions in place of the run's own, by class; ``installed`` tells
    versions where the programs will run, None where nobody knows them.
    """

    workflow: Manifest | None = None
    drift: Mapping[str, str] = {}
    installed: Installed | None = None

    def policy(self, before: CompiledPipeline) -> DriftPolicy:
        """What may change.

        Raises:
            UsageError: one of the actions is none.
        """
        return overridden(drift_policy_of(before.manifest), self.drift)

    def compare(
        self, before: CompiledPipeline, run: str, forking: bool = False
    ) -> tuple[CompiledPipeline, tuple[Difference, ...], Mapping[str, str]]:
        """The new pipeline, what differs, and the steps whose results may not stand any more, each with the reason.

        Raises:
            UsageError: it is another pipeline, for another store, or would be a run of another name.
        """
        policy = self.policy(before)
        if self.workflow is None:
            return before, (), {}
        after = CompiledPipeline.from_manifest(self.workflow)
        for what, old, new in (("pipeline", before.name, after.name), ("store", before.store, after.store)):
            if old.rstrip("/") != new.rstrip("/"):
                raise UsageError(f"run {run} is of the {what} {old}, and this Workflow of {new}; choose the right one")
        if not forking:
            authored_name(after, run)
        found = differences(before, after, policy)
        return after, found, changed(before, after, found)


def check_intact(record: RunRecord) -> None:
    """Refuse to go on with a Workflow that is not the one that was recorded.

    Raises:
        IntegrityError: it was changed.
    """
    if digest(record.workflow) != record.digest:
        raise IntegrityError(
            f"the Workflow in run.json of run {record.run} was changed after it was written, its digest does not "
            "match; restore the object, or begin a new run"
        )


def workflow_record(record: RunRecord, manifest: Manifest) -> WorkflowRecord:
    """``manifest`` as it is kept with the run of ``record``."""
    namespace = (record.workflow.get("metadata") or {}).get("namespace") or "default"
    workflow = identified(manifest, Identity(record.run, 1, workflow_name(record.run, 1), namespace))
    return WorkflowRecord(
        run=record.run,
        workflow=workflow,
        digest=digest(workflow),
        parameters=own_parameters(workflow),
        code_version=code_version(workflow),
    )
