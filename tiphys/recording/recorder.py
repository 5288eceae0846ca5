"""`WorkflowRecorder`: claims and ends the attempts of the steps of one Workflow that have no gate.

An attempt of such a step is its node with all tries. Its records are those of a gated step:
a claim when it has started, with the key of its inputs; an end once its outputs are
verified, or its failure is judged; then what follows from the end. Steps are recorded in
the order of the DAG, because the key of a step holds the hashes of what it takes from
others. All times are those of Argo's nodes.
"""

import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tiphys.failures.classify import UNEXPLAINED_RULES, AttemptObservation, classify_failure
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import Manifest, find_template, is_shutdown_message, read_workflow_parameters
from tiphys.protocol.depends import awaited_tasks
from tiphys.protocol.step_spec import ITEM_PARAMETER, StepSpec
from tiphys.protocol.workflow_nodes import StepNode, find_step_nodes, parse_node_time
from tiphys.recording.derived_records import write_derived_records
from tiphys.recording.node_outputs import HashObjects, OutputFault, VerifiedOutputs, verify_outputs, write_output_origin
from tiphys.recording.run_binding import RunBinding, resolve_step_id, submitted_manifest
from tiphys.recording.step_key import StepInputs, StepKey, compute_step_key, workflow_parameters_used
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause, FailureEvidence, SubmissionClaim
from tiphys.records.attempt import STOPPED_MESSAGE
from tiphys.records.base import utc_now
from tiphys.store import (
    ObjectInfo,
    RunLayout,
    Store,
    claim_record,
    fence_attempt,
    find_record,
    read_attempt_end,
    read_record,
)
from tiphys.store.layout import parse_attempt
from tiphys.store.outputs import hash_object
from tiphys.threads import map_parallel

PARAMETER_MAX_BYTES = 64 << 10
"""Output parameters live in the Workflow object (about 1.5 MB for all of them)."""
_PARALLEL_STEPS = 16
_CLAIM_TRIES = 5
_MAX_ARGO_MESSAGE_CHARACTERS = 300
_EXIT_OF_MAIN = re.compile(r"((?:main: )?[A-Za-z]* \(exit code (\d{1,10})\))(?:: (.*))?\Z", re.DOTALL)
_UNEXPLAINED_RULES = (*UNEXPLAINED_RULES, "exit-code-0")
"""The last is for a program that ended well beside a container that did not, which only the message names."""
_EXIT_CODE = re.compile(r"-?\d{1,10}", re.ASCII)


class RecordedSteps(NamedTuple):
    """What is recorded of a Workflow."""

    ends: Mapping[str, AttemptEnd]
    """Ends of the steps that have ended, without their outputs, by step id."""
    refuted: frozenset[str] = frozenset()
    """Steps that Argo saw succeed and whose outputs are missing or cannot be kept."""
    names: Mapping[str, str] = {}
    """The name of each ended step within the Workflow, by step id: ``prep``, ``sweep(2:lr:0.1)``."""
    waiting: tuple[str, ...] = ()
    """Names of the steps whose outputs are still being hashed, and of those behind them or left over by the time."""
    faults: Mapping[str, str] = {}
    """Why a step cannot be recorded, by its name within the Workflow, such as a damaged record."""
    is_superseded: bool = False
    """Whether a later submission was claimed, so that this Workflow opens no more attempts."""


class _Attempt(NamedTuple):
    claim: AttemptClaim
    end: AttemptEnd | None


class _RecordingJob(NamedTuple):
    """What one call of `WorkflowRecorder.record` has for all steps."""

    parameters: Mapping[str, str]
    """Workflow parameters."""
    hash_objects: HashObjects
    deadline: float
    """Monotonic time after which no step is begun."""
    is_superseded: bool


def hash_at_once(store: Store) -> HashObjects:
    """A `HashObjects` that reads all objects before it returns."""

    def hash_objects(_: str, objects: Sequence[ObjectInfo]) -> Mapping[str, str]:
        return {info.key: hash_object(store, info.key) for info in objects}

    return hash_objects


