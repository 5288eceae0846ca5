"""Draws the faults of a simulation. Each counts once it has happened to something, and not before."""

from collections.abc import Callable

from chaos.argo import Argo
from chaos.cluster import ClusterState
from chaos.programs import GRACE_SECONDS, Pod
from chaos.scheduler import Process
from chaos.services import Controller, Desk, Replica
from chaos.world import Fault, World
from tiphys.protocol.phases import is_final_workflow_phase

MEAN_PAUSE_SECONDS = 30.0
MEAN_VISIT_SECONDS = 15.0
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
    ) -> None:
        self._world = world
        self._state = state
        self._argo = argo
        self._replicas = replicas
        self._controllers = controllers
        self._desk = desk
        self._random = world.random
        self._alerts = 0
        self.process = Process("chaos")
        self.is_over = False
        self._kinds: dict[str, Callable[[], object]] = {
            **{kind: lambda kind=kind: self._window(kind) for kind in WINDOWS},  # type: ignore[misc]
            "program killed": self._kill_program,
            "program stopped": self._stop_program,
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
                name = f"keep-{self._random.randbytes(3).hex()}"
                self._desk.pin(pod.run, name, self._random.uniform(30, 300))

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
            self._spawn(f"evict-{pod.name}", lambda pod=pod: self._evict(pod))
        if pods:
            self._happened("node drained")

    def _evict(self, pod: Pod) -> None:
        pod.terminate()
        self._world.scheduler.wait_for(lambda: pod.has_ended, GRACE_SECONDS)
        if not pod.has_ended:
            pod.kill(137, "Evicted", "the node was drained")

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
        if process.is_alive:
            self._happened(kind)
            process.stopped_until = self._world.scheduler.now + self._seconds()

    def _delete_workflow(self) -> None:
        """Delete a Workflow that runs, and that its run knows by its uid."""
        running = [
            name
            for name, workflow in self._state.workflows.items()
            if not is_final_workflow_phase(workflow["status"]["phase"])
            and any(key.endswith(".bound.json") and f"/{_run_of(workflow)}/" in key for key in self._world.objects)
        ]
        bound = [name for name in running if self._is_bound(self._state.workflows[name]["metadata"]["uid"])]
        if bound:
            self._happened("Workflow deleted")
            self._argo.delete_workflow(self._random.choice(bound))

    def _is_bound(self, uid: str) -> bool:
        bindings = (data for key, (data, _) in self._world.objects.items() if key.endswith(".bound.json"))
        return any(uid.encode() in data for data in bindings)

    def _skew(self) -> None:
        processes = [replica.process for replica in self._replicas]
        processes += [controller.process for controller in self._controllers]
        processes += [pod.process for pod in self._argo.pods.values() if pod.process.is_alive]
        self._random.choice(processes).skew_seconds = self._random.choice((-600.0, -45.0, 45.0, 600.0))
        self._happened("clock skewed")

    def _double_alert(self) -> None:
        """Two deliveries of one alert about a run, at about the same moment."""
        if not (runs := sorted({pod.run for pod in self._argo.pods.values()})):
            return
        run, self._alerts = self._random.choice(runs), self._alerts + 1
        if self._argo.ends.get(run) == "Failed":
            self._happened("alert doubled")
        for _ in range(2):
            self._desk.resume(run, f"alert-{self._alerts}")

    def _spawn(self, name: str, work: Callable[[], object]) -> None:
        self._world.scheduler.spawn(self.process, name, work)


def _run_of(workflow: dict) -> str:  # type: ignore[type-arg]
    given = {entry["name"]: entry["value"] for entry in workflow["spec"]["arguments"]["parameters"]}
    return str(given["tiphys-run"])
