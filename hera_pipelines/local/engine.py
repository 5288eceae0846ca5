"""Runs a Workflow on this machine. A development tool, not a second Argo.

It interprets what `compile` emits with real processes and asks the same plugin
by the same protocol. What it does not support it refuses by name before
anything starts.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tiphys_plugin.cluster.interface import DirectoryCluster

from hera_pipelines.local.interpreter import Call, Interpreter
from hera_pipelines.local.nodes import Node, NodeChange, NodePhase, NodeTable
from hera_pipelines.local.plugin_client import Agent, PluginEndpoint, WorkflowIdentity
from hera_pipelines.local.pods.artifacts import Bucket
from hera_pipelines.local.pods.pod import Pods
from hera_pipelines.local.pods.pod_files import Volumes, log_of
from hera_pipelines.local.pods.process import Surroundings
from hera_pipelines.local.shutdown import STOP, TERMINATE, Shutdown, hold, interrupts
from hera_pipelines.local.supported import check
from hera_pipelines.local.workflow_object import Definitions, LiveObject, created, workflow_variables
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import utc_now
from tiphys.store import Store

_ANNOUNCED = {
    STOP: "stopping: programs may save first, and the exit handler runs; stop again (Ctrl-C) to end all at once",
    TERMINATE: "terminating: everything ends at once",
}


def ignore(_change: NodeChange) -> None:
    """The observer of an engine that nobody watches."""


class LocalEngine:
    """Runs workflows, one at a time in each call of `run`.

    Args:
        store: Where keyed artifacts lie.
        cluster: Keeps the Workflow and its pods for the plugin to see.
        state: Folder for logs, attempts and volumes.
        plugin: Where plugin templates are executed.
        speed: Back-offs and requeues are divided by it; programs are not.
        observer: Told of every change of a node, from the thread of `run`.
        code: Folder whose modules programs can import; by default where the
            engine was started.
        longest_grace_seconds: Cuts grace periods; None keeps them.
        clock: The present time, in UTC.
    """

    def __init__(
        self,
        store: Store,
        cluster: DirectoryCluster,
        state: Path,
        plugin: PluginEndpoint,
        speed: float = 1.0,
        observer: Callable[[NodeChange], None] = ignore,
        *,
        code: Path | None = None,
        longest_grace_seconds: float | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._cluster = cluster
        self._state = state.absolute()
        self._plugin = plugin
        self._speed = speed
        self._observer = observer
        self._clock = clock
        surroundings = Surroundings((code or Path.cwd()).absolute(), store.url, longest_grace_seconds)
        bucket = Bucket(store, self._state / "bucket")
        self._pods = Pods(cluster, bucket, self._state, surroundings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown: Shutdown | None = None

    def check(self, manifest: Manifest) -> None:
        """Raise `UsageError` naming everything in ``manifest`` that cannot be run here."""
        check(manifest)

    def run(self, manifest: Manifest) -> NodePhase:
        """Run a Workflow to its end and return its phase.

        The first SIGINT or SIGTERM stops it (the exit handler still runs), the
        second terminates it; both only in the main thread.

        Raises:
            UsageError: it holds something that cannot be run here.
            ConflictError: another engine runs this workflow.
        """
        check(manifest)
        workflow = manifest if manifest["metadata"].get("uid") else created(manifest, self._clock())
        with hold(self._state, workflow["metadata"]["name"]):
            return asyncio.run(self._run(workflow))

    def stop(self) -> None:
        """Stop the running workflow; called again, terminate it. May be called from any thread."""
        if self._shutdown is not None:
            self._call(self._shutdown.request)

    def delete_pod(self, name: str) -> None:
        """End a running pod as ``kubectl delete pod`` does. May be called from any thread."""
        self._call(lambda: self._pods.delete(name))

    def log(self, pod: str) -> Path:
        """File with what a pod wrote."""
        return log_of(self._state, pod)

    def _call(self, action: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has just closed: there is nothing left to stop
                self._loop.call_soon_threadsafe(action)

    async def _run(self, workflow: Manifest) -> NodePhase:
        live = LiveObject(self._cluster, workflow, self._clock)

        def observe(change: NodeChange) -> None:
            live.touch()
            self._observer(change)

        def announce() -> None:
            live.shut_down(shutdown.strategy)
            nodes.announce(_ANNOUNCED[shutdown.strategy])

        nodes = NodeTable(workflow["metadata"]["name"], self._clock, observe)
        shutdown = Shutdown(announce)
        self._loop, self._shutdown = asyncio.get_running_loop(), shutdown
        try:
            with interrupts(self._loop, shutdown.request):
                live.begin()
                phase, message = await self._interpret(workflow, nodes, shutdown, live)
                live.end(phase, message, nodes)
                return phase
        finally:
            self._loop = self._shutdown = None

    async def _interpret(
        self, workflow: Manifest, nodes: NodeTable, shutdown: Shutdown, live: LiveObject
    ) -> tuple[NodePhase, str]:
        metadata = workflow["metadata"]
        identity = WorkflowIdentity(metadata["name"], metadata["namespace"], metadata["uid"])
        writing = asyncio.ensure_future(live.keep_written(nodes))
        try:
            async with Agent(self._plugin, identity, self._speed) as agent:
                return await self._phases(self._interpreter(workflow, nodes, shutdown, agent), shutdown)
        finally:
            writing.cancel()
            with suppress(asyncio.CancelledError):
                await writing

    async def _phases(self, interpreter: Interpreter, shutdown: Shutdown) -> tuple[NodePhase, str]:
        """The entry point, then the exit handler, and what both come to."""
        spec = interpreter.definitions.manifest["spec"]
        name = interpreter.definitions.workflow
        limit = float(spec["activeDeadlineSeconds"]) if spec.get("activeDeadlineSeconds") else None
        main = await self._main(interpreter, Call(name, spec["entrypoint"], spec.get("arguments") or {}), limit)
        handler = await self._exit_handler(interpreter, main, spec.get("onExit"))
        if main.failed:
            stopped = f"Stopped with strategy '{shutdown.strategy}'" if shutdown.strategy else ""
            return main.phase, stopped or main.message
        if handler is not None and handler.failed:
            return handler.phase, handler.message
        return NodePhase.SUCCEEDED, main.message

    async def _main(self, interpreter: Interpreter, call: Call, limit: float | None) -> Node:
        timer = None
        if limit is not None:
            timer = asyncio.get_running_loop().call_later(limit, interpreter.shutdown.pass_deadline)
        try:
            return await interpreter.execute(call)
        finally:
            if timer is not None:
                timer.cancel()

    async def _exit_handler(self, interpreter: Interpreter, main: Node, name: str | None) -> Node | None:
        if not name or interpreter.shutdown.reason(on_exit=True):
            return None
        interpreter.variables["workflow.status"] = str(main.phase if main.failed else NodePhase.SUCCEEDED)
        interpreter.variables["workflow.failures"] = interpreter.nodes.failures()
        call = Call(f"{interpreter.definitions.workflow}.onExit", name, {}, on_exit=True)
        return await interpreter.execute(call)

    def _interpreter(self, workflow: Manifest, nodes: NodeTable, shutdown: Shutdown, agent: Agent) -> Interpreter:
        spec = workflow["spec"]
        return Interpreter(
            definitions=Definitions(workflow),
            nodes=nodes,
            variables=workflow_variables(workflow),
            shutdown=shutdown,
            agent=agent,
            pods=self._pods,
            pod_slots=asyncio.Semaphore(int(spec["parallelism"])) if spec.get("parallelism") else None,
            volumes=Volumes(workflow, self._state),
            clock=self._clock,
            speed=self._speed,
        )
