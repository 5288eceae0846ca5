"""Draws the faults of a simulation. Each counts once it has happened to something, and not before."""

import re
from collections.abc import Callable
from functools import partial

from chaos.argo import Argo
from chaos.cluster import ClusterState
from chaos.programs import EVICTED_AT_START, Pod
from chaos.scheduler import Process
from chaos.services import Controller, Desk, Replica
from chaos.world import Fault, World
from tiphys.protocol.phases import is_final_workflow_phase

MEAN_PAUSE_SECONDS = 30.0
MEAN_VISIT_SECONDS = 15.0
_ABOUT_RUN = re.compile(r"(?:control/runs/|control/open/|data/runs/|data/lineages/)([^/.]+)")
STALLS = "services stall at writes"
"""As where their CPU is throttled: shorter than the patience of their callers."""
CONTESTED = "claims contested"
"""A service stands still between its decision and its claim, and a person resumes the run meanwhile."""
_CLAIM = re.compile(r"control/runs/[^/]+/(?:attempts/[^/]+|submissions)/\d{9}\.json")
WINDOWS = (
    "store down",
    "store slow",
    "store errors",
    "store answers lost",
    "store full",
    "API server down",
    "API server slow",
    "API answers lost",
    "calls doubled",
    "answers of the service lost",
    EVICTED_AT_START,
    STALLS,
    CONTESTED,
)
"""Faults that whoever calls in the meantime may meet."""


