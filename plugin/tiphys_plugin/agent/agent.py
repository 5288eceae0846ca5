"""The agent's threads: one watches each namespace, some ask, some write, and one keeps the time.

They share a `Board` under one lock. Nothing else is shared, and nothing
outlives `Agent.run`: a new leader begins with what the API server holds.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import ChangeType, KubeApi, Synced, changes
from tiphys.kube.resources import WORKFLOW_TASK_SETS
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.patch import still_waits, write
from tiphys_plugin.agent.plugin_calls import Execute, ask
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.task_sets import read_task_set
from tiphys_plugin.agent.task_state import Board, Checking, Question, Writing

_LONGEST_SLEEP = 5.0
_log = structlog.get_logger()


class Agent:
    """Answers the task sets of some namespaces while it leads.

    Args:
        api: The API server.
        execute: What answers for a namespace.
        namespaces: Those to watch; ``[None]`` for all with one watch.
        leads: Whether this process may write at this moment; asked right before each write.
        metrics: What it counts.
        settings: How busy and how patient it is.
        monotonic: Seconds on a clock that never jumps.
    """

    def __init__(
        self,
        api: KubeApi,
        execute: Execute,
        namespaces: Sequence[str | None],
        leads: Callable[[], bool],
        metrics: AgentMetrics,
        settings: AgentSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._execute = execute
        self._namespaces = namespaces
        self._leads = leads
        self._metrics = metrics
        self._settings = settings or AgentSettings()
        self._now = monotonic
        self._unwatched: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """Why it does not see its task sets; empty if it sees them all, or does not lead."""
        return "; ".join(self._unwatched.values())

    def run(self, over: threading.Event) -> None:
        """Answer until ``over``; then finish the calls under way, and write what is known while that is allowed."""
        _Session(self, over).run()

    def _lost_sight(self, namespace: str | None, error: TiphysError) -> None:
        where = f"namespace {namespace}" if namespace else "all namespaces"
        _log.warning("agent.watch_failed", namespace=namespace or "", error=str(error))
        self._unwatched[where] = f"the task sets of {where} cannot be watched: {error}"

    def _in_sight(self, namespace: str | None) -> None:
        self._unwatched.pop(f"namespace {namespace}" if namespace else "all namespaces", None)


class _Session:
    """One term of leadership."""

    def __init__(self, agent: Agent, over: threading.Event) -> None:
        self._agent = agent
        self._over = over
        self._settings = agent._settings
        self._now = agent._now
        self._board = Board(self._settings, agent._metrics)
        self._lock = threading.Lock()
        self._questions = threading.Condition(self._lock)
        self._jobs = threading.Condition(self._lock)
        self._time = threading.Condition(self._lock)
        self._ended = False

    def run(self) -> None:
        self._show_metrics(self._board)
        self._start("over", self._await_end)
        for namespace in self._agent._namespaces:
            self._start("watch", partial(self._watch, namespace))
        workers = [self._start("ask", self._work) for _ in range(self._settings.workers)]
        writers = [self._start("write", self._write) for _ in range(self._settings.writers)]
        while not self._over.is_set():
            self._tick()
        self._finish(workers, writers)
        self._show_metrics(None)

    def _finish(self, workers: list[threading.Thread], writers: list[threading.Thread]) -> None:
        deadline = self._now() + self._settings.drain_seconds
        with self._changing():
            self._board.closing = True
            self._questions.notify_all()
        for worker in workers:
            worker.join(max(0.0, deadline - self._now()))
        with self._changing():
            self._board.close(self._now())
        while self._agent._leads() and not self._board.idle and self._now() < deadline:
            self._tick()
        with self._lock:
            self._ended = True
            self._jobs.notify_all()
        for writer in writers:
            writer.join(max(0.0, deadline - self._now()))

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001  the worker loop: a bug ends this term, and the next begins anew
                _log.exception("agent.crashed", thread=name)
                self._over.set()

        thread = threading.Thread(target=guarded, name=f"agent-{name}", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards wake those who have something to do now."""
        with self._lock:
            yield
            self._questions.notify(self._board.question_count)
            self._jobs.notify(self._board.job_count)
            self._time.notify()

    def _tick(self) -> None:
        with self._lock:
            wait = self._board.tick(self._now())
            self._questions.notify(self._board.question_count)
            self._jobs.notify(self._board.job_count)
            if not self._over.is_set() or not self._board.idle:
                self._time.wait(min(wait, _LONGEST_SLEEP) if wait is not None else _LONGEST_SLEEP)

    def _await_end(self) -> None:
        self._over.wait()
        with self._lock:
            self._time.notify()

    def _watch(self, namespace: str | None) -> None:
        while not self._over.is_set():
            try:
                self._follow(namespace)
            except TiphysError as error:
                self._lost_sight(namespace, error)
                self._over.wait(self._settings.most_retry_seconds)

    def _lost_sight(self, namespace: str | None, error: TiphysError) -> None:
        if not self._over.is_set():
            self._agent._lost_sight(namespace, error)

    def _follow(self, namespace: str | None) -> None:
        events = changes(
            self._agent._api,
            WORKFLOW_TASK_SETS,
            namespace,
            timeout_seconds=self._settings.watch_seconds,
            pause=self._over.wait,
            stopped=self._over.is_set,
            lost=partial(self._lost_sight, namespace),
        )
        for event in events:
            self._agent._in_sight(namespace)
            if isinstance(event, Synced):
                found = [read_task_set(one) for one in event.objects]
                with self._changing():
                    self._board.synced(namespace, found, self._now())
                continue
            task_set = read_task_set(event.object)
            with self._changing():
                if event.type is ChangeType.DELETED:
                    self._board.gone(task_set.key)
                else:
                    self._board.observe(task_set, self._now())

    def _work(self) -> None:
        question = self._next_question()
        while question is not None:
            node, task_set = question.node, question.task_set
            answer = ask(self._agent._execute, task_set, node.template, node.failures, self._settings)
            with self._changing():
                now = self._now()
                self._board.answered(question, answer, now)
                question = self._board.question(now)  # at once, so that nobody is woken for it
            question = question or self._next_question()

    def _next_question(self) -> Question | None:
        with self._lock:
            while not self._board.closing:
                if (question := self._board.question(self._now())) is not None:
                    return question
                self._questions.wait()
        return None

    def _write(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, Writing):
                written = write(self._agent._api, job.task_set, job.changes, self._agent._leads)
                with self._changing():
                    self._board.wrote(job, written, self._now())
            else:
                self._check(job)

    def _next_job(self) -> Writing | Checking | None:
        with self._lock:
            while not self._ended:
                if (job := self._board.job(self._now())) is not None:
                    return job
                self._time.notify()  # there may be nothing left to wait for
                self._jobs.wait()
        return None

    def _check(self, job: Checking) -> None:
        waits: bool | None = None
        try:
            waits = still_waits(self._agent._api, job.task_set, job.node.id)
        except StoreError as error:
            _log.warning("agent.check_failed", workflow=job.task_set.name, error=str(error))
        with self._changing():
            self._board.checked(job, waits, self._now())

    def _show_metrics(self, board: Board | None) -> None:
        def shown(value: Callable[[Board], int]) -> Callable[[], float]:
            def read() -> float:
                with self._lock:
                    return float(value(board)) if board else 0.0

            return read

        metrics = self._agent._metrics
        metrics.open_tasks.set_function(shown(lambda one: one.open_tasks))
        metrics.foreign_tasks.set_function(shown(lambda one: one.foreign_tasks))
        metrics.queue.set_function(shown(lambda one: one.queue_length))
