"""Everything the agent knows and intends, without threads, I/O or a clock: who is asked, and what is written, next.

`loop` calls it under one lock and tells it the time. After a restart it is
built anew from the task sets; the core's recorded answers make it harmless to
ask again.

What has to happen later, on a clock that the caller reads.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import structlog

from tiphys_plugin.agent.fair_queue import Share, Turns
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.patch import Outcome, Written, give_way, some_of
from tiphys_plugin.agent.plugin_calls import Answer
from tiphys_plugin.agent.settings import AgentSettings, Pace
from tiphys_plugin.agent.task_sets import Entry, Memory, Node, TaskSet, is_final

Action = TypeVar("Action")


class Timetable(Generic[Action]):
    """Actions by the time at which they are due; those of the same time in the order in which they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def add(self, due: float, action: Action) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), action))

    def take(self, now: float) -> list[Action]:
        """What is due."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            taken.append(heapq.heappop(self._heap)[2])
        return taken

    def wait(self, now: float) -> float | None:
        """Seconds until something is due; None if nothing is."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None


_log = structlog.get_logger()


@dataclass(eq=False)
class Served:
    """One task set, and how writing to it goes."""

    memory: Memory
    pace: Pace
    asking: int = 0
    """Nodes about which a call is under way, or waits for a worker."""
    due: float | None = None
    """When the patch that is planned goes out."""
    queued: bool = False
    """A patch waits for a writer."""
    writing: bool = False
    most_entries: int | None = None
    """Larger patches were refused."""
    told: bool = False
    """The log has said that others have to answer some of its tasks."""


def _namespace(served: Served) -> str:
    return served.memory.task_set.namespace


class Question(NamedTuple):
    served: Served
    node: Node
    task_set: TaskSet
    queued_at: float


class Writing(NamedTuple):
    served: Served
    task_set: TaskSet
    changes: dict[str, Entry | None]
    began_at: float


class Checking(NamedTuple):
    """Does the workflow still wait for a node whose stored answer is gone?"""

    served: Served
    node: Node
    task_set: TaskSet