def _read_time(text: object) -> datetime | None:
    """A time of a node, at its latest: Argo drops the fraction of a second, and nothing began before its Workflow."""
    moment = parse_node_time(text)
    if moment is None or moment.microsecond:
        return moment
    return max(moment, min(moment + timedelta(milliseconds=999), utc_now()))


def _read_parameters(workflow: Manifest) -> Mapping[str, str]:
    try:
        return read_workflow_parameters(submitted_manifest(workflow))
    except (KeyError, TypeError, AttributeError) as error:  # a tenant may write its Workflow
        raise UsageError(f"the parameters of the Workflow cannot be read: {error!r}") from error


class WorkflowRecorder:
    """Records the steps of one Workflow. Thread-safe; one call records at a time.

    Args:
        on_end: Called with each end that this recorder has written.
    """

    def __init__(
        self,
        store: Store,
        binding: RunBinding,
        parameter_max_bytes: int = PARAMETER_MAX_BYTES,
        on_end: Callable[[AttemptEnd], object] = lambda _: None,
    ) -> None:
        self._store = store
        self.binding = binding
        self.released: set[str] = set()
        """Gated steps of the Workflow before which the recorded steps have been looked at."""
        self.told: set[str] = set()
        """Steps of which people have been told that they cannot be recorded."""
        self._parameter_max_bytes = parameter_max_bytes
        self._on_end = on_end
        self._lock, self._listing_lock = threading.Lock(), threading.Lock()
        self._faults: dict[str, str] = {}
        self._bound_items: dict[str, str] = {}
        """The instance of each step id of an item that is known to be bound."""
        self._attempts: dict[str, tuple[str, _Attempt]] = {}
        """Step id and attempt of each instance that is known to be recorded."""
        self._used_by_template: dict[str, list[str]] = {}
        """Names of the workflow parameters that each template uses."""
        self._listed: Mapping[str, tuple[int, frozenset[int]]] | None = None
        """Last attempt of each step, and the attempts that have an end; None before the first listing."""

    @cached_property
    def specs(self) -> Mapping[str, StepSpec]:
        """The steps without a gate, by name."""
        return {name: spec for name, spec in self.binding.pipeline.steps.items() if not spec.is_gated}

    def record(
        self,
        workflow: Manifest,
        nodes: Iterable[Mapping[str, Any]],
        hash_objects: HashObjects | None = None,
        seconds: float = math.inf,
    ) -> RecordedSteps:
        """Record all that ``nodes`` show of the steps.

        No further step is begun after ``seconds``. Without ``hash_objects`` outputs are hashed at once.

        Raises:
            StoreError: storage did not answer; what was recorded before stays.
        """
        if not self.specs:
            return RecordedSteps({})
        deadline = time.monotonic() + seconds
        with self._lock:
            tasks = {name: spec.fan_out for name, spec in self.specs.items()}
            found = list(find_step_nodes(self.binding.workflow, nodes, tasks))
            started = [node for node in found if node.has_started and not self._is_ended(node)]
            is_superseded = any(node.instance not in self._attempts for node in started) and self._is_superseded()
            job = _RecordingJob(
                _read_parameters(workflow) if started else {},
                hash_objects or hash_at_once(self._store),
                deadline,
                is_superseded,
            )
            self._faults.clear()
            waiting: list[StepNode] = []
            for group in self._in_order(started):
                # Without the hashes of what it takes, a step would get a key that no later submission computes.
                behind = self._tasks_behind({node.task for node in waiting})
                ready = [node for node in group if node.instance in self._attempts or node.task not in behind]
                done = map_parallel(partial(self._try_step, job), ready, _PARALLEL_STEPS)
                recorded = {node.instance for node, is_done in zip(ready, done, strict=True) if is_done}
                waiting += [node for node in group if node.instance not in recorded]
            ended = {instance: known for instance, known in self._attempts.items() if known[1].end is not None}
            succeeded = {node.instance for node in found if node.phase == "Succeeded"}
            refuted = (step for instance, (step, _) in ended.items() if instance in succeeded)
            ends = {step: attempt.end for step, attempt in ended.values() if attempt.end is not None}
            return RecordedSteps(
                ends,
                frozenset(step for step in refuted if ends[step].outcome is AttemptEndOutcome.FAILED),
                {step: self._name(instance) for instance, (step, _) in ended.items()},
                tuple(self._name(node.instance) for node in waiting),
                {self._name(instance): fault for instance, fault in self._faults.items()},
                is_superseded,
            )

    def _name(self, instance: str) -> str:
        return instance.removeprefix(f"{self.binding.workflow}.")

    def _is_ended(self, node: StepNode) -> bool:
        known = self._attempts.get(node.instance)
        return known is not None and known[1].end is not None

    def _in_order(self, nodes: Sequence[StepNode]) -> Iterator[list[StepNode]]:
        groups: dict[int, list[StepNode]] = defaultdict(list)
        for node in nodes:
            groups[self._level[node.task]].append(node)
        yield from (groups[level] for level in sorted(groups))

    @cached_property
    def _level(self) -> Mapping[str, int]:
        """How many tasks at most come one after the other before each task."""
        levels: dict[str, int] = {}
        try:
            for name in TopologicalSorter(self._waits).static_order():
                levels[name] = 1 + max((levels[before] for before in self._waits.get(name, ())), default=0)
        except CycleError:  # Argo runs no such Workflow
            return defaultdict(int)
        return levels

    @cached_property
    def _waits(self) -> Mapping[str, frozenset[str]]:
        """The tasks that each task comes after."""
        return {task["name"]: awaited_tasks(task) for task in self.binding.pipeline.tasks()}

    def _tasks_behind(self, tasks: set[str]) -> set[str]:
        """The tasks that come after one of ``tasks``."""
        behind: set[str] = set()
        for name in sorted(self._level, key=lambda name: self._level[name]) if tasks else ():
            if not self._waits.get(name, frozenset()).isdisjoint(tasks | behind):
                behind.add(name)
        return behind

    def _is_superseded(self) -> bool:
        key = RunLayout(self.binding.run).submission(self.binding.submission + 1)
        return find_record(self._store, key, SubmissionClaim) is not None

    def _try_step(self, job: _RecordingJob, _: int, node: StepNode) -> bool:
        """Record one step; False if it has to be looked at again soon."""
        if time.monotonic() > job.deadline:
            return False
        try:
            return self._record_step(job, node)
        except (IntegrityError, UsageError, ConflictError, NotFoundError) as error:
            self._faults[node.instance] = str(error)  # those of other steps do not wait for a person
        except RecursionError:  # of the location of an artifact
            self._faults[node.instance] = "its inputs are nested deeper than their hash can be computed"
        except UnicodeEncodeError:  # JSON can spell half a character
            self._faults[node.instance] = "its node holds a text that is not valid Unicode"
        return True

    def _record_step(self, job: _RecordingJob, node: StepNode) -> bool:
        """Record one step; False while its outputs are being hashed."""
        spec = self.specs[node.task]
        known = self._attempts.get(node.instance)
        if known is None:
            item = node.input_values().get(ITEM_PARAMETER, "") if spec.fan_out else ""
            step = resolve_step_id(self._store, self.binding, spec, node.instance, item, self._bound_items)
            attempt = self._find_or_claim(job, step, spec, node, item)
            if attempt is None:
                return True
            self._attempts[node.instance] = known = step, _without_outputs(attempt)
        step, attempt = known
        if attempt.end is None and node.has_ended:
            if (end := self._end(job, spec, attempt.claim, node)) is None:
                return False
            self._attempts[node.instance] = step, _without_outputs(attempt._replace(end=end))
        return True

    def _find_or_claim(
        self, job: _RecordingJob, step: str, spec: StepSpec, node: StepNode, item: str
    ) -> _Attempt | None:
        """The attempt of a node, which is claimed if it has none; None if a later submission has the step."""
        run, key = self.binding.run, None
        layout = RunLayout(run)
        for _ in range(_CLAIM_TRIES):
            last, ended = self._list_attempts().get(step, (0, frozenset()))
            if last:
                claim = read_record(self._store, layout.attempt(step, last), AttemptClaim)
                if (claim.uid, claim.instance) == (self.binding.uid, node.instance):
                    return _Attempt(claim, self._read_end(step, spec, last) if last in ended else None)
                if claim.submission > self.binding.submission:
                    return None
                if last not in ended:
                    message = f"submission {self.binding.submission} has started the step again"
                    fence_attempt(self._store, run, step, last, message)
            if job.is_superseded:
                return None
            key = key or compute_step_key(self._store, spec, self._inputs(node, item, job.parameters))
            claim = self._build_claim(step, spec, node, key, last + 1)
            failpoint("record.before_claim")
            stored = claim_record(self._store, layout.attempt(step, last + 1), claim).record
            failpoint("record.after_claim")
            if (stored.uid, stored.instance) == (claim.uid, claim.instance):  # of this or of another recorder
                return _Attempt(stored, None)
            with self._listing_lock:
                self._listed = None
        raise ConflictError(f"{_CLAIM_TRIES} other attempts of {step} were opened at the same time")

    def _read_end(self, step: str, spec: StepSpec, attempt: int) -> AttemptEnd:
        end = read_attempt_end(self._store, self.binding.run, step, attempt)
        if end.outcome is AttemptEndOutcome.DONE:
            write_derived_records(self._store, spec, end)
        return end

    def _list_attempts(self) -> Mapping[str, tuple[int, frozenset[int]]]:
        with self._listing_lock:
            if self._listed is None:
                claimed, ended = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
                for info in self._store.list(RunLayout(self.binding.run).attempts):
                    if (key := parse_attempt(info.key)) is not None:
                        (ended if key.is_end else claimed)[key.step].add(key.attempt)
                self._listed = {step: (max(numbers), frozenset(ended[step])) for step, numbers in claimed.items()}
            return self._listed

    def _inputs(self, node: StepNode, item: str, parameters: Mapping[str, str]) -> StepInputs:
        values = {name: value for name, value in node.input_values().items() if name != ITEM_PARAMETER}
        used = {f"workflow.parameters.{name}": parameters.get(name, "") for name in self._parameters_used(node.task)}
        return StepInputs({**values, **used}, node.input_artifacts(), item)

    def _parameters_used(self, task: str) -> list[str]:
        pipeline = self.binding.pipeline
        template = next(entry["template"] for entry in pipeline.tasks() if entry["name"] == task)
        if template not in self._used_by_template:
            self._used_by_template[template] = workflow_parameters_used(find_template(pipeline.manifest, template))
        return self._used_by_template[template]

    def _build_claim(self, step: str, spec: StepSpec, node: StepNode, key: StepKey, number: int) -> AttemptClaim:
        binding = self.binding
        started = _read_time((node.tries[0] if node.tries else node.node).get("startedAt"))
        return AttemptClaim(
            run=binding.run,
            step=step,
            attempt=number,
            submission=binding.submission,
            uid=binding.uid,
            node=node.instance,
            instance=node.instance,
            step_key=key.key,
            parameters=key.parameters,
            dataset=key.dataset,
            data=spec.data,
            **({"written_at": started} if started is not None else {}),
        )

    def _end(self, job: _RecordingJob, spec: StepSpec, claim: AttemptClaim, node: StepNode) -> AttemptEnd | None:
        """Record the end of an attempt; None while its outputs are being hashed."""
        if node.phase == "Succeeded":
            verified = verify_outputs(self._store, spec, claim, node, job.hash_objects, self._parameter_max_bytes)
            if verified is None:
                return None
            end = _done_or_failed(claim, node, verified)
            if isinstance(verified, VerifiedOutputs) and verified.prefix:
                write_output_origin(self._store, claim, verified.prefix)
        else:
            end = _failed_end(claim, node)
        failpoint("record.before_end")
        stored = claim_record(self._store, RunLayout(claim.run).attempt_end(claim.step, claim.attempt), end)
        failpoint("record.after_end")
        if stored.record.outcome is AttemptEndOutcome.DONE:
            write_derived_records(self._store, spec, stored.record)
        if stored.is_ours:
            self._on_end(stored.record)
        return stored.record


