"""Derives events of OpenLineage from the records of a run.

The records are all that is needed, so the events can be made at any time, again
and again: ids follow from the records, and equal events are merged by whoever
receives them. One attempt is one run of OpenLineage, below the run of Tiphys:

| record                         | event                                              |
|--------------------------------|----------------------------------------------------|
| run, later submission          | START, RUNNING of the run                          |
| end of a submission            | COMPLETE or FAIL of the run                        |
| claim of an attempt            | START, with its input data                         |
| manifest of a checkpoint       | RUNNING, with the checkpoint as an output          |
| end of an attempt              | COMPLETE, FAIL or ABORT, with its output artifacts |

Source of the model: https://openlineage.io/docs/spec/object-model.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePosixPath

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState, set_producer
from openlineage.client.facet_v2 import (
    DatasetFacet,
    JobFacet,
    OutputDatasetFacet,
    RunFacet,
    dataset_version_dataset,
    error_message_run,
    job_type_job,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
)
from openlineage.client.uuid import generate_static_uuid

import tiphys
from hera_pipelines.run_histories import RunHistory
from tiphys.lineage import CheckpointNode
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    DataVersion,
    Output,
    OutputKind,
    StoredRecord,
    SubmissionKind,
    json_digest,
    task_name,
)

PRODUCER = f"urn:tiphys:{tiphys.__version__}"
set_producer(PRODUCER)  # of all facets
_INTEGRATION = "TIPHYS"
_FROM_TASK = re.compile(r"\{\{tasks\.([^.}]+)\.outputs\.artifacts\.([^}]+)\}\}")
_END_STATES = {
    AttemptEndOutcome.DONE: RunState.COMPLETE,
    AttemptEndOutcome.FAILED: RunState.FAIL,
    AttemptEndOutcome.FENCED: RunState.ABORT,
}
_LATER = {RunState.START: 0, RunState.RUNNING: 1}
"""Order of events of one moment; all others are ends."""


def derive_events(history: RunHistory, namespace: str) -> list[RunEvent]:
    """All events of a run, by time; ``namespace`` is that of the jobs."""
    derivation = _EventDerivation(namespace, history)
    return sorted(
        [*derivation.run_events(), *derivation.attempt_events()],
        key=lambda event: (datetime.fromisoformat(event.eventTime), _LATER.get(event.eventType or RunState.OTHER, 2)),
    )


def _record_id(record: StoredRecord) -> str:
    """The same UUID for the same record. Its nonce tells equal names of several stores apart."""
    return str(generate_static_uuid(record.written_at, record.nonce.encode()))


@dataclass(frozen=True)
class _EventDerivation:
    """The records of one run, and the namespace in which OpenLineage knows it."""

    namespace: str
    history: RunHistory

    def run_events(self) -> Iterator[RunEvent]:
        yield self._run_event(RunState.START, self.history.record.written_at)
        for claim, _, end in self.history.submissions:
            if claim.submission > 1 and claim.kind is not SubmissionKind.DELETION:
                yield self._run_event(RunState.RUNNING, claim.written_at)
            if end is not None:
                succeeded = end.status == "Succeeded"
                error = "" if succeeded else end.message or f"submission {end.submission} ended as {end.status}"
                yield self._run_event(RunState.COMPLETE if succeeded else RunState.FAIL, end.written_at, error)

    def attempt_events(self) -> Iterator[RunEvent]:
        commits = {
            (lineage.step, attempt.attempt): attempt
            for lineage in self.history.tree.steps
            for attempt in lineage.attempts
        }
        for step, attempts in self.history.attempts.items():
            for claim, end in attempts:
                yield self._attempt_event(claim, RunState.START, claim.written_at)
                node = commits.get((step, claim.attempt))
                for checkpoint in node.checkpoints if node else ():
                    if checkpoint.committed_at:
                        outputs = [self._checkpoint_dataset(step, checkpoint)]
                        yield self._attempt_event(claim, RunState.RUNNING, checkpoint.committed_at, outputs)
                if end is not None:
                    outputs = [self._output_dataset(step, one) for one in _artifacts(end)]
                    error = _describe_end(end) if end.outcome is not AttemptEndOutcome.DONE else ""
                    yield self._attempt_event(claim, _END_STATES[end.outcome], end.ended_at, outputs, error)

    def _run_event(self, state: RunState, at: datetime, error: str = "") -> RunEvent:
        return self._event(
            state, at, _record_id(self.history.record), self.history.record.pipeline, "DAG", {}, [], [], error
        )

    def _attempt_event(
        self,
        claim: AttemptClaim,
        state: RunState,
        at: datetime,
        outputs: Sequence[OutputDataset] = (),
        error: str = "",
    ) -> RunEvent:
        run, pipeline = _record_id(self.history.record), self.history.record.pipeline
        parent = parent_run.ParentRunFacet(
            run=parent_run.Run(runId=run),
            job=parent_run.Job(namespace=self.namespace, name=pipeline),
            root=parent_run.Root(
                run=parent_run.RootRun(runId=run), job=parent_run.RootJob(namespace=self.namespace, name=pipeline)
            ),
        )
        name, inputs = f"{pipeline}.{task_name(claim.step)}", [*self._artifact_inputs(claim), *_data_inputs(claim)]
        return self._event(state, at, _record_id(claim), name, "TASK", {"parent": parent}, inputs, outputs, error)

    def _event(
        self,
        state: RunState,
        at: datetime,
        run_id: str,
        job: str,
        job_type: str,
        facets: dict[str, RunFacet],
        inputs: Sequence[InputDataset],
        outputs: Sequence[OutputDataset],
        error: str,
    ) -> RunEvent:
        engine = processing_engine_run.ProcessingEngineRunFacet(version=tiphys.__version__, name="Tiphys")
        run_facets: dict[str, RunFacet] = {**facets, "processing_engine": engine}
        if error:
            run_facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(error, programmingLanguage="python")
        kind: JobFacet = job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration=_INTEGRATION, jobType=job_type
        )
        return RunEvent(
            eventType=state,
            eventTime=at.isoformat(timespec="milliseconds"),
            run=Run(runId=run_id, facets=run_facets),
            job=Job(namespace=self.namespace, name=job, facets={"jobType": kind}),
            inputs=list(inputs),
            outputs=list(outputs),
            producer=PRODUCER,
        )

    def _artifact_inputs(self, claim: AttemptClaim) -> Iterator[InputDataset]:
        """Artifacts of other steps that the step takes, with the version that was newest when the attempt began."""
        task = next((one for one in self.history.pipeline.tasks() if one["name"] == task_name(claim.step)), {})
        for artifact in (task.get("arguments") or {}).get("artifacts") or []:
            if match := _FROM_TASK.fullmatch(artifact.get("from") or ""):
                step, name = match.groups()
                yield InputDataset(
                    namespace=self.history.store.url,
                    name=self._dataset_name(step, name),
                    facets=_version_facet(self._output_version(step, name, claim.written_at)),
                )

    def _output_version(self, step: str, name: str, before: datetime) -> str:
        """Content hash of an output; empty if the step reused a result, and so has no attempt that made it."""
        ends = [end for _, end in self.history.attempts.get(step, ()) if end and end.ended_at <= before]
        versions = [_content_version(output) for end in ends for output in _artifacts(end) if output.name == name]
        return versions[-1] if versions else ""

    def _output_dataset(self, step: str, output: Output) -> OutputDataset:
        return OutputDataset(
            namespace=self.history.store.url,
            name=self._dataset_name(step, output.name),
            facets=_version_facet(_content_version(output)),
            outputFacets=_statistics_facet(sum(one.size for one in output.objects), len(output.objects)),
        )

    def _checkpoint_dataset(self, step: str, node: CheckpointNode) -> OutputDataset:
        return OutputDataset(
            namespace=self.history.store.url,
            name=self._dataset_name(step, "checkpoints"),
            facets=_version_facet(f"{self.history.record.run}/{node.ref}"),
            outputFacets=_statistics_facet(node.size_bytes),
        )

    def _dataset_name(self, step: str, name: str) -> str:
        return str(PurePosixPath(self.history.record.pipeline, step, name))


def _artifacts(end: AttemptEnd) -> list[Output]:
    return [output for output in end.outputs if output.kind is OutputKind.ARTIFACT]


def _content_version(output: Output) -> str:
    """SHA-256 of a file; of a folder, of the names and hashes of its files."""
    if not output.directory and len(output.objects) == 1:
        return output.objects[0].sha256
    return json_digest(sorted([one.key.removeprefix(output.key), one.sha256] for one in output.objects))


def _data_inputs(claim: AttemptClaim) -> Iterator[InputDataset]:
    for data in claim.data:
        namespace, name = _name_data(data)
        yield InputDataset(namespace=namespace, name=name, facets=_version_facet(data.digest))


def _name_data(data: DataVersion) -> tuple[str, str]:
    """Namespace and name, which are the same for all versions."""
    if not data.name.startswith("lakefs://"):
        return "dvc", data.name
    repository, _, path = (data.name.removeprefix("lakefs://") + "//").split("/", 2)
    return f"lakefs://{repository}", path.rstrip("/") or "/"


def _version_facet(version: str) -> dict[str, DatasetFacet]:
    return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(version)} if version else {}


def _statistics_facet(size_bytes: int, files: int | None = None) -> dict[str, OutputDatasetFacet]:
    facet = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(size=size_bytes, fileCount=files)
    return {"outputStatistics": facet}


def _describe_end(end: AttemptEnd) -> str:
    parts = (end.cause.display_name if end.cause else "", end.message)
    return ": ".join(part for part in parts if part) or f"attempt {end.attempt} ended as {end.outcome}"
