"""The local engine: runs a compiled Workflow on this machine, for development.

It runs the containers as processes and calls the same plugin by the same protocol
as Argo does. It is not a second Argo: fields outside the subset that the compiler
emits are refused by name before anything starts.
"""

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tiphys_plugin.cluster.interface import DirectoryCluster

from hera_pipelines.local.interpreter import Interpreter, TemplateCall
from hera_pipelines.local.live_workflows import hold_workflow_lock, mark_alive, record_engine
from hera_pipelines.local.nodes import NodeChange, NodePhase, NodeTable, WorkflowNode, ignore_change
from hera_pipelines.local.plugin_client import PluginClient, PluginEndpoint
from hera_pipelines.local.pods.artifacts import ArtifactBucket
from hera_pipelines.local.pods.pod import PodRunner
from hera_pipelines.local.pods.pod_files import WorkflowVolumes
from hera_pipelines.local.pods.process import ProcessEnvironment
from hera_pipelines.local.shutdown import STOP, TERMINATE, WorkflowShutdown, handle_stop_signals
from hera_pipelines.local.supported import check_supported
from hera_pipelines.local.workflow_object import (
    StoredWorkflow,
    WorkflowDefinition,
    add_server_fields,
    workflow_variables,
)
from tiphys.errors import StoreError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, Store

_SHUTDOWN_NOTICES = {
    STOP: "stopping: programs may save first, and the exit handler runs; press Ctrl-C again to end all at once",
    TERMINATE: "terminating: all programs end at once",
}

_DISK_WATCH_SECONDS = 2.0
_HEARTBEAT_SECONDS = 1.0
_FULL_DISK_BYTES = 1 << 20
"""A disk with less free space counts as full."""