def _without_outputs(attempt: _Attempt) -> _Attempt:
    """What a recorder keeps: a service has a thousand of them, and an end may name 15,000 objects."""
    return attempt._replace(end=attempt.end.model_copy(update={"outputs": ()})) if attempt.end else attempt


def _done_or_failed(claim: AttemptClaim, node: StepNode, verified: VerifiedOutputs | OutputFault) -> AttemptEnd:
    if isinstance(verified, OutputFault):
        return _build_end(
            claim, node, AttemptEndOutcome.FAILED, cause=verified.cause, message=verified.message, exit_code=0
        )
    return _build_end(
        claim,
        node,
        AttemptEndOutcome.DONE,
        exit_code=0,
        outputs=verified.outputs,
        outputs_prefix=verified.prefix,
    )


class _NodeMessage(NamedTuple):
    """The message of the node of a pod that failed."""

    reason: str
    """What Kubernetes and Argo say."""
    exit_code: int | None
    program: str
    """The end of the log of the program."""

    @classmethod
    def of(cls, node: Mapping[str, Any], exit_code: str = "") -> "_NodeMessage":
        """Part the message: Argo appends the termination message to its own words (``inferFailedReason``)."""
        text = str(node.get("message") or "")
        match = _EXIT_OF_MAIN.match(text)
        code = exit_code if _EXIT_CODE.fullmatch(exit_code) else match[2] if match else ""
        program = str(node.get("terminationMessage") or (match[3] if match else "") or "")
        return cls(match[1] if match else text, int(code) if code else None, program)


