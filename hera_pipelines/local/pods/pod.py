"""Runs container and script templates as processes.

The order is a pod's: inputs, program, outputs, status. The status that the
plugin reads turns final only once the process group is gone and its outputs
are stored, since GPUs are freed on it.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiphys_plugin.cluster.interface import DirectoryCluster, PodStatus

from hera_pipelines.local.nodes import NodePhase, Outputs, Verdict
from hera_pipelines.local.pods.artifacts import Bucket
from hera_pipelines.local.pods.pod_files import Attempt, Pod, PodPatch, program_of, read_patch
from hera_pipelines.local.pods.process import Process, Surroundings
from hera_pipelines.local.shutdown import Shutdown
from tiphys.errors import NotFoundError, TiphysError, UsageError
from tiphys.records import utc_now


class _End(NamedTuple):
    """How the program ended. ``why`` is empty if it ended by itself; ``reason`` is Kubernetes' code for it."""

    code: int | None = None
    why: str = ""
    reason: str = ""


_DELETED = _End(None, "pod deleted", "Deleted")
_LOOK_SECONDS = 0.1
"""How often a running pod is asked for that somebody outside of the engine has told to end."""
_LOG_POLICY, _LOG_IS_TOLD = "terminationMessagePolicy", "FallbackToLogsOnError"
_LATE = _End(None, "Pod was active on the node longer than the specified deadline", "DeadlineExceeded")


class Pods:
    """All pods of one engine."""

    def __init__(self, cluster: DirectoryCluster, bucket: Bucket, state: Path, surroundings: Surroundings) -> None:
        self._cluster = cluster
        self._bucket = bucket
        self._state = state
        self._surroundings = surroundings
        self._deletions: dict[str, asyncio.Event] = {}

    def delete(self, name: str) -> None:
        """End a pod as ``kubectl delete pod`` does: SIGTERM, grace, SIGKILL. Nothing happens if it is not running."""
        if name in self._deletions:
            self._deletions[name].set()

    async def run(self, pod: Pod, shutdown: Shutdown) -> Verdict:
        """Run ``pod`` to its end, whatever that is."""
        self._report(pod, "Pending")
        attempt = Attempt(pod, self._state, self._bucket, self._surroundings)
        try:
            patch = read_patch(pod.template.get("podSpecPatch") or "")
            await asyncio.to_thread(attempt.prepare)
        except (TiphysError, OSError) as error:
            code = " (exit code 64)" if isinstance(error, NotFoundError) else ""
            return self._error(attempt, f"init: Error{code}: {error}", _End())
        self._deletions[pod.name] = asyncio.Event()
        try:
            self._report(pod, "Running", grace_seconds=self._surroundings.grace_seconds(patch.grace_seconds))
            end = await self._execute(attempt, patch, shutdown)
        except UsageError as error:
            return self._error(attempt, f"main: Error: {error}", _End())
        finally:
            del self._deletions[pod.name]
        return await self._finish(attempt, end)

    async def _execute(self, attempt: Attempt, patch: PodPatch, shutdown: Shutdown) -> _End:
        pod = attempt.pod
        process = await Process.start(attempt.command(patch))
        exited = asyncio.ensure_future(process.wait())
        denied = asyncio.ensure_future(shutdown.denied(pod.on_exit))
        deleted = asyncio.ensure_future(self._deleted(pod.name))
        try:
            await asyncio.wait({exited, denied, deleted}, timeout=pod.seconds, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return _End(exited.result())
            grace = self._surroundings.grace_seconds(patch.grace_seconds)
            code = await process.end(grace, hurry=shutdown.denied(on_exit=True))
            if denied.done():
                return _End(code, shutdown.reason(pod.on_exit))
            return _DELETED._replace(code=code) if deleted.done() else _LATE._replace(code=code)
        finally:
            for waiting in (exited, denied, deleted):
                waiting.cancel()
            process.kill()

    async def _deleted(self, name: str) -> None:
        """Return once the pod is told to end: by this engine, or through the cluster."""
        told = self._deletions[name]
        while not told.is_set() and not self._cluster.is_ending(name):
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), _LOOK_SECONDS)

    async def _finish(self, attempt: Attempt, end: _End) -> Verdict:
        outputs = Outputs(exit_code=str(end.code))
        if not end.why:  # a pod that was ended from outside loses its outputs, on a cluster too
            try:
                outputs = await asyncio.to_thread(attempt.collect, str(end.code))
            except (TiphysError, OSError) as error:
                return self._error(attempt, f"wait: Error (exit code 64): {error}", end)
        if end.code == 0 and end.why in ("", _DELETED.why):  # Argo trusts a 0 even of a pod that was deleted
            self._report(attempt.pod, "Succeeded", end)
            await asyncio.to_thread(attempt.discard)
            return Verdict(NodePhase.SUCCEEDED, "", outputs)
        message = end.why or f"main: Error (exit code {end.code})"
        tail = await asyncio.to_thread(attempt.tail)
        told = "\n".join(tail) if program_of(attempt.pod.template).get(_LOG_POLICY) == _LOG_IS_TOLD else ""
        self._report(attempt.pod, "Failed", end, message, told=told)
        return Verdict(NodePhase.FAILED, message, outputs, tail)

    def _error(self, attempt: Attempt, message: str, end: _End) -> Verdict:
        self._report(attempt.pod, "Failed", end, message)
        return Verdict(NodePhase.ERROR, message, log_tail=attempt.tail())

    def _report(
        self,
        pod: Pod,
        phase: str,
        end: _End | None = None,
        message: str = "",
        *,
        grace_seconds: float | None = None,
        told: str = "",
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
                told=told,
                grace_seconds=grace_seconds,
                rank=pod.rank,
                trouble_at=utc_now() if phase == "Failed" else None,
            )
        )
