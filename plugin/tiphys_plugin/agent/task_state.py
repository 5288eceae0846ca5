"""The whole state of the agent, without threads, I/O or a clock: which call and which patch come next.

`tiphys_plugin.agent.agent` calls it under one lock and passes the time, so that
tests can replay any order of events. After a restart the state is rebuilt from
the task sets. Repeated calls are harmless, because the core has recorded its
replies.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import structlog

from tiphys_plugin.agent.fair_queue import ConcurrencyLimit, FairQueue
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.patch import PatchOutcome, PatchResult, limit_changes, shrink_refused_patch
from tiphys_plugin.agent.plugin_calls import CallResult
from tiphys_plugin.agent.settings import AgentSettings, PatchDebounce
from tiphys_plugin.agent.task_sets import NodeEntry, TaskNode, TaskSet, TaskSetState, is_final

Action = TypeVar("Action")
_log = structlog.get_logger()


class TimerQueue(Generic[Action]):
    """Actions by due time; actions of the same time keep the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def add(self, due_at: float, action: Action) -> None:
        heapq.heappush(self._heap, (due_at, next(self._numbers), action))

    def pop_due(self, now: float) -> list[Action]:
        """Remove and return the actions that are due."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until the next action is due; None if the queue is empty."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None


@dataclass(eq=False)
class ServedTaskSet:
    """One task set, with the progress of its calls and patches."""

    state: TaskSetState
    debounce: PatchDebounce
    open_calls: int = 0
    """Number of nodes with a call that is in progress, or waits for a worker."""
    patch_due_at: float | None = None
    """When the planned patch is due; None if none is planned."""
    patch_queued: bool = False
    """Whether a patch waits for a writer."""
    patch_in_progress: bool = False
    max_entries: int | None = None
    """Limit of the entries in a patch, after a larger one was refused; None for no limit."""
    foreign_tasks_logged: bool = False
    """Whether the log has a warning about tasks that this agent does not answer."""


def _namespace_of(served: ServedTaskSet) -> str:
    return served.state.task_set.namespace


class PendingCall(NamedTuple):
    """A call about a node that waits for a worker, or is in progress."""

    served: ServedTaskSet
    node: TaskNode
    task_set: TaskSet
    queued_at: float


class PatchJob(NamedTuple):
    """A patch of a task set for a writer."""

    served: ServedTaskSet
    task_set: TaskSet
    changes: dict[str, NodeEntry | None]
    began_at: float


class LostAnswerCheck(NamedTuple):
    """A check for a writer: whether the workflow still waits for a node whose stored answer has disappeared."""

    served: ServedTaskSet
    node: TaskNode
    task_set: TaskSet


class AgentState:
    """Task sets, calls, timers and planned patches. Not thread-safe; times are seconds on one monotonic clock."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._served: dict[tuple[str, str], ServedTaskSet] = {}
        self._call_queue: FairQueue[ServedTaskSet, PendingCall] = FairQueue(
            ConcurrencyLimit(id, max(1, settings.workers // 2)),
            ConcurrencyLimit(_namespace_of, max(1, settings.workers * 3 // 4)),
        )
        self._timers: TimerQueue[Callable[[float], None]] = TimerQueue()
        self._patch_queue: deque[ServedTaskSet] = deque()
        self._check_queue: deque[LostAnswerCheck] = deque()
        self.closing = False
        """Whether the agent shuts down: no further calls, and pending changes are written at once."""

    # Changes in the cluster

    def observe(self, task_set: TaskSet, now: float) -> None:
        """Apply a version of a task set."""
        served = self._served.get(task_set.key)
        if served is None or served.state.task_set.uid != task_set.uid:
            if not task_set.tasks and not task_set.entries:
                return  # most task sets are of finished workflows
            self.remove(task_set.key)
            served = self._served[task_set.key] = ServedTaskSet(TaskSetState(task_set), PatchDebounce(self._settings))
        changes = served.state.observe(task_set, now)
        for node in changes.new_nodes:
            self._call_new_node(served, node, now)
        for node in changes.delivered:
            self._metrics.answer_seconds.observe(now - node.first_seen_at)
        for node in changes.lost_answers:
            self._check_later(served, node, now)
        self._log_foreign_tasks(served)
        self._plan_patch(served, now)

    def observe_all(self, namespace: str | None, task_sets: Iterable[TaskSet], now: float) -> None:
        """Apply a full list of the task sets of one namespace, or of all if ``namespace`` is None."""
        listed = {task_set.key: task_set for task_set in task_sets}
        for key in self._served.keys() - listed.keys():
            if namespace in (None, key[0]):
                self.remove(key)
        for task_set in listed.values():
            self.observe(task_set, now)

    def remove(self, key: tuple[str, str]) -> None:
        """Drop a deleted task set."""
        served = self._served.pop(key, None)
        if served is not None:
            self._call_queue.drop(served)
            served.state.nodes.clear()

    # Calls of the workers

    def next_call(self, now: float) -> PendingCall | None:
        """The next call for a worker, which passes the result to `record_answer`; None if there is none."""
        entry = None if self.closing else self._call_queue.take()
        if entry is None:
            return None
        _, call = entry
        self._metrics.queue_seconds.observe(now - call.queued_at)
        return call

    def record_answer(self, call: PendingCall, answer: CallResult, now: float) -> None:
        """Apply the result of a call, and plan its patch or its repetition."""
        served, node = call.served, call.node
        self._call_queue.release(served)
        served.open_calls -= 1
        node.call_in_progress = False
        node.failures = node.failures + 1 if answer.failed else 0
        if served.state.awaits_answer(node):
            self._apply_answer(served, node, answer, now)
        self._plan_patch(served, now)

    # Jobs of the writers

    def next_job(self, now: float) -> PatchJob | LostAnswerCheck | None:
        """The next job for a writer, which passes the outcome to `record_patch` or `record_check`."""
        while self._patch_queue:
            served = self._patch_queue.popleft()
            served.patch_queued = False
            if changes := limit_changes(served.state.status_changes(), served.max_entries):
                served.patch_in_progress = True
                return PatchJob(served, served.state.task_set, changes, now)
        return self._check_queue.popleft() if self._check_queue else None

    def record_patch(self, job: PatchJob, result: PatchResult, now: float) -> None:
        """Apply the outcome of a patch, and plan the next one."""
        served = job.served
        served.patch_in_progress = False
        self._metrics.patches.labels(outcome=result.outcome).inc()
        match result.outcome:
            case PatchOutcome.WRITTEN:
                self._metrics.patched_nodes.inc(len(job.changes))
                served.debounce.record_patch(job.began_at, now)
                served.max_entries = served.max_entries and served.max_entries * 2
            case PatchOutcome.CONFLICT:
                served.debounce.failures = 0
                if result.task_set is None:
                    return self._remove_if_current(served)
            case PatchOutcome.REFUSED:
                served.max_entries = shrink_refused_patch(served.state, job.changes, result.error)
                served.debounce.failures += not served.max_entries
            case PatchOutcome.UNREACHABLE | PatchOutcome.NOT_LEADING:
                served.debounce.failures += 1
        if result.error:
            _log.warning(
                "agent.patch_failed",
                outcome=result.outcome,
                workflow=job.task_set.name,
                namespace=job.task_set.namespace,
                error=result.error,
            )
        if result.task_set is not None:
            self.observe(result.task_set, now)
        self._plan_patch(served, now)
        return None

    def record_check(self, job: LostAnswerCheck, is_awaited: bool | None, now: float) -> None:
        """Apply the outcome of a check; ``is_awaited`` is None if the Workflow could not be read."""
        if is_awaited and job.served.state.reopen(job.node):
            _log.info("agent.asked_again", workflow=job.task_set.name, node=job.node.id)
            self._enqueue(job.served, job.node, now)
        elif job.served.state.is_answer_lost(job.node):
            self._check_later(job.served, job.node, now)

    # Time

    def tick(self, now: float) -> float | None:
        """Run the actions that are due; returns the seconds until the next one, or None."""
        for action in self._timers.pop_due(now):
            action(now)
        return self._timers.seconds_until_due(now)

    def close(self, now: float) -> None:
        """Start no more calls, and write pending changes at once."""
        self.closing = True
        for served in self._served.values():
            self._plan_patch(served, now)

    @property
    def idle(self) -> bool:
        """Whether no patch is queued or in progress, and no change waits to be written."""
        return not any(
            served.patch_in_progress or served.patch_queued or served.state.status_changes()
            for served in self._served.values()
        )

    @property
    def open_tasks(self) -> int:
        return sum(1 for served in self._served.values() for _ in served.state.open_nodes)

    @property
    def foreign_tasks(self) -> int:
        return sum(len(served.state.foreign_templates) for served in self._served.values())

    @property
    def job_count(self) -> int:
        return len(self._patch_queue) + len(self._check_queue)

    @property
    def ready_call_count(self) -> int:
        """Number of workers that could start a call now."""
        return self._call_queue.count_ready(self._settings.workers)

    @property
    def queue_length(self) -> int:
        return len(self._call_queue)

    def _call_new_node(self, served: ServedTaskSet, node: TaskNode, now: float) -> None:
        owner = served.state.task_set.workflow_uid
        if node.template_workflow_uid in ("", owner):
            self._enqueue(served, node, now)
        else:
            due = now + self._settings.stale_task_seconds
            self._timers.add(due, partial(self._call_again, served, node, node.call_count))

    def _apply_answer(self, served: ServedTaskSet, node: TaskNode, answer: CallResult, now: float) -> None:
        if answer.repeat_in_seconds is not None:
            self._timers.add(now + answer.repeat_in_seconds, partial(self._call_again, served, node, node.call_count))
        if answer.entry is None or not served.state.record_answer(node, answer.entry):
            return
        if answer.repeat_in_seconds is not None and node.desired_entry is answer.entry:
            self._withdraw_pending_later(served, node, answer.entry, now)

    def _call_again(self, served: ServedTaskSet, node: TaskNode, call_count: int, now: float) -> None:
        if node.call_count == call_count and served.state.awaits_answer(node):
            self._enqueue(served, node, now)

    def _enqueue(self, served: ServedTaskSet, node: TaskNode, now: float) -> None:
        if node.call_in_progress:
            return
        node.call_in_progress = True
        node.call_count += 1
        served.open_calls += 1
        self._call_queue.add(served, PendingCall(served, node, served.state.task_set, now))

    def _withdraw_pending_later(self, served: ServedTaskSet, node: TaskNode, entry: NodeEntry, now: float) -> None:
        self._timers.add(
            now + self._settings.pending_lifetime_seconds, partial(self._withdraw_pending, served, node, entry)
        )

    def _withdraw_pending(self, served: ServedTaskSet, node: TaskNode, entry: NodeEntry, now: float) -> None:
        if served.state.withdraw_pending(node, entry):
            self._plan_patch(served, now)
        else:
            self._withdraw_pending_later(served, node, entry, now)

    def _check_later(self, served: ServedTaskSet, node: TaskNode, now: float) -> None:
        self._timers.add(now + self._settings.lost_answer_check_seconds, partial(self._queue_check, served, node))

    def _queue_check(self, served: ServedTaskSet, node: TaskNode, now: float) -> None:  # noqa: ARG002  the shape of an action
        if served.state.is_answer_lost(node):
            self._check_queue.append(LostAnswerCheck(served, node, served.state.task_set))

    def _plan_patch(self, served: ServedTaskSet, now: float) -> None:
        """Plan a patch of the task set, if it has changes to write."""
        if served.patch_queued or served.patch_in_progress or (served.patch_due_at is not None and served.open_calls):
            return
        if not (changes := served.state.status_changes()):
            return
        is_last = self.closing or (not served.open_calls and any(map(is_final, changes.values())))
        due_at = served.debounce.next_patch_at(now, is_last)
        if due_at <= now:
            self._queue_patch(served)
        elif served.patch_due_at is None or due_at < served.patch_due_at:
            served.patch_due_at = due_at
            self._timers.add(due_at, partial(self._queue_planned_patch, served, due_at))

    def _queue_planned_patch(self, served: ServedTaskSet, due_at: float, now: float) -> None:  # noqa: ARG002  the shape of an action
        if served.patch_due_at == due_at:  # otherwise an earlier patch was planned since
            self._queue_patch(served)

    def _queue_patch(self, served: ServedTaskSet) -> None:
        served.patch_due_at, served.patch_queued = None, True
        self._patch_queue.append(served)

    def _remove_if_current(self, served: ServedTaskSet) -> None:
        key = served.state.task_set.key
        if self._served.get(key) is served:
            self.remove(key)

    def _log_foreign_tasks(self, served: ServedTaskSet) -> None:
        if served.foreign_tasks_logged or not (foreign := served.state.foreign_templates):
            return
        served.foreign_tasks_logged = True
        kinds = sorted({"HTTP templates" if "http" in template else "other plugins" for template in foreign})
        _log.warning(
            "agent.foreign_tasks",
            workflow=served.state.task_set.name,
            namespace=served.state.task_set.namespace,
            hint=f"this workflow uses {' and '.join(kinds)}, which this agent does not answer. With Argo's "
            "disableAgentPodCreation no other agent answers them, so they stay Pending; see docs/shared-agent.md",
        )