def _failed_end(claim: AttemptClaim, node: StepNode) -> AttemptEnd:
    reason, exit_code, program = _NodeMessage.of(node.last_try, str(node.outputs.get("exitCode") or ""))
    reason_of_all = _NodeMessage.of(node.node).reason
    message = reason or reason_of_all
    # Not in the log: a program may write that it was stopped with a strategy of its own.
    if is_shutdown_message(message) or is_shutdown_message(reason_of_all):
        return _build_end(
            claim, node, AttemptEndOutcome.FENCED, message=STOPPED_MESSAGE, exit_code=exit_code, stopped=True
        )
    observed = AttemptObservation(
        status=node.phase,
        exit_code=exit_code,
        pod_message=message,
        termination_message=program,
        node=str(node.last_try.get("hostNodeName") or ""),
    )
    verdict = classify_failure(observed)
    is_unexplained = verdict.rule in _UNEXPLAINED_RULES and message not in verdict.evidence
    said = f"; Argo: {message[:_MAX_ARGO_MESSAGE_CHARACTERS]}" if is_unexplained else ""
    evidence = None
    if verdict.rule:
        evidence = FailureEvidence(rule=verdict.rule, matched_text=verdict.matched_text, node=observed.node)
    return _build_end(
        claim,
        node,
        AttemptEndOutcome.FAILED,
        cause=verdict.cause or Cause.UNKNOWN,
        message=f"{verdict.evidence}{said}",
        evidence=evidence,
        exit_code=observed.effective_exit_code,
    )


def _build_end(claim: AttemptClaim, node: StepNode, outcome: AttemptEndOutcome, **fields: Any) -> AttemptEnd:
    return AttemptEnd(
        run=claim.run,
        step=claim.step,
        attempt=claim.attempt,
        submission=claim.submission,
        outcome=outcome,
        last_alive_at=_read_time(node.node.get("finishedAt")),
        step_key=claim.step_key,
        **fields,
    )