class Board:
    """Not thread-safe. Times are seconds on one monotonic clock."""

    def __init__(self, settings: AgentSettings, metrics: AgentMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._served: dict[tuple[str, str], Served] = {}
        self._turns: Turns[Served, Question] = Turns(
            Share(id, max(1, settings.workers // 2)), Share(_namespace, max(1, settings.workers * 3 // 4))
        )
        self._timetable: Timetable[Callable[[float], None]] = Timetable()
        self._writes: deque[Served] = deque()
        self._checks: deque[Checking] = deque()
        self.closing = False
        """No more questions; what is known is written at once."""

    # What happens in the cluster

    def observe(self, task_set: TaskSet, now: float) -> None:
        """Take in a version of a task set."""
        served = self._served.get(task_set.key)
        if served is None or served.memory.task_set.uid != task_set.uid:
            if not task_set.tasks and not task_set.entries:
                return  # of a finished workflow, as most are
            self.gone(task_set.key)
            served = self._served[task_set.key] = Served(Memory(task_set), Pace(self._settings))
        seen = served.memory.observe(task_set, now)
        for node in seen.ask:
            self._ask_first(served, node, now)
        for node in seen.delivered:
            self._metrics.answer_seconds.observe(now - node.seen_at)
        for node in seen.lost:
            self._check_later(served, node, now)
        self._tell_foreign(served)
        self._plan(served, now)

    def synced(self, namespace: str | None, found: Iterable[TaskSet], now: float) -> None:
        """Take in all task sets there are, of one namespace or (None) of all."""
        there = {task_set.key: task_set for task_set in found}
        for key in self._served.keys() - there.keys():
            if namespace in (None, key[0]):
                self.gone(key)
        for task_set in there.values():
            self.observe(task_set, now)

    def gone(self, key: tuple[str, str]) -> None:
        """A task set was deleted."""
        served = self._served.pop(key, None)
        if served is not None:
            self._turns.drop(served)
            served.memory.nodes.clear()

    # What the workers ask

    def question(self, now: float) -> Question | None:
        """The next node to be asked about. Give the answer to `answered`."""
        taken = None if self.closing else self._turns.take()
        if taken is None:
            return None
        self._metrics.queue_seconds.observe(now - taken[1].queued_at)
        return taken[1]

    def answered(self, question: Question, answer: Answer, now: float) -> None:
        served, node = question.served, question.node
        self._turns.done(served)
        served.asking -= 1
        node.asking = False
        node.failures = node.failures + 1 if answer.failed else 0
        if served.memory.expects(node):
            self._take_in(served, node, answer, now)
        self._plan(served, now)

    # What the writers do

    def job(self, now: float) -> Writing | Checking | None:
        """The next thing to be written or looked up. Give the outcome to `wrote` or `checked`."""
        while self._writes:
            served = self._writes.popleft()
            served.queued = False
            if changes := some_of(served.memory.changes(), served.most_entries):
                served.writing = True
                return Writing(served, served.memory.task_set, changes, now)
        return self._checks.popleft() if self._checks else None

    def wrote(self, job: Writing, written: Written, now: float) -> None:
        served = job.served
        served.writing = False
        self._metrics.patches.labels(outcome=written.outcome).inc()
        match written.outcome:
            case Outcome.WRITTEN:
                self._metrics.patched_nodes.inc(len(job.changes))
                served.pace.wrote(job.began_at, now)
                served.most_entries = served.most_entries and served.most_entries * 2
            case Outcome.CONFLICT:
                served.pace.failures = 0
                if written.task_set is None:
                    return self._forget(served)
            case Outcome.REFUSED:
                served.most_entries = give_way(served.memory, job.changes, written.error)
                served.pace.failures += not served.most_entries
            case Outcome.UNREACHABLE | Outcome.NOT_LEADING:
                served.pace.failures += 1
        if written.error:
            _log.warning(
                "agent.patch_failed",
                outcome=written.outcome,
                workflow=job.task_set.name,
                namespace=job.task_set.namespace,
                error=written.error,
            )
        if written.task_set is not None:
            self.observe(written.task_set, now)
        self._plan(served, now)
        return None

    def checked(self, job: Checking, waits: bool | None, now: float) -> None:
        """``waits`` None: it could not be found out."""
        if waits and job.served.memory.reopen(job.node):
            _log.info("agent.asked_again", workflow=job.task_set.name, node=job.node.id)
            self._enqueue(job.served, job.node, now)
        elif job.served.memory.lost(job.node):
            self._check_later(job.served, job.node, now)

    # Time

    def tick(self, now: float) -> float | None:
        """Do what is due; seconds until something else will be."""
        for action in self._timetable.take(now):
            action(now)
        return self._timetable.wait(now)

    def close(self, now: float) -> None:
        """Ask no more; write what is known at once."""
        self.closing = True
        for served in self._served.values():
            self._plan(served, now)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, or known and not written."""
        return not any(one.writing or one.queued or one.memory.changes() for one in self._served.values())

    @property
    def open_tasks(self) -> int:
        return sum(1 for served in self._served.values() for _ in served.memory.open)

    @property
    def foreign_tasks(self) -> int:
        return sum(len(served.memory.foreign) for served in self._served.values())

    @property
    def job_count(self) -> int:
        return len(self._writes) + len(self._checks)

    @property
    def question_count(self) -> int:
        """How many workers have something to ask now."""
        return self._turns.ready(self._settings.workers)

    @property
    def queue_length(self) -> int:
        return len(self._turns)

    def _ask_first(self, served: Served, node: Node, now: float) -> None:
        owner = served.memory.task_set.workflow_uid
        if node.body_uid in ("", owner):
            self._enqueue(served, node, now)
        else:
            due = now + self._settings.other_uid_seconds
            self._timetable.add(due, partial(self._ask_again, served, node, node.asked))

    def _take_in(self, served: Served, node: Node, answer: Answer, now: float) -> None:
        if answer.again_in is not None:
            self._timetable.add(now + answer.again_in, partial(self._ask_again, served, node, node.asked))
        if answer.entry is None or not served.memory.answer(node, answer.entry):
            return
        if answer.again_in is not None and node.wanted is answer.entry:
            self._fade_later(served, node, answer.entry, now)

    def _ask_again(self, served: Served, node: Node, asked: int, now: float) -> None:
        if node.asked == asked and served.memory.expects(node):
            self._enqueue(served, node, now)

    def _enqueue(self, served: Served, node: Node, now: float) -> None:
        if node.asking:
            return
        node.asking = True
        node.asked += 1
        served.asking += 1
        self._turns.add(served, Question(served, node, served.memory.task_set, now))

    def _fade_later(self, served: Served, node: Node, entry: Entry, now: float) -> None:
        self._timetable.add(now + self._settings.fade_seconds, partial(self._fade, served, node, entry))

    def _fade(self, served: Served, node: Node, entry: Entry, now: float) -> None:
        if served.memory.fade(node, entry):
            self._plan(served, now)
        else:
            self._fade_later(served, node, entry, now)

    def _check_later(self, served: Served, node: Node, now: float) -> None:
        self._timetable.add(now + self._settings.lost_seconds, partial(self._check, served, node))

    def _check(self, served: Served, node: Node, now: float) -> None:  # noqa: ARG002  the shape of an action
        if served.memory.lost(node):
            self._checks.append(Checking(served, node, served.memory.task_set))

    def _plan(self, served: Served, now: float) -> None:
        """Have the task set written soon, if there is anything to write."""
        if served.queued or served.writing or (served.due is not None and served.asking):
            return
        if not (changes := served.memory.changes()):
            return
        last = self.closing or (not served.asking and any(map(is_final, changes.values())))
        due = served.pace.due(now, last)
        if due <= now:
            self._queue(served)
        elif served.due is None or due < served.due:
            served.due = due
            self._timetable.add(due, partial(self._write, served, due))

    def _write(self, served: Served, due: float, now: float) -> None:  # noqa: ARG002  the shape of an action
        if served.due == due:  # else it was overtaken
            self._queue(served)

    def _queue(self, served: Served) -> None:
        served.due, served.queued = None, True
        self._writes.append(served)

    def _forget(self, served: Served) -> None:
        key = served.memory.task_set.key
        if self._served.get(key) is served:
            self.gone(key)

    def _tell_foreign(self, served: Served) -> None:
        if served.told or not (foreign := served.memory.foreign):
            return
        served.told = True
        kinds = sorted({"HTTP templates" if "http" in one else "other plugins" for one in foreign})
        _log.warning(
            "agent.foreign_tasks",
            workflow=served.memory.task_set.name,
            namespace=served.memory.task_set.namespace,
            hint=f"this workflow uses {' and '.join(kinds)}, which this agent does not answer: with Argo's "
            "disableAgentPodCreation nobody does, and they stay Pending; see docs/shared-agent.md",
        )
