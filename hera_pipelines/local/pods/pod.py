"""Runs container and script templates as processes.

The order is that of a pod: inputs, program, outputs, status. The status becomes
final only after the process group has ended and the outputs are stored, because
the plugin releases GPUs when it reads a final status.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiphys_plugin.cluster.interface import DirectoryCluster, PodStatus, requested_resources

from hera_pipelines.local.nodes import NodeEnd, NodePhase, WorkflowNodeOutputs
from hera_pipelines.local.pods.artifacts import ArtifactBucket
from hera_pipelines.local.pods.pod_files import LocalPod, PodFiles, PodPatch, parse_pod_spec_patch
from hera_pipelines.local.pods.pod_paths import container_or_script
from hera_pipelines.local.pods.process import PodProcess, ProcessEnvironment
from hera_pipelines.local.shutdown import WorkflowShutdown
from tiphys.errors import NotFoundError, TiphysError, UsageError
from tiphys.records import utc_now


class _ProgramEnd(NamedTuple):
    """End of a program. ``message`` is empty if the program exited by itself; ``reason`` is the Kubernetes code."""

    code: int | None = None
    message: str = ""
    reason: str = ""


_DELETED = _ProgramEnd(None, "pod deleted", "Deleted")
POLL_SECONDS = 0.1
"""Interval at which running pods and gangs are checked for a deletion."""
_MESSAGE_SECONDS = 0.5
"""Interval at which the log of a running program is read for messages of Tiphys."""
_MESSAGE_POLICY_FIELD, _FALLBACK_TO_LOGS = "terminationMessagePolicy", "FallbackToLogsOnError"
_DEADLINE_EXCEEDED = _ProgramEnd(
    None, "Pod was active on the node longer than the specified deadline", "DeadlineExceeded"
)


class PodRunner:
    """Runs the pods of one engine."""

    def __init__(
        self, cluster: DirectoryCluster, bucket: ArtifactBucket, state: Path, process_environment: ProcessEnvironment
    ) -> None:
        self._cluster = cluster
        self._bucket = bucket
        self._state = state
        self._process_environment = process_environment
        self._deletions: dict[str, asyncio.Event] = {}
        self._grace_seconds: dict[str, float] = {}
        self._shown_refusals: set[str] = set()

    def delete(self, name: str) -> None:
        """End a pod as ``kubectl delete pod`` does: SIGTERM, grace period, SIGKILL. Ignored if it is not running."""
        if name in self._deletions:
            self._deletions[name].set()

    def longest_grace_seconds(self) -> float:
        """Longest grace period of the running pods in seconds; 0 if none runs."""
        return max(self._grace_seconds.values(), default=0.0)

    async def run(
        self, pod: LocalPod, shutdown: WorkflowShutdown, show_message: Callable[[str], None] = lambda _: None
    ) -> NodeEnd:
        """Run ``pod`` to its end; a failure is returned, not raised.

        ``show_message`` is called with the messages that Tiphys writes into the log of the program.
        """
        self._write_status(pod, "Pending")
        attempt = PodFiles(pod, self._state, self._bucket, self._process_environment)
        try:
            patch = parse_pod_spec_patch(pod.template.get("podSpecPatch") or "")
            await asyncio.to_thread(attempt.prepare)
        except (TiphysError, OSError) as error:
            code = " (exit code 64)" if isinstance(error, NotFoundError) else ""
            return self._end_with_error(attempt, f"init: Error{code}: {error}", _ProgramEnd())
        if (reason := attempt.namespace_refusal) not in ("", *self._shown_refusals):
            self._shown_refusals.add(reason)
            show_message(
                f"the step has no file system of its own ({reason}): its declared paths are replaced in its command, "
                "variables and source; a path that the program builds in another way is that of this machine"
            )
        self._deletions[pod.name] = asyncio.Event()
        grace_seconds = self._process_environment.grace_seconds(patch.grace_seconds)
        self._grace_seconds[pod.name] = grace_seconds
        try:
            self._write_status(pod, "Running", grace_seconds=grace_seconds)
            end = await self._execute(attempt, patch, shutdown, show_message)
            if undeclared := await asyncio.to_thread(attempt.remove_mount_points):
                show_message(
                    f"no field declares {', '.join(undeclared[:5])}{', …' if len(undeclared) > 5 else ''}, which the "
                    "program wrote; as in a container, that ends with the step: declare an output or mount a volume"
                )
            if end.code == 0 and (lost := await asyncio.to_thread(attempt.list_lost_properties)):
                show_message(
                    f"storage keeps only the bytes of outputs: {'; '.join(lost[:5])}{'; …' if lost[5:] else ''}; the "
                    "next step gets plain files alone, so pack the folder into a tar file if it needs more"
                )
        except UsageError as error:
            return self._end_with_error(attempt, f"main: Error: {error}", _ProgramEnd())
        finally:
            del self._deletions[pod.name], self._grace_seconds[pod.name]
        return await self._finish(attempt, end)

    async def _execute(
        self, attempt: PodFiles, patch: PodPatch, shutdown: WorkflowShutdown, show_message: Callable[[str], None]
    ) -> _ProgramEnd:
        pod = attempt.pod
        process = await PodProcess.start(attempt.build_command(patch))
        exited = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(shutdown.wait_until_stopped(pod.on_exit))
        deleted = asyncio.ensure_future(self._wait_for_deletion(pod.name))
        messages = asyncio.ensure_future(_show_messages(attempt, show_message))
        try:
            await asyncio.wait(
                {exited, stopped, deleted}, timeout=pod.timeout_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if exited.done():
                return _ProgramEnd(exited.result())
            code = await process.terminate(
                self._grace_seconds[pod.name], kill_early=shutdown.wait_until_stopped(on_exit=True)
            )
            if stopped.done():
                return _ProgramEnd(code, shutdown.stop_reason(pod.on_exit))
            return _DELETED._replace(code=code) if deleted.done() else _DEADLINE_EXCEEDED._replace(code=code)
        finally:
            for waiter in (exited, stopped, deleted, messages):
                waiter.cancel()
            process.kill()

    async def _wait_for_deletion(self, name: str) -> None:
        """Wait until the pod is deleted, by `delete` or in the cluster."""
        deletion = self._deletions[name]
        while not deletion.is_set() and not self._cluster.is_terminating(name):
            with suppress(TimeoutError):
                await asyncio.wait_for(deletion.wait(), POLL_SECONDS)

    async def _finish(self, attempt: PodFiles, end: _ProgramEnd) -> NodeEnd:
        outputs = WorkflowNodeOutputs(exit_code=str(end.code))
        if not end.message:  # as on a cluster, a pod that was ended from outside loses its outputs
            try:
                outputs = await asyncio.to_thread(attempt.store_outputs, str(end.code))
            except (TiphysError, OSError) as error:
                if end.code == 0:  # of a program that failed, Argo reports its own end
                    return self._end_with_error(attempt, f"wait: Error (exit code 64): {error}", end)
        if end.code == 0 and end.message in ("", _DELETED.message):  # Argo accepts exit code 0 of a deleted pod too
            self._write_status(attempt.pod, "Succeeded", end)
            await asyncio.to_thread(attempt.discard)
            return NodeEnd(NodePhase.SUCCEEDED, "", outputs)
        message = end.message or f"main: Error (exit code {end.code})"
        tail = await asyncio.to_thread(attempt.read_log_tail)
        termination_message = (
            "\n".join(tail)
            if container_or_script(attempt.pod.template).get(_MESSAGE_POLICY_FIELD) == _FALLBACK_TO_LOGS
            else ""
        )
        self._write_status(attempt.pod, "Failed", end, message, termination_message=termination_message)
        return NodeEnd(NodePhase.FAILED, message, outputs, tail)

    def _end_with_error(self, attempt: PodFiles, message: str, end: _ProgramEnd) -> NodeEnd:
        self._write_status(attempt.pod, "Failed", end, message)
        return NodeEnd(NodePhase.ERROR, message, log_tail=attempt.read_log_tail())

    def _write_status(
        self,
        pod: LocalPod,
        phase: str,
        end: _ProgramEnd | None = None,
        message: str = "",
        *,
        grace_seconds: float | None = None,
        termination_message: str = "",
    ) -> None:
        self._cluster.write_pod(
            PodStatus(
                name=pod.name,
                namespace=pod.namespace,
                workflow_uid=pod.workflow_uid,
                node=pod.node,
                labels=pod.labels,
                phase=phase,
                exit_code=end.code if end else None,
                reason=end.reason if end else "",
                message=message,
                termination_message=termination_message,
                grace_seconds=grace_seconds,
                rank=pod.rank,
                resources=requested_resources({"spec": {"containers": [container_or_script(pod.template)]}}),
                trouble_at=utc_now() if phase == "Failed" else None,
            )
        )


async def _show_messages(attempt: PodFiles, show_message: Callable[[str], None]) -> None:
    """Pass on the messages of Tiphys in the log of a running program, until cancelled."""
    messages = attempt.follow_messages()
    while True:
        for message in next(messages):
            show_message(message)
        await asyncio.sleep(_MESSAGE_SECONDS)