class LocalEngine:
    """Runs workflows; each call of `run` runs one.

    Args:
        store: Holds the artifacts that have a key.
        cluster: Holds the Workflow object and its pods, which the plugin reads.
        state: Folder for logs, attempts and volumes.
        plugin: Endpoint that executes plugin templates.
        speed: Divides back-offs, requeues and suspends; programs run at normal speed.
        observer: Called for every change of a node, in the thread of `run`.
        code: Folder whose modules programs can import; by default the working
            directory of the engine.
        longest_grace_seconds: Upper limit of grace periods; None sets no limit.
        clock: Returns the current time in UTC.
    """

    def __init__(
        self,
        store: Store,
        cluster: DirectoryCluster,
        state: Path,
        plugin: PluginEndpoint,
        speed: float = 1.0,
        observer: Callable[[NodeChange], None] = ignore_change,
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
        self._folders = [self._state, *([store.folder] if isinstance(store, DirectoryStore) else [])]
        process_environment = ProcessEnvironment((code or Path.cwd()).absolute(), store.url, longest_grace_seconds)
        bucket = ArtifactBucket(store, self._state / "bucket")
        self._pods = PodRunner(cluster, bucket, self._state, process_environment)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown: WorkflowShutdown | None = None

    def check(self, manifest: Manifest) -> None:
        """Raise `UsageError` that names everything in ``manifest`` that the local engine does not support."""
        check_supported(manifest)

    def run(self, manifest: Manifest, on_running: Callable[[], object] = lambda: None) -> NodePhase:
        """Run a Workflow to its end and return its phase.

        In the main thread, the first SIGINT, SIGTERM or SIGHUP stops the workflow (the
        exit handler still runs), and a second SIGINT or SIGTERM terminates it.

        ``on_running`` is called before the first node begins, once others can find the workflow running, and stop it.

        Raises:
            UsageError: the manifest has a field that the local engine does not support.
            ConflictError: another engine runs this workflow.
            StoreError: the workflow was stopped, and storage did not accept its end within the grace period.
        """
        check_supported(manifest)
        workflow = manifest if manifest["metadata"].get("uid") else add_server_fields(manifest, self._clock())
        with hold_workflow_lock(self._state, workflow["metadata"]["name"]):
            if threading.current_thread() is threading.main_thread():  # only there it handles signals
                record_engine(self._state, workflow["metadata"]["name"])
            return asyncio.run(self._run(workflow, on_running))

    def stop(self) -> None:
        """Stop the running workflow; a second call terminates it. Safe in any thread."""
        if self._shutdown is not None:
            self._call_in_loop(self._shutdown.request)

    def delete_pod(self, name: str) -> None:
        """End a running pod as ``kubectl delete pod`` does. Safe in any thread."""
        self._call_in_loop(lambda: self._pods.delete(name))

    def _call_in_loop(self, action: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop has closed, so the workflow has ended
                self._loop.call_soon_threadsafe(action)

    async def _run(self, workflow: Manifest, on_running: Callable[[], object]) -> NodePhase:
        stored_workflow = StoredWorkflow(self._cluster, workflow, self._clock)

        def observe(change: NodeChange) -> None:
            stored_workflow.mark_changed()
            self._observer(change)

        def announce() -> None:
            stored_workflow.set_shutdown(shutdown.strategy)
            nodes.announce(_SHUTDOWN_NOTICES[shutdown.strategy])

        nodes = NodeTable(workflow["metadata"]["name"], self._clock, observe)
        shutdown = WorkflowShutdown(announce, self._pods.longest_grace_seconds)
        self._loop, self._shutdown = asyncio.get_running_loop(), shutdown
        try:
            with handle_stop_signals(self._loop, shutdown):
                stored_workflow.mark_running()
                on_running()
                phase, message = await self._interpret(workflow, nodes, shutdown, stored_workflow)
                stored_workflow.mark_finished(phase, message, nodes)
                if shutdown.unrecorded:
                    raise StoreError(f"the end of the run is not recorded: {shutdown.unrecorded}")
                return phase
        finally:
            self._loop = self._shutdown = None

    async def _interpret(
        self, workflow: Manifest, nodes: NodeTable, shutdown: WorkflowShutdown, stored_workflow: StoredWorkflow
    ) -> tuple[NodePhase, str]:
        identity = WorkflowMetadata.model_validate(workflow["metadata"])
        writer = asyncio.ensure_future(stored_workflow.write_periodically(nodes))
        disk_watch = asyncio.ensure_future(_watch_disks(self._folders, nodes.announce))
        heartbeat = asyncio.ensure_future(self._mark_alive(identity.name))
        try:
            async with PluginClient(self._plugin, identity, self._speed) as plugin_client:
                interpreter = self._build_interpreter(workflow, nodes, shutdown, plugin_client)
                return await self._run_main_and_exit_handler(interpreter, shutdown, stored_workflow)
        finally:
            for task in (writer, disk_watch, heartbeat):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _mark_alive(self, workflow: str) -> None:
        while True:
            mark_alive(self._state, workflow)
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    async def _run_main_and_exit_handler(
        self, interpreter: Interpreter, shutdown: WorkflowShutdown, stored_workflow: StoredWorkflow
    ) -> tuple[NodePhase, str]:
        """Run the entry point, then the exit handler; return the final phase and message of the workflow."""
        spec = interpreter.definition.manifest["spec"]
        name = interpreter.definition.workflow_name
        limit = float(spec["activeDeadlineSeconds"]) if spec.get("activeDeadlineSeconds") else None
        main = await self._run_main(
            interpreter, TemplateCall(name, spec["entrypoint"], spec.get("arguments") or {}), limit
        )
        stored_workflow.write_nodes(interpreter.nodes)  # finalize records the steps that they show
        handler = await self._run_exit_handler(interpreter, main, spec.get("onExit"))
        if main.failed:
            stopped = f"Stopped with strategy '{shutdown.strategy}'" if shutdown.strategy else ""
            return main.phase, stopped or main.message
        if handler is not None and handler.failed:
            return handler.phase, handler.message
        return NodePhase.SUCCEEDED, main.message

    async def _run_main(self, interpreter: Interpreter, call: TemplateCall, limit: float | None) -> WorkflowNode:
        timer = None
        if limit is not None:
            timer = asyncio.get_running_loop().call_later(limit, interpreter.shutdown.exceed_deadline)
        try:
            return await interpreter.execute(call)
        finally:
            if timer is not None:
                timer.cancel()

    async def _run_exit_handler(
        self, interpreter: Interpreter, main: WorkflowNode, name: str | None
    ) -> WorkflowNode | None:
        if not name or interpreter.shutdown.stop_reason(on_exit=True):
            return None
        interpreter.variables["workflow.status"] = str(main.phase if main.failed else NodePhase.SUCCEEDED)
        interpreter.variables["workflow.failures"] = interpreter.nodes.failures_json()
        call = TemplateCall(f"{interpreter.definition.workflow_name}.onExit", name, {}, on_exit=True)
        return await interpreter.execute(call)

    def _build_interpreter(
        self, workflow: Manifest, nodes: NodeTable, shutdown: WorkflowShutdown, plugin_client: PluginClient
    ) -> Interpreter:
        spec = workflow["spec"]
        return Interpreter(
            definition=WorkflowDefinition(workflow),
            nodes=nodes,
            variables=workflow_variables(workflow),
            shutdown=shutdown,
            plugin_client=plugin_client,
            pods=self._pods,
            pod_slots=asyncio.Semaphore(int(spec["parallelism"])) if spec.get("parallelism") else None,
            volumes=WorkflowVolumes(workflow, self._state),
            clock=self._clock,
            speed=self._speed,
        )


async def _watch_disks(folders: Sequence[Path], announce: Callable[[str], None]) -> None:
    """Announce a full disk, or a folder that is gone, until cancelled; saves may be due only much later."""
    announced = ""
    while True:
        problem = next(filter(None, map(_describe_disk_problem, folders)), "")
        if problem and problem != announced:
            announce(problem)
        announced = problem
        await asyncio.sleep(_DISK_WATCH_SECONDS)


def _describe_disk_problem(folder: Path) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}; checkpoints and results may be lost"
    return f"the disk of {folder} is full: free some space, or saves fail" if free < _FULL_DISK_BYTES else ""
