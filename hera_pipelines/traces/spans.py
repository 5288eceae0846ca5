"""Derives spans of OpenTelemetry from the records of a run.

A span exists once it has ended, and is then the same each time: its ids are hashes
of the time and the nonce of the run record, which tell equal names of several
stores apart. The trace is the run.

| span               | parent           | from                           | to                           |
|--------------------|------------------|--------------------------------|------------------------------|
| submission         | none             | its claim                      | its end                      |
| step               | its submission   | claim of its first attempt     | end of its last attempt      |
| attempt            | its step         | its claim                      | its end                      |

A resume makes a submission of its own, so a span that was sent is never extended.

Source of the names: https://opentelemetry.io/docs/specs/semconv/cicd/cicd-spans/.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

import tiphys
from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import CheckpointNode, build_lineage_tree
from tiphys.protocol.compiled_workflow import CompiledPipeline, is_shutdown_message
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, CheckpointRef, SubmissionKind, task_name
from tiphys.store import Attempt, RunLayout, read_submission_workflow

MAX_CHECKPOINTS = 100
"""The newest checkpoints of an attempt that its span shows."""
MAX_MESSAGE_CHARACTERS = 4096

PIPELINE_NAME = "cicd.pipeline.name"
RUN_ID = "cicd.pipeline.run.id"
RUN_RESULT = "cicd.pipeline.result"
TASK_NAME = "cicd.pipeline.task.name"
TASK_RUN_ID = "cicd.pipeline.task.run.id"
TASK_RUN_RESULT = "cicd.pipeline.task.run.result"
ERROR_TYPE = "error.type"
"""These names are in the package of conventions, too, but in a part of it that may move with any version."""

_SUBMISSION_RESULTS = {"Succeeded": "success", "Failed": "failure"}
_CAUSE_RESULTS = {
    Cause.DEADLINE: "timeout",
    Cause.HANG: "timeout",
    Cause.USER_ERROR: "failure",
    Cause.OUTPUT_MISSING: "failure",
    Cause.OUT_OF_MEMORY: "failure",
    Cause.GPU_OUT_OF_MEMORY: "failure",
    Cause.IMAGE: "failure",
    Cause.UNKNOWN: "failure",
    Cause.PREEMPTION: "error",
    Cause.INFRASTRUCTURE: "error",
    Cause.STORAGE: "error",
}
"""An ``error`` is one of the system that runs the program, in the words of the conventions."""
_MAX_NANOSECONDS = 2**63 - 1
"""Readers have no later time. A time that the format cannot hold would hold up all other spans of its batch."""
_SCOPE = InstrumentationScope("tiphys", tiphys.__version__)
_EPOCH = datetime.fromtimestamp(0, UTC)

Attributes = dict[str, AttributeValue]


def describe_service() -> Resource:
    """The resource of all spans: ``service.name`` is ``tiphys`` unless OTEL_SERVICE_NAME says otherwise."""
    own = Resource({"service.name": "tiphys", "service.version": tiphys.__version__})
    return own.merge(OTELResourceDetector().detect())


def derive_spans(history: RunHistory, resource: Resource) -> list[ReadableSpan]:
    """The spans of a run that have ended, by their ends. Costs what `tiphys events` costs.

    Raises:
        NotFoundError: the store has no such run.
        IntegrityError: the run cannot be read.
        UsageError: Tiphys did not compile its Workflow.
    """
    derivation = _SpanDerivation(history, resource)
    spans = [*derivation.submission_spans(), *derivation.step_spans()]
    return sorted(spans, key=lambda span: (span.end_time or 0, span.start_time or 0))


@dataclass
class _SpanDerivation:
    history: RunHistory
    resource: Resource

    def submission_spans(self) -> Iterator[ReadableSpan]:
        record, previous = self.history.record, None
        for submission in self.history.submissions:
            claim, binding, end = submission.records
            if claim.kind is SubmissionKind.DELETION:
                continue
            context = self._context("submission", claim.submission)
            if end is not None:
                result = _SUBMISSION_RESULTS.get(end.status, "error")
                if result != "success" and is_shutdown_message(end.message):
                    result = "cancellation"
                failed = result in ("failure", "error")
                attributes: Attributes = {
                    PIPELINE_NAME: record.pipeline,
                    RUN_ID: record.run,
                    RUN_RESULT: result,
                    "tiphys.store": self.history.store.url,
                    "tiphys.submission": claim.submission,
                    "tiphys.submission.kind": claim.kind.value,
                }
                if claim.named_namespaces():  # else it ran without a cluster
                    attributes["argo.workflow.name"] = claim.workflow_name
                    attributes["argo.workflow.namespace"] = claim.namespace
                    attributes |= {"argo.workflow.uid": binding.uid} if binding else {}
                if failed:
                    attributes[ERROR_TYPE] = end.status
                message = end.message or f"submission {end.submission} ended as {end.status}"
                yield self._span(
                    record.pipeline,
                    context,
                    None,
                    (claim.written_at, end.written_at),
                    attributes,
                    error=message if failed else "",
                    kind=SpanKind.SERVER,
                    links=[Link(previous)] if previous else [],
                )
            previous = context

    def step_spans(self) -> Iterator[ReadableSpan]:
        """The spans of steps in each submission, and of their attempts."""
        ended = {submission.claim.submission for submission in self.history.submissions if submission.end}
        for step, attempts in self.history.attempts.items():
            readable = [attempt for attempt in attempts if not self._is_damaged(attempt)]
            for submission in sorted({attempt.claim.submission for attempt in attempts}):
                own = [attempt for attempt in readable if attempt.claim.submission == submission]
                complete = len(own) == sum(attempt.claim.submission == submission for attempt in attempts)
                for attempt in own:
                    if attempt.end is not None:
                        yield self._attempt_span(step, attempt, attempt.end)
                last = own[-1].end if own and complete else None
                if last and (last.outcome is AttemptEndOutcome.DONE or submission in ended):
                    yield self._step_span(step, submission, own, last)

    def _is_damaged(self, attempt: Attempt) -> bool:
        """Whether its end cannot be read. Then its span would say what is not known, and differ once it is restored."""
        key = RunLayout(self.history.record.run).attempt_end(attempt.claim.step, attempt.claim.attempt)
        return any(record.key == key for record in self.history.damaged_records)

    def _step_span(self, step: str, submission: int, attempts: Sequence[Attempt], last: AttemptEnd) -> ReadableSpan:
        attributes: Attributes = {
            TASK_RUN_ID: f"{step}/submission-{submission}",
            "tiphys.submission": submission,
            "tiphys.attempts": len(attempts),
        }
        return self._task_span(
            self._context("step", submission, step),
            self._context("submission", submission),
            (attempts[0].claim.written_at, last.ended_at),
            step,
            last,
            attributes,
        )

    def _attempt_span(self, step: str, attempt: Attempt, end: AttemptEnd) -> ReadableSpan:
        claim = attempt.claim
        attributes: Attributes = {
            TASK_RUN_ID: f"{step}/attempt-{claim.attempt}",
            "tiphys.submission": claim.submission,
            "tiphys.attempt": claim.attempt,
        }
        if end.exit_code is not None:
            attributes["tiphys.exit_code"] = end.exit_code
        node = end.evidence.node if end.evidence else ""
        if nodes := claim.nodes or ((node,) if node else ()):
            attributes["tiphys.nodes"] = nodes
        if gpus := self._gpus(attempt):
            attributes["tiphys.gpus"] = gpus
        if claim.gpu_type:
            attributes["tiphys.gpu_type"] = claim.gpu_type
        if claim.starts_from:
            attributes["tiphys.checkpoint.starts_from"] = _name_checkpoint(claim.starts_from)
        return self._task_span(
            self._context("attempt", claim.submission, step, claim.attempt),
            self._context("step", claim.submission, step),
            (claim.written_at, end.ended_at),
            step,
            end,
            attributes,
            [_checkpoint_event(at, node) for at, node in self._commits.get((step, claim.attempt), ())],
        )

    def _task_span(
        self,
        context: SpanContext,
        parent: SpanContext,
        times: tuple[datetime, datetime],
        step: str,
        end: AttemptEnd,
        attributes: Attributes,
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        name, record = task_name(step), self.history.record
        attributes |= {
            PIPELINE_NAME: record.pipeline,
            RUN_ID: record.run,
            TASK_NAME: name,
            TASK_RUN_RESULT: _task_result(end),
            "tiphys.step": step,
        }
        error = ""
        if end.outcome is AttemptEndOutcome.FAILED:
            cause = end.cause or Cause.UNKNOWN
            attributes |= {"tiphys.cause": cause.value, ERROR_TYPE: cause.value}
            error = ": ".join(part for part in (cause.display_name, end.message) if part)
        label = f"{step} attempt {end.attempt}" if "tiphys.attempt" in attributes else step
        return self._span(label, context, parent, times, attributes, error=error, events=events)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[datetime, datetime],
        attributes: Attributes,
        *,
        error: str,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
    ) -> ReadableSpan:
        begin, end = (_nanoseconds(moment) for moment in times)
        status = Status(StatusCode.ERROR, error[:MAX_MESSAGE_CHARACTERS]) if error else Status(StatusCode.UNSET)
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self.resource,
            attributes=attributes,
            events=events,
            links=links,
            kind=kind,
            status=status,
            start_time=begin,
            end_time=max(begin, end),  # the clocks of two machines differ
            instrumentation_scope=_SCOPE,
        )

    def _context(self, *names: str | int) -> SpanContext:
        record = self.history.record
        run = (record.written_at.isoformat(), record.nonce, record.run)
        return SpanContext(_hash(16, *run), _hash(8, *run, *names), False, TraceFlags(TraceFlags.SAMPLED))

    @cached_property
    def _commits(self) -> Mapping[tuple[str, int], Sequence[tuple[datetime, CheckpointNode]]]:
        """The newest checkpoints by step and attempt, oldest first."""
        commits = {}
        for lineage in build_lineage_tree(self.history, self.history.attempts).steps:
            for attempt in lineage.attempts:
                own = [(node.committed_at, node) for node in attempt.checkpoints if node.committed_at]
                commits[lineage.step, attempt.attempt] = own[-MAX_CHECKPOINTS:]
        return commits

    def _gpus(self, attempt: Attempt) -> int:
        pipeline = self._pipelines.get(attempt.claim.submission)
        spec = pipeline.steps.get(task_name(attempt.claim.step)) if pipeline else None
        return spec.gpu.gpus_for(attempt.claim.members) if spec and spec.gpu else 0

    @cached_property
    def _pipelines(self) -> Mapping[int, CompiledPipeline]:
        """The pipeline of each submission, as the code may have changed between two; without those that are damaged."""
        store, record = self.history.store, self.history.record
        claims = [submission.claim for submission in self.history.submissions]
        read: dict[str, CompiledPipeline] = {}
        for digest, claim in {claim.workflow: claim for claim in claims}.items():
            with suppress(IntegrityError, UsageError):
                read[digest] = CompiledPipeline.from_manifest(read_submission_workflow(store, record, claim))
        return {claim.submission: read[claim.workflow] for claim in claims if claim.workflow in read}


def _task_result(end: AttemptEnd) -> str:
    if end.outcome is AttemptEndOutcome.DONE:
        return "success"
    if end.outcome is AttemptEndOutcome.FENCED:
        return "cancellation"
    return _CAUSE_RESULTS[end.cause or Cause.UNKNOWN]


def _checkpoint_event(committed_at: datetime, node: CheckpointNode) -> Event:
    attributes: Attributes = {
        "tiphys.checkpoint": _name_checkpoint(node.ref),
        "tiphys.checkpoint.size_bytes": node.size_bytes,
    }
    return Event("checkpoint", attributes, timestamp=_nanoseconds(committed_at))


def _name_checkpoint(ref: CheckpointRef) -> str:
    return f"{ref.lineage}/{ref}"


def _hash(size_bytes: int, *parts: str | int) -> int:
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:size_bytes], "big")


def _nanoseconds(moment: datetime) -> int:
    return min(max(0, (moment - _EPOCH) // timedelta(microseconds=1) * 1000), _MAX_NANOSECONDS)
