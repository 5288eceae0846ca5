"""The agent's threads: a watch per namespace, workers that call the core, writers that patch, and a timer.

They share one `AgentState` under one lock, and nothing else. No state outlives
`SharedAgent.run`, so a new leader starts with what the API server has stored.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEventType, watch_objects
from tiphys.kube.resources import WORKFLOW_TASK_SETS
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.patch import patch_task_set, workflow_awaits_node
from tiphys_plugin.agent.plugin_calls import ExecuteFunction, call_core
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.task_sets import parse_task_set
from tiphys_plugin.agent.task_state import AgentState, LostAnswerCheck, PatchJob, PendingCall
from tiphys_plugin.sidecar.outages import OutageClock

_MAX_SLEEP_SECONDS = 5.0
_log = structlog.get_logger()


def _check_readable(document: Object) -> Object:
    parse_task_set(document)
    return document


class SharedAgent:
    """Answers the task sets of its namespaces while this process is the leader.

    ``namespaces`` are those to watch; ``[None]``: all of the cluster, with one watch. ``is_leading`` tells whether this
    process may write now, and is called right before each write.
    """

    def __init__(
        self,
        api: KubeApi,
        execute: ExecuteFunction,
        namespaces: Sequence[str | None],
        is_leading: Callable[[], bool],
        metrics: AgentMetrics,
        settings: AgentSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._execute = execute
        self._namespaces = namespaces
        self._is_leading = is_leading
        self._metrics = metrics
        self._settings = settings or AgentSettings()
        self._now = monotonic
        self._watch_errors: dict[str, str] = {}

    @property
    def watch_error(self) -> str:
        """Why some task sets cannot be watched; empty if all can, or if this process does not lead."""
        return "; ".join(self._watch_errors.values())

    def run(self, stop: threading.Event) -> None:
        """Answer until ``stop``; then finish the calls in progress, and write their answers while it still leads."""
        _LeadershipTerm(self, stop).run()

    def _record_watch_error(self, namespace: str | None, error: TiphysError) -> None:
        where = f"namespace {namespace}" if namespace else "all namespaces"
        _log.warning("agent.watch_failed", namespace=namespace or "", error=str(error))
        self._watch_errors[where] = f"the task sets of {where} cannot be watched: {error}"

    def _clear_watch_error(self, namespace: str | None) -> None:
        self._watch_errors.pop(f"namespace {namespace}" if namespace else "all namespaces", None)


class _LeadershipTerm:
    """The threads and the state of one term of leadership."""

    def __init__(self, agent: SharedAgent, stop: threading.Event) -> None:
        self._agent = agent
        self._stop = stop
        self._settings = agent._settings
        self._now = agent._now
        self._state = AgentState(self._settings, agent._metrics)
        self._outages = OutageClock(self._settings.outage_limit_seconds, agent._now)
        self._lock = threading.Lock()
        self._call_available = threading.Condition(self._lock)
        self._job_available = threading.Condition(self._lock)
        self._time_changed = threading.Condition(self._lock)
        self._drained = False

    def run(self) -> None:
        self._export_gauges(self._state)
        self._start("over", self._await_stop)
        for namespace in self._agent._namespaces:
            self._start("watch", partial(self._watch, namespace))
        workers = [self._start("ask", self._run_calls) for _ in range(self._settings.workers)]
        writers = [self._start("write", self._run_jobs) for _ in range(self._settings.writers)]
        while not self._stop.is_set():
            self._tick()
        self._drain(workers, writers)
        self._export_gauges(None)

    def _drain(self, workers: list[threading.Thread], writers: list[threading.Thread]) -> None:
        deadline = self._now() + self._settings.drain_seconds
        with self._state_change():
            self._state.closing = True
            self._call_available.notify_all()
        for worker in workers:
            worker.join(max(0.0, deadline - self._now()))
        with self._state_change():
            self._state.close(self._now())
        while self._agent._is_leading() and not self._state.idle and self._now() < deadline:
            self._tick()
        with self._lock:
            self._drained = True
            self._job_available.notify_all()
        for writer in writers:
            writer.join(max(0.0, deadline - self._now()))

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001  the worker loop: a bug ends this term, and the next starts without its state
                _log.exception("agent.crashed", thread=name)
                self._stop.set()

        thread = threading.Thread(target=guarded, name=f"agent-{name}", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def _state_change(self) -> Iterator[None]:
        """Hold the lock while the state changes, then wake the threads that have work now."""
        with self._lock:
            yield
            self._call_available.notify(self._state.ready_call_count)
            self._job_available.notify(self._state.job_count)
            self._time_changed.notify()

    def _tick(self) -> None:
        with self._lock:
            wait = self._state.tick(self._now())
            self._call_available.notify(self._state.ready_call_count)
            self._job_available.notify(self._state.job_count)
            if not self._stop.is_set() or not self._state.idle:
                self._time_changed.wait(min(wait, _MAX_SLEEP_SECONDS) if wait is not None else _MAX_SLEEP_SECONDS)

    def _await_stop(self) -> None:
        self._stop.wait()
        with self._lock:
            self._time_changed.notify()

    def _watch(self, namespace: str | None) -> None:
        while not self._stop.is_set():
            try:
                self._watch_until_error(namespace)
            except TiphysError as error:
                self._record_watch_error(namespace, error)
                self._stop.wait(self._settings.max_retry_seconds)

    def _record_watch_error(self, namespace: str | None, error: TiphysError) -> None:
        if not self._stop.is_set():
            self._agent._record_watch_error(namespace, error)

    def _watch_until_error(self, namespace: str | None) -> None:
        events = watch_objects(
            self._agent._api,
            WORKFLOW_TASK_SETS,
            namespace,
            timeout_seconds=self._settings.watch_seconds,
            transform=_check_readable,
            sleep=self._stop.wait,
            should_stop=self._stop.is_set,
            on_error=partial(self._record_watch_error, namespace),
        )
        for event in events:
            self._agent._clear_watch_error(namespace)
            if isinstance(event, ListSnapshot):
                task_sets = [parse_task_set(document) for document in event.objects]
                with self._state_change():
                    self._state.observe_all(namespace, task_sets, self._now())
                continue
            with self._state_change():
                if event.type is WatchEventType.DELETED:
                    metadata = event.object["metadata"]
                    self._state.remove((metadata["namespace"], metadata["name"]))
                else:
                    self._state.observe(parse_task_set(event.object), self._now())

    def _run_calls(self) -> None:
        call = self._next_call()
        while call is not None:
            node, task_set = call.node, call.task_set
            answer = call_core(
                self._agent._execute, task_set, node.template, node.failures, self._settings, self._outages
            )
            with self._state_change():
                now = self._now()
                self._state.record_answer(call, answer, now)
                call = self._state.next_call(now)  # under the same lock, so that no other worker is woken for it
            call = call or self._next_call()

    def _next_call(self) -> PendingCall | None:
        with self._lock:
            while not self._state.closing:
                if (call := self._state.next_call(self._now())) is not None:
                    return call
                self._call_available.wait()
        return None

    def _run_jobs(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, PatchJob):
                written = patch_task_set(self._agent._api, job.task_set, job.changes, self._agent._is_leading)
                with self._state_change():
                    self._state.record_patch(job, written, self._now())
            else:
                self._check(job)

    def _next_job(self) -> PatchJob | LostAnswerCheck | None:
        with self._lock:
            while not self._drained:
                if (job := self._state.next_job(self._now())) is not None:
                    return job
                self._time_changed.notify()  # a term that drains may be idle now
                self._job_available.wait()
        return None

    def _check(self, job: LostAnswerCheck) -> None:
        is_awaited: bool | None = None
        try:
            is_awaited = workflow_awaits_node(self._agent._api, job.task_set, job.node.id)
        except Exception as error:  # noqa: BLE001  a tenant may write any Workflow, which must not end the agent
            _log.warning("agent.check_failed", workflow=job.task_set.name, error=repr(error)[:300])
        with self._state_change():
            self._state.record_check(job, is_awaited, self._now())

    def _export_gauges(self, state: AgentState | None) -> None:
        def read_under_lock(value: Callable[[AgentState], int]) -> Callable[[], float]:
            def read() -> float:
                with self._lock:
                    return float(value(state)) if state else 0.0

            return read

        metrics = self._agent._metrics
        metrics.open_tasks.set_function(read_under_lock(lambda current: current.open_tasks))
        metrics.foreign_tasks.set_function(read_under_lock(lambda current: current.foreign_tasks))
        metrics.queue.set_function(read_under_lock(lambda current: current.queue_length))
