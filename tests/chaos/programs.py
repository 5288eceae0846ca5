"""The training program of the simulation, with the product's own session, and what the kubelet makes of its end."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from tiphys_plugin import PodStatus

from chaos.cluster import ClusterState
from chaos.scheduler import Process, ProcessKilledError
from chaos.world import SimulatedStore, World
from tiphys.checkpoint.settings import CheckpointSettings, SaveInterval
from tiphys.checkpoint.tracked_session import TrackedSession
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, RetentionPolicy
from tiphys.records import CheckpointRef

STEPS = 60
STEP_SECONDS = 12.0
EVERY_STEPS = 1
KEEP_LAST = 2
DELETE_AFTER_SECONDS = 120.0
GRACE_SECONDS = 30.0
EVICTED_AT_START = "programs evicted at their start"
"""A fault: one program after the other is ended within seconds."""


def initial_state(run: str) -> dict[str, Any]:
    """Step 0: a state that no other run has."""
    return {"step": 0, "chain": np.frombuffer(hashlib.sha256(run.encode()).digest(), dtype=np.uint8).copy()}


def train_step(state: dict[str, Any]) -> None:
    """The next state: a hash of the last one and of the number of the step, so that none can be left out."""
    state["step"] += 1
    following = hashlib.sha256(state["chain"].tobytes() + str(state["step"]).encode()).digest()
    state["chain"] = np.frombuffer(following, dtype=np.uint8).copy()


class Pod:
    """One pod of an attempt. Its process may outlive what the API server shows of it.

    Args:
        world: The world.
        state: The API server.
        status: The pod as the API server shows it first.
        outputs: Prefix of its outputs.
    """

    def __init__(self, world: World, state: ClusterState, status: PodStatus, outputs: str) -> None:
        self._world = world
        self._state = state
        self._outputs = outputs
        self.name = status.name
        self.run, self.step = status.labels[RUN_LABEL], status.labels[STEP_LABEL]
        self.attempt = int(status.labels[ATTEMPT_LABEL])
        self.gpus = sum(status.resources.values())
        self.process = Process(status.name)
        self.session: TrackedSession | None = None
        state.pods[status.name] = status
        fields = {"run": self.run, "step": self.step, "attempt": self.attempt, "gpus": self.gpus}
        world.record("pod started", pod=self.name, uid=status.workflow_uid, **fields)

    @property
    def status(self) -> PodStatus | None:
        """The pod as the API server shows it; None once it is gone."""
        return self._state.pods.get(self.name)

    @property
    def has_ended(self) -> bool:
        """Whether the API server shows its end."""
        return self.status is None or self.status.finished

    def start(self, program: Callable[["Pod"], None]) -> None:
        """Run the program in the process of the pod."""

        def main() -> None:
            code = 0
            try:
                program(self)
            except SystemExit as end:
                code = int(end.code or 0)
            self.end(code)

        self._world.scheduler.spawn(self.process, self.name, main)
        if self._world.meets(EVICTED_AT_START, self.process, 0.7):
            low = "The node was low on resource: memory."
            evict, delay = lambda: self.kill(137, "Evicted", low), self._world.random.uniform(0.0, 20.0)
            self._world.scheduler.spawn(Process("kubelet"), f"evict-{self.name}", evict, delay_seconds=delay)

    def end(self, code: int | None, reason: str = "", message: str = "") -> None:
        """The kubelet reports the end of the program; None: no code is known."""
        status = self.status
        if status is None or status.finished:
            return
        phase = "Succeeded" if code == 0 else "Failed"
        self._state.pods[self.name] = status.model_copy(
            update={"phase": phase, "exit_code": code, "reason": reason, "message": message}
        )
        self._world.record("pod ended", pod=self.name, code=code, reason=reason)
        self._world.scheduler.changed()

    def vanish(self) -> None:
        """The API server shows the pod no longer, as once its node was given up; its program may live on."""
        if self._state.pods.pop(self.name, None) is not None:
            self._world.record("pod ended", pod=self.name, code=None, reason="gone")
            self._world.scheduler.changed()

    def kill(self, code: int, reason: str = "", message: str = "") -> None:
        """SIGKILL of the program, which the kubelet sees."""
        self._world.scheduler.kill(self.process)
        self.end(code, reason, message)

    def terminate(self) -> None:
        """SIGTERM to the program."""
        if self.session is not None and self.process.is_alive:
            self.session._stop.request()

    def write_output(self, kind: str, name: str, data: bytes) -> None:
        """Upload an output, as argoexec does once the program has ended."""
        self._world.travel("store slow", self.process)
        SimulatedStore(self._world, self.process).put(f"{self._outputs}/{kind}/{name}", data)


def prepare(pod: Pod) -> None:
    """The program of the step before the training."""
    pod._world.scheduler.sleep(5.0)
    pod.write_output("parameters", "rows", b"3")


def training(
    world: World, resume_from: CheckpointRef | None, *, asynchronous: bool, steps: int = STEPS
) -> Callable[[Pod], None]:
    """A training that saves every few steps, acknowledges what was committed, and leaves its last state."""

    def program(pod: Pod) -> None:
        store = SimulatedStore(world, pod.process)
        settings = CheckpointSettings(
            run=pod.run,
            step=pod.step,
            attempt=pod.attempt,
            lineage=f"{pod.run}/{pod.step}",
            store=store.url,
            checkpoint_store=store.url,
            resume_from=resume_from,
            save_every=SaveInterval(EVERY_STEPS, "steps"),
            keep=RetentionPolicy(last=KEEP_LAST, delay_seconds=DELETE_AFTER_SECONDS),
            grace_seconds=GRACE_SECONDS,
            asynchronous=asynchronous,
        )
        clock = lambda: world.scheduler.now  # noqa: E731
        with TrackedSession(
            settings, run_store=store, store=store, clock=clock, environ={}, total_steps=steps, upload_threads=1
        ) as session:
            pod.session = session
            state = session.restore(default=initial_state(pod.run))
            world.record("restored", pod=pod.name, run=pod.run, step=pod.step, attempt=pod.attempt, at=state["step"])
            saves = []
            while state["step"] < steps:
                world.scheduler.sleep(STEP_SECONDS * world.random.uniform(0.8, 1.2))
                train_step(state)
                if save := session.step(state["step"], state):
                    saves.append(save)
                    if world.random.random() < 0.3:
                        save.wait()
                saves = [save for save in saves if not _acknowledge(world, pod, save)]
            session.flush()
            for save in saves:
                _acknowledge(world, pod, save)
            artifact = state["chain"].tobytes().hex().encode()
        pod.write_output("artifacts", "model", artifact)

    def guarded(pod: Pod) -> None:
        try:
            program(pod)
        except ProcessKilledError:
            raise
        except Exception as error:  # noqa: BLE001  as the interpreter ends a program
            world.record("program crashed", pod=pod.name, error=f"{type(error).__name__}: {error}"[:200])
            raise SystemExit(1) from None

    return guarded


def _acknowledge(world: World, pod: Pod, save: Any) -> bool:
    """Note that the program was told of a commit; whether the save is over."""
    if not save.done:
        return False
    if (ref := save.wait()) is not None:
        fields = {"run": pod.run, "step": pod.step, "attempt": ref.attempt, "global_step": ref.global_step}
        world.record("acknowledged", lineage=ref.lineage, **fields)
    return True
