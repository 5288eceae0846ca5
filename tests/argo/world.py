"""Argo Workflows as the story meets it: submit, wait with patience, and read what a person would see in the UI."""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import pytest
from support.stories.interrupted_training.pipelines import Place

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import DEPLOYMENTS, EVENTS, PODS, WORKFLOWS, Resource
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import list_commits
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import (
    Attempt,
    LineageLayout,
    Store,
    lineage_name,
    list_runs,
    read_record,
    read_submissions,
)

from .settings import Settings

WORKFLOW_ACCOUNT = "tiphys-workflow"
FINISHED = ("Succeeded", "Failed", "Error")
OWN_PARTS = ("PLUGIN", "CONTROLLER")
"""Parts that this suite knows how to kill by itself: their pods have labels of ours."""
_POLL_SECONDS = 0.5
_COMMAND_SECONDS = 300

T = TypeVar("T")


class Node(NamedTuple):
    """One node of a Workflow, as the UI shows it."""

    name: str
    template: str
    phase: str
    message: str


@dataclass(frozen=True)
class World:
    """A cluster with Argo and Tiphys, and the store that the runs are kept in."""

    api: KubeApi
    store: Store
    settings: Settings

    @property
    def place(self) -> Place:
        """What the story's pods are given here."""
        options = {"image_pull_policy": "IfNotPresent"}
        return Place(self.settings.image, self.settings.store, options, {"service_account_name": WORKFLOW_ACCOUNT})

    def submit(self, manifest: Manifest) -> "Workflow":
        """What a person does with a compiled file: `argo submit`; `kubectl create` where there is no such command."""
        if shutil.which("argo"):
            return self.submitted("-", given=json.dumps(manifest))
        made = self.api.create(WORKFLOWS, self.settings.namespace, manifest)
        return Workflow(self, made["metadata"]["name"], made["metadata"]["uid"])

    def submitted(self, *arguments: str, given: str = "") -> "Workflow":
        """`argo submit` with these arguments; the Workflow that it made."""
        made = json.loads(self.argo("submit", *arguments, "--output", "json", given=given))
        return Workflow(self, made["metadata"]["name"], made["metadata"]["uid"])

    def workflow(self, name: str) -> "Workflow":
        """A Workflow that exists."""
        found = self.api.get(WORKFLOWS, self.settings.namespace, name)
        assert found is not None, f"there is no Workflow {name}"
        return Workflow(self, name, found["metadata"]["uid"])

    def argo(self, *arguments: str, given: str = "") -> str:
        """Output of an `argo` command that asks the API server; skips the test where there is none.

        A token for an argo-server must not reach it: Argo's command would send it to the API server.
        """
        if not shutil.which("argo"):
            pytest.skip(f"`argo {arguments[0]}` needs Argo's command on PATH")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ARGO_")}
        environ["KUBECONFIG"] = self.settings.kubeconfig
        return command(["argo", "--namespace", self.settings.namespace, *arguments], given, environ=environ)

    def crash(self, part: str) -> None:
        """Kill a part of the system without warning, and wait for its successor; skips where nobody said how."""
        self._crash(part)()

    def _crash(self, part: str) -> Callable[[], object]:
        if line := self.settings.crash.get(part):
            return lambda: command(shlex.split(line))
        if part in OWN_PARTS:
            return lambda: self._crash_pods(part.lower())
        pytest.skip(f"to kill {part.lower()}, give a command as TIPHYS_ARGO_CRASH_{part}")

    @contextmanager
    def away(self, part: str) -> Iterator[None]:
        """``part`` does not answer meanwhile; skips where nobody said how."""
        if line := self.settings.outage.get(part):
            command([*shlex.split(line), "stop"])
            try:
                yield
            finally:
                command([*shlex.split(line), "start"])
        elif part in OWN_PARTS:
            before = self._scaled(part.lower(), {})
            try:
                yield
            finally:
                self._scaled(part.lower(), before)
        else:
            pytest.skip(f"for an outage of {part.lower()}, give a command as TIPHYS_ARGO_OUTAGE_{part}")

    def _scaled(self, component: str, replicas: Mapping[str, int]) -> dict[str, int]:
        """Give the Deployments of a component these numbers of pods, or none; returns the numbers before."""
        namespace = self.settings.system_namespace
        labels = f"app.kubernetes.io/name=tiphys,app.kubernetes.io/component={component}"
        before = {}
        for found in self.api.list(DEPLOYMENTS, namespace, labels=labels).items:
            name = found["metadata"]["name"]
            before[name] = found["spec"]["replicas"]
            self.api.patch(DEPLOYMENTS, namespace, name, {"spec": {"replicas": replicas.get(name, 0)}})
        assert before, f"namespace {namespace} has no Deployment with the labels {labels}"
        return before

    def _crash_pods(self, component: str) -> None:
        namespace = self.settings.system_namespace
        labels = f"app.kubernetes.io/name=tiphys,app.kubernetes.io/component={component}"
        pods = self.api.list(PODS, namespace, labels=labels).items
        assert pods, f"namespace {namespace} has no pods with the labels {labels}"
        for pod in pods:
            self.api.delete(PODS, namespace, pod["metadata"]["name"], grace_seconds=0)
        old = {pod["metadata"]["uid"] for pod in pods}
        self.until(
            f"another {component} is ready",
            lambda: any(
                _is_ready(pod) and pod["metadata"]["uid"] not in old
                for pod in self.api.list(PODS, namespace, labels=labels).items
            ),
        )

    def crash_together(self, *parts: str) -> None:
        """As `crash`, all at the same time."""
        ways = [self._crash(part) for part in parts]
        with ThreadPoolExecutor(len(ways)) as pool:
            for done in [pool.submit(way) for way in ways]:
                done.result()

    def resubmitted(self, workflow: "Workflow") -> "Workflow":
        """`argo resubmit`."""
        made = json.loads(self.argo("resubmit", workflow.name, "--output", "json"))
        return Workflow(self, made["metadata"]["name"], made["metadata"]["uid"])

    def queue(self) -> tuple[str, int]:
        """A queue for the story, and how many GPUs it has."""
        name, _, quota = self.settings.queue.partition(":")
        if not quota:
            pytest.skip("scenarios about GPUs need a queue: give its name and quota as TIPHYS_ARGO_QUEUE=story:4")
        return name, int(quota)

    def preempting_queue(self) -> tuple[str, int]:
        """Another one, in which who has a higher priority has others go."""
        name, _, quota = self.settings.preempting_queue.partition(":")
        if not quota:
            pytest.skip(
                "scenarios about priorities need a queue with preempts_lower_priority: true: "
                "give its name and quota as TIPHYS_ARGO_PREEMPTING_QUEUE=preempting:2"
            )
        return name, int(quota)

    def until(
        self, what: str, happened: Callable[[], T], describe: Callable[[], str] = lambda: "", patience: float = 1
    ) -> T:
        """Wait until ``happened`` answers something true; fails with ``what`` and what ``told`` knows.

        An API server or a store that is away is waited for: several tests take them away.
        """
        deadline = time.monotonic() + patience * self.settings.patience_seconds
        while True:
            last = ""
            try:
                if found := happened():
                    return found
            except StoreError as error:
                last = str(error)
            if time.monotonic() > deadline:
                pytest.fail(f"never happened: {what}\n{last}\n{_attempted(describe)}")
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class Workflow:
    """One Workflow object, and the run that it belongs to."""

    world: World
    name: str
    uid: str

    def read(self) -> Object | None:
        """The live object; None once it is deleted."""
        return self.world.api.get(WORKFLOWS, self.world.settings.namespace, self.name)

    @property
    def phase(self) -> str:
        return str(((self.read() or {}).get("status") or {}).get("phase", ""))

    def nodes(self) -> list[Node]:
        """All nodes, in the order in which they were started."""
        status = (self.read() or {}).get("status") or {}
        rows = sorted(status.get("nodes", {}).values(), key=lambda node: (node.get("startedAt") or "", node["name"]))
        return [
            Node(n["name"], n.get("templateName", ""), n.get("phase", ""), n.get("message", ""))
            for n in rows
            if n.get("type") != "Retry"
        ]

    def messages(self, template: str) -> list[str]:
        """What the nodes of a template say, the first one first."""
        return [node.message for node in self.nodes() if node.template == template]

    def phases(self, template: str) -> list[str]:
        return [node.phase for node in self.nodes() if node.template == template]

    def wait_for(self, what: str, happened: Callable[[], T]) -> T:
        """As `World.until`, telling of this Workflow's nodes."""
        return self.world.until(f"{self.name}: {what}", happened, self.describe)

    def wait(self, phase: str = "Succeeded") -> None:
        """Wait for the end, which must be ``phase``."""
        ended = self.wait_for("the workflow ends", lambda: self.phase if self.phase in FINISHED else "")
        assert ended == phase, self.describe()

    def pods(self, **labels: str) -> list[Object]:
        """Pods of this Workflow; ``step`` and ``attempt`` narrow it down."""
        wanted = [f"workflows.argoproj.io/workflow={self.name}"]
        wanted += [f"tiphys.dev/{label}={value}" for label, value in labels.items()]
        return self.world.api.list(PODS, self.world.settings.namespace, labels=",".join(wanted)).items

    def agent_pod(self) -> Object:
        """The pod in which its plugin steps are answered, in sidecar mode."""
        labels = f"workflows.argoproj.io/workflow={self.name},workflows.argoproj.io/component=agent"
        [pod] = self.world.api.list(PODS, self.world.settings.namespace, labels=labels).items
        return pod

    def events(self, reason: str) -> list[str]:
        """What the Events beside this Workflow say, those with this reason."""
        fields = f"involvedObject.uid={self.uid},reason={reason}"
        return [
            one["message"] for one in self.world.api.list(EVENTS, self.world.settings.namespace, fields=fields).items
        ]

    def event_message(self, reason: str) -> str:
        """Wait for an Event with this reason; what it says."""
        return self.wait_for(f"an Event says {reason}", lambda: self.events(reason))[0]

    @property
    def run(self) -> str:
        """Name of the run; it is bound by the first admit."""
        return self.wait_for("a run is bound to the workflow", self._run)

    def attempts(self, step: str) -> list[Attempt]:
        return RunHistory(self.world.store, self.run).attempts.get(step, [])

    def checkpoints(self, step: str = "train") -> list[CheckpointRef]:
        return list_commits(self.world.store, lineage_name(self.run, step))

    def went_on_from(self, step: str = "train") -> CheckpointRef | None:
        """What the program that saved last had restored when it began."""
        layout, newest = LineageLayout(lineage_name(self.run, step)), self.checkpoints(step)[0]
        written = layout.manifest(newest.attempt, newest.global_step)
        return read_record(self.world.store, written, CheckpointManifest).restored

    def trains(self, attempt: int = 1) -> str:
        """Wait until an attempt has saved something; the name of its pod."""
        self.wait_for(
            f"attempt {attempt} saves a checkpoint",
            lambda: any(ref.attempt == attempt for ref in self.checkpoints()),
        )
        [pod] = self.pods(step="train", attempt=str(attempt))
        return str(pod["metadata"]["name"])

    def describe(self) -> str:
        """Everything that the UI would show, for a test that fails."""
        lines = [f"{self.name}: {self.phase}"]
        return "\n".join([*lines, *(f"  {n.name} [{n.template}] {n.phase} {n.message}" for n in self.nodes())])

    def _run(self) -> str:
        for run in (self.name, f"{self.name}-{self.uid[:5]}", *list_runs(self.world.store)):
            if any(held.binding and held.binding.uid == self.uid for held in read_submissions(self.world.store, run)):
                return run
        return ""


def command(
    line: list[str],
    given: str = "",
    seconds: float = _COMMAND_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a command to its end; its standard output. Fails with what it said on the other stream."""
    done = subprocess.run(line, input=given, capture_output=True, text=True, timeout=seconds, check=False, env=environ)
    assert done.returncode == 0, f"{shlex.join(line)}: {done.stderr or done.stdout}"
    return done.stdout


def evict(world: World, pod: str) -> None:
    """What `kubectl drain` does to one pod."""
    eviction = Resource("", "v1", f"pods/{pod}/eviction", "Eviction")
    body = {"apiVersion": "policy/v1", "metadata": {"name": pod, "namespace": world.settings.namespace}}
    world.api.create(eviction, world.settings.namespace, body)


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _attempted(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except TiphysError as error:
        return str(error)