class FaultInjector:
    """Injects faults until it is told to stop.

    Attributes:
        is_over: Whether no more faults are injected.
    """

    def __init__(
        self,
        world: World,
        state: ClusterState,
        argo: Argo,
        replicas: list[Replica],
        controllers: list[Controller],
        desk: Desk,
        keys: list[str],
    ) -> None:
        self._world = world
        self._state = state
        self._argo = argo
        self._replicas = replicas
        self._controllers = controllers
        self._desk = desk
        self._keys = keys
        self._random = world.random
        self._traps: dict[Process, tuple[int, str, Callable[[str], object]]] = {}
        """What strikes a process before it creates a key with this part, or writes any, after a number of others."""
        self._halted: dict[Process, tuple[str, int]] = {}
        """Which processes go on once others have written keys with a part, and how many writes come before that."""
        world.before_write, world.after_write = self._before_write, self._after_write
        desk.on_command = self._begin_command
        self._alerts = 0
        self.process = Process("chaos")
        self.is_over = False
        self._kinds: dict[str, Callable[[], object]] = {
            **{kind: lambda kind=kind: self._window(kind) for kind in WINDOWS},  # type: ignore[misc]
            "program killed": self._kill_program,
            "program stopped": self._stop_program,
            "node frozen": self._freeze_node,
            "node frozen before a commit": lambda: self._freeze_node(before_commit=True),
            "program out of memory": self._out_of_memory,
            "program cut off from the store": lambda: self._cut_off(self._program(), "cut off from the store"),
            "pod deleted": self._delete_pod,
            "node drained": self._drain,
            "node lost its power": self._power_cut,
            "node cut off from the API server": self._cut_off_node,
            "service killed": self._kill_service,
            "service stopped": lambda: self._stop(self._replica().process, "service stopped"),
            "service cut off from the store": lambda: self._cut_off_service("cut off from the store"),
            "service cut off from the API server": lambda: self._cut_off_service("cut off from the API server"),
            "controller killed": self._kill_controller,
            "controller stopped": lambda: self._stop(self._controller().process, "controller stopped"),
            "controller cut off from the API server": self._cut_off_controller,
            "Argo stopped": lambda: self._stop(self._argo.process, "Argo stopped"),
            "Workflow deleted": self._delete_workflow,
            "Workflow stopped": self._stop_workflow,
            "clock skewed": self._skew,
            "alert doubled": self._double_alert,
        }

    @property
    def kinds(self) -> list[str]:
        """All kinds of faults."""
        return list(self._kinds)

    def run(self) -> None:
        """Inject one fault after the other."""
        while True:
            self._world.scheduler.sleep(self._random.expovariate(1 / MEAN_PAUSE_SECONDS))
            if self.is_over:
                return
            self._kinds[self._random.choice(self.kinds)]()

    def visit(self) -> None:
        """What people do meanwhile: they collect garbage, and pin checkpoints for a while."""
        while not self.is_over:
            self._world.scheduler.sleep(self._random.expovariate(1 / MEAN_VISIT_SECONDS))
            if (pod := self._program()) is None:
                continue
            if self._random.random() < 0.2:
                self._desk.collect(pod.run)
            else:
                self._pin(pod.run)

    def _pin(self, run: str) -> None:
        self._desk.pin(run, f"keep-{self._random.randbytes(3).hex()}", self._random.uniform(30, 300))

    def _begin_command(self, process: Process) -> None:
        """Some commands are killed, or their laptop sleeps, between two of their writes."""
        if not self.is_over and self._random.random() < 0.15:
            kinds: dict[str, Callable[[str], object]] = {
                "command killed": lambda _: self._world.scheduler.kill(process),
                "command stopped": lambda run: self._halt(process, self._seconds(), run),
            }
            kind = self._random.choice(list(kinds))
            strike = lambda run: [self._happened(kind), kinds[kind](run)]  # noqa: E731
            self._traps[process] = (self._random.randrange(6), "", strike)

    def _before_write(self, process: Process, key: str) -> None:
        """A trap strikes: the process has read what it decides by, and others may act before it writes."""
        strike = None if self.is_over else self._find_strike(process, key)
        if strike is None:
            return
        named = _ABOUT_RUN.match(key)
        run = named[1] if named else ""
        if self._random.random() < 0.5:
            self._interfere(run)
        strike(run)

    def _after_write(self, process: Process, key: str) -> None:
        """Wake the processes that stand still until others have written such keys."""
        for halted, (part, writes) in list(self._halted.items()):
            if halted is not process and key.startswith("control/") and part in key:
                self._halted[halted] = (part, writes - 1)
                if writes <= 1:
                    del self._halted[halted]
                    self._world.scheduler.resume(halted)

    def _contest(self, process: Process, run: str, key: str) -> None:
        """A person takes the run over, and the process goes on when others have written what it was about to write."""
        resume = partial(self._desk.resume, run, force=self._random.random() < 0.8)
        delay = self._random.uniform(0.0, 3.0)
        self._world.scheduler.spawn(self.process, "contest", resume, delay_seconds=delay)
        self._stop_until(process, self._random.uniform(5.0, 28.0), key, 1)

    def _find_strike(self, process: Process, key: str) -> Callable[[str], object] | None:
        if process in self._traps:
            writes, part, strike = self._traps[process]
            is_meant = not part or (part in key and key not in self._world.objects)
            if is_meant and not writes:
                del self._traps[process]
                return strike
            self._traps[process] = (writes - is_meant, part, strike)
        elif process.name.startswith(("plugin", "controller")):
            if _CLAIM.fullmatch(key) and self._world.meets(CONTESTED, process, 0.6):
                return lambda run: self._contest(process, run, key)
            if self._world.meets(STALLS, process, 0.3):
                seconds = self._random.uniform(5.0, 28.0)
                return lambda run: self._halt(process, seconds, run)
        return None

    def _interfere(self, run: str) -> None:
        """A person does something about a run soon; an empty name is any."""
        runs = [run] if run else sorted({pod.run for pod in self._argo.pods.values()})
        if not runs:
            return
        chosen = self._random.choice(runs)
        action = self._random.choice(
            (
                lambda: self._desk.resume(chosen),
                lambda: self._desk.resume(chosen, force=True),
                lambda: self._desk.collect(chosen),
                lambda: self._pin(chosen),
                lambda: self._desk.start(self._random.choice(self._keys)),
            )
        )
        self._world.scheduler.spawn(self.process, "interfere", action, delay_seconds=self._random.uniform(0.0, 20.0))

    def _seconds(self) -> float:
        return self._random.choice((2.0, 15.0, 60.0, 240.0, 700.0)) * self._random.uniform(0.5, 1.5)

    def _window(self, kind: str) -> None:
        self._world.begin_fault(kind, self._seconds())

    def _happened(self, kind: str) -> Fault:
        fault = self._world.begin_fault(kind)
        self._world.meet(fault)
        return fault

    def _program(self) -> Pod | None:
        """A training whose program lives and is not stopped."""
        living = [pod for pod in self._argo.pods.values() if pod.process.is_alive and pod.gpus and not pod.has_ended]
        return self._random.choice(living) if living else None

    def _replica(self) -> Replica:
        return self._random.choice(self._replicas)

    def _controller(self) -> Controller:
        return self._random.choice(self._controllers)

    def _kill_program(self) -> None:
        if pod := self._program():
            self._happened("program killed")
            pod.kill(137)

    def _out_of_memory(self) -> None:
        if pod := self._program():
            self._happened("program out of memory")
            pod.kill(137, "OOMKilled", "the node was low on memory")

    def _stop_program(self) -> None:
        if pod := self._program():
            self._stop(pod.process, "program stopped")

    def _delete_pod(self) -> None:
        if pod := self._program():
            self._happened("pod deleted")
            self._spawn(f"delete-{pod.name}", lambda: self._argo.delete_pod(pod))

    def _drain(self) -> None:
        """All pods of a node are evicted."""
        pods = [pod for pod in self._argo.pods.values() if pod.process.is_alive and not pod.has_ended]
        for pod in pods[:2]:
            evict = partial(self._argo.terminate_pod, pod, "Evicted", "the node was drained")
            self._spawn(f"evict-{pod.name}", evict)
        if pods:
            self._happened("node drained")

    def _power_cut(self) -> None:
        """The program is dead at once; the API server shows it minutes later."""
        if pod := self._program():
            self._happened("node lost its power")
            self._world.scheduler.kill(pod.process)
            delay = self._random.uniform(40, 330)
            self._world.scheduler.spawn(self.process, f"give-up-{pod.name}", pod.vanish, delay_seconds=delay)

    def _cut_off_node(self) -> None:
        """The API server gives the pod up, and its program trains on until the node is back."""
        if not (pod := self._program()):
            return

        def work() -> None:
            self._world.scheduler.sleep(self._random.uniform(40, 330))
            if pod.has_ended:
                return
            fault = self._world.begin_fault("node cut off from the API server")
            pod.vanish()
            self._world.meet(fault)
            self._world.scheduler.sleep(self._random.uniform(60, 1800))
            self._world.scheduler.kill(pod.process)

        self._spawn(f"cut-off-{pod.name}", work)

    def _freeze_node(self, *, before_commit: bool = False) -> None:
        """A node stands still at a write of its program and is given up, and then the program goes on.

        Before a commit: what trains on other nodes meanwhile may be evicted at its start, as where a whole rack is in
        trouble, and the program goes on when other attempts of the run have begun or ended.
        """
        if not (pod := self._program()):
            return

        def strike(run: str) -> None:
            self._happened("node frozen before a commit" if before_commit else "node frozen")
            delay, seconds = self._random.uniform(40, 330), self._random.uniform(60, 1800)
            self._world.scheduler.spawn(self.process, f"give-up-{pod.name}", pod.vanish, delay_seconds=delay)
            if not before_commit:
                self._halt(pod.process, seconds, run)
                return
            if self._random.random() < 0.5:
                self._world.begin_fault(EVICTED_AT_START, delay + self._random.uniform(60, 300))
            self._stop_until(pod.process, seconds, f"{run}/attempts/", self._random.randint(1, 4))

        self._traps[pod.process] = (
            (0, "/manifests/", strike) if before_commit else (self._random.randrange(6), "", strike)
        )

    def _cut_off(self, pod: Pod | None, kind: str) -> None:
        if pod:
            self._world.begin_fault(kind, self._seconds(), pod.process.name)

    def _cut_off_service(self, kind: str) -> None:
        self._world.begin_fault(kind, self._seconds(), self._replica().process.name)

    def _cut_off_controller(self) -> None:
        self._world.begin_fault("cut off from the API server", self._seconds(), self._controller().process.name)

    def _kill_service(self) -> None:
        replica = self._replica()
        if replica.process.is_alive:
            self._happened("service killed")
            self._world.scheduler.kill(replica.process)
            replica.start(self._random.uniform(1, 60))

    def _kill_controller(self) -> None:
        controller = self._controller()
        self._happened("controller killed")
        self._world.scheduler.kill(controller.process)
        controller.start(self._random.uniform(1, 60))

    def _stop(self, process: Process, kind: str) -> None:
        """Stop a process now, or before its next write."""
        if process.is_alive:
            strike = lambda run: [self._happened(kind), self._halt(process, self._seconds(), run)]  # noqa: E731
            if self._random.random() < 0.5:
                strike("")
            else:
                self._traps[process] = (0, "", strike)

    def _halt(self, process: Process, seconds: float, run: str) -> None:
        """Stop a process for some seconds, or for less: until others have written about the run."""
        writes = self._random.randint(1, 4) if run and self._random.random() < 0.5 else 0
        self._stop_until(process, seconds, run, writes)

    def _stop_until(self, process: Process, seconds: float, part: str, writes: int) -> None:
        """Stop a process for some seconds, or for less: until others have written keys with this part."""
        self._halted.pop(process, None)
        if writes:
            self._halted[process] = (part, writes)
        process.stopped_until = self._world.scheduler.now + seconds
        if self._world.scheduler.current.process is process:
            self._world.scheduler.sleep(0.0)

    def _delete_workflow(self) -> None:
        if bound := self._bound_workflows():
            self._happened("Workflow deleted")
            self._argo.delete_workflow(self._random.choice(bound))

    def _stop_workflow(self) -> None:
        if bound := self._bound_workflows():
            self._happened("Workflow stopped")
            self._argo.stop_workflow(self._random.choice(bound))

    def _bound_workflows(self) -> list[str]:
        """Names of Workflows that run, and that their runs know by their uids."""
        bindings = [data for key, (data, _) in self._world.objects.items() if key.endswith(".bound.json")]
        return [
            name
            for name, workflow in self._state.workflows.items()
            if not is_final_workflow_phase(workflow["status"]["phase"])
            and any(workflow["metadata"]["uid"].encode() in data for data in bindings)
        ]

    def _skew(self) -> None:
        processes = [replica.process for replica in self._replicas]
        processes += [controller.process for controller in self._controllers]
        processes += [pod.process for pod in self._argo.pods.values() if pod.process.is_alive]
        self._random.choice(processes).skew_seconds = self._random.choice((-600.0, -45.0, 45.0, 600.0))
        self._happened("clock skewed")

    def _double_alert(self) -> None:
        """An alert about a run is delivered twice at once or soon after, and again when the run stands still."""
        if not (runs := sorted({pod.run for pod in self._argo.pods.values()})):
            return
        run, self._alerts = self._random.choice(runs), self._alerts + 1
        deliver = partial(self._desk.resume, run, f"alert-{self._alerts}")
        has_failed = lambda: self._argo.ends.get(run) == "Failed"  # noqa: E731
        if has_failed():
            self._happened("alert doubled")

        def repeat() -> None:
            for _ in range(self._random.randint(1, 4)):
                self._world.scheduler.sleep(self._random.choice((0.0, self._random.uniform(60.0, 1800.0))))
                self._world.scheduler.wait_for(has_failed, self._random.choice((0.0, 1800.0)))
                deliver()

        deliver()
        self._spawn("alert", repeat)

    def _spawn(self, name: str, work: Callable[[], object]) -> None:
        self._world.scheduler.spawn(self.process, name, work)
