"""The programs of all pods, with the product's own session, one after the other in this process."""

import contextlib
import heapq
import io
import itertools
import queue
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from bench.fleet.pods import Pods, PodSeen
from chaos.programs import initial_state, train_step

from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.tracked_session import TrackedSession
from tiphys.errors import FencedError
from tiphys.store import Store

STEPS_OF_SAVE = 10
_POLL_SECONDS = 0.2


def advance(state: dict[str, Any], steps: int) -> dict[str, Any]:
    """The state after more steps, as a new one."""
    following = {**state}
    for _ in range(steps):
        train_step(following)
    return following


@dataclass
class Program:
    """The program of one pod."""

    pod: PodSeen
    session: TrackedSession
    state: dict[str, Any]


@dataclass
class Trainings:
    """All programs.

    Args:
        pods: Their pods.
        store: The run store.
        steps: Steps of the training of a run, asked for after each save.
        save_seconds: Time from save to save of a run, in which its program does `STEPS_OF_SAVE` steps.
    """

    pods: Pods
    store: Store
    steps: Callable[[str], int]
    save_seconds: Callable[[str], float]
    running: dict[str, Program] = field(default_factory=dict)
    """By the name of the pod."""
    acknowledged: dict[str, int] = field(default_factory=dict)
    """Newest step of each run that its program was told is stored."""
    commits: int = 0
    results: dict[str, bool] = field(default_factory=dict)
    """Runs whose training came to its end, and whether its state is that of an undisturbed one."""
    starts: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Attempt and first step of each program, by run."""
    faults: Counter[str] = field(default_factory=Counter)
    """What must not happen, by its kind."""
    _due: list[tuple[float, int, str]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def until(self, is_reached: Callable[[], bool], seconds: float) -> bool:
        """Let the programs run until something is reached; False if it was not in time."""
        deadline = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > deadline:
                return False
            self._turn()
        return True

    def run_until(self, deadline: float) -> None:
        """Let the programs run until this time of `time.monotonic`."""
        while time.monotonic() < deadline:
            self._turn()

    def _turn(self) -> None:
        """Take note of changes, then run what is due."""
        wait = min(_POLL_SECONDS, max(0.0, self._due[0][0] - time.monotonic())) if self._due else _POLL_SECONDS
        try:
            pod = self.pods.changes.get(timeout=wait) if wait > 0 else self.pods.changes.get_nowait()
            while True:
                self._change(pod)
                pod = self.pods.changes.get_nowait()
        except queue.Empty:
            pass
        if self._due and self._due[0][0] <= time.monotonic():
            _, _, name = heapq.heappop(self._due)
            if program := self.running.get(name):
                self._save(program)

    def _change(self, pod: PodSeen) -> None:
        if pod.ended is not None:
            self.running.pop(pod.name, None)
        elif pod.name not in self.running:
            self._start(pod)

    def _start(self, pod: PodSeen) -> None:
        if any(other.pod.run == pod.run for other in self.running.values()):
            self.faults["doubled"] += 1
        settings = CheckpointSettings.from_environment(pod.environ)
        assert settings is not None, f"{pod.name} has no settings of checkpoints"
        session = TrackedSession(
            replace(settings, asynchronous=False),
            run_store=self.store,
            store=self.store,
            clock=time.monotonic,
            environ={},
            upload_threads=1,
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # what it says to the log of its pod
                session.__enter__()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that of this process is for none of its sessions
                state = session.restore(default=initial_state(pod.run))
        except FencedError:
            self.faults["fenced at its start"] += 1
            return
        if state["step"] < self.acknowledged.get(pod.run, 0):
            self.faults["lost"] += 1
        self.starts[pod.run].append((pod.attempt, state["step"]))
        self.running[pod.name] = program = Program(pod, session, state)
        self._plan(program)

    def _plan(self, program: Program) -> None:
        seconds = self.save_seconds(program.pod.run)
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), program.pod.name))

    def _save(self, program: Program) -> None:
        program.state = advance(program.state, STEPS_OF_SAVE)
        step = program.state["step"]
        try:
            save = program.session.step(step, program.state)
            if save is not None and save.wait() is not None:
                self.commits += 1
                self.acknowledged[program.pod.run] = step
            if step < self.steps(program.pod.run):
                self._plan(program)
                return
            program.session.__exit__(None, None, None)
        except FencedError:
            del self.running[program.pod.name]
            self.faults["fenced while it ran"] += 1
            return
        del self.running[program.pod.name]
        run, chain = program.pod.run, program.state["chain"]
        self.results[run] = bool(np.array_equal(chain, advance(initial_state(run), step)["chain"]))
        self.pods.succeed(program.pod)
