"""Runs a gang on this machine: one process for each rank of the Indexed Job of a multi-node training step.

The ranks are the containers that the Job would create; none is restarted alone. As
in Kubernetes, the first failed rank stops the others. An elastic gang continues
until a rank succeeds or more ranks fail than the Job tolerates (``maxFailedIndexes``).
"""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

from hera_pipelines.local.nodes import NodeEnd, NodePhase
from hera_pipelines.local.pods.pod import POLL_SECONDS, PodRunner
from hera_pipelines.local.pods.pod_files import LocalPod
from hera_pipelines.local.shutdown import WorkflowShutdown
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GANG_LABEL

_LOOPBACK = "127.0.0.1"
_ADDRESS_VARIABLES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")
_RENDEZVOUS_ENDPOINT = "PET_RDZV_ENDPOINT"


class LocalGang(NamedTuple):
    """Pods of one gang by rank. It tolerates ``spare`` failed ranks; an elastic one succeeds with its first success."""

    pods: Sequence[LocalPod]
    spare: int = 0
    is_elastic: bool = False

    def has_failed(self, failed: Sequence[LocalPod]) -> bool:
        """Whether the gang has failed when these pods have failed."""
        return len(failed) > self.spare


def build_local_gang(job: Manifest, pods: Sequence[LocalPod]) -> LocalGang:
    """Build the gang of a Job from its pods; the Job says how many failed ranks it tolerates."""
    is_elastic = "backoffLimitPerIndex" in job["spec"]
    return LocalGang(pods, int(job["spec"].get("maxFailedIndexes") or 0), is_elastic)


def member_templates(job: Manifest) -> list[Manifest]:
    """Build a container or script template for each rank of a Job.

    Raises:
        UsageError: the object is not a Job that the compiler created for a multi-node training step.
    """
    labels = (job.get("metadata") or {}).get("labels") or {}
    if job.get("kind") != "Job" or GANG_LABEL not in labels:
        raise UsageError(
            f"resource: the local engine cannot create a {job.get('kind') or 'nameless object'}; the only supported "
            "resource is the Job of a multi-node training step"
        )
    spec, port = job["spec"], str(_free_port())
    return [_member_template(spec["template"], rank, port) for rank in range(int(spec["completions"]))]


def _member_template(template: Manifest, rank: int, port: str) -> Manifest:
    pod = template["spec"]
    container = {field: value for field, value in pod["containers"][0].items() if field != "name"}
    container["env"] = [
        variable for declared in container.get("env") or [] for variable in _member_variables(declared, rank, port)
    ]
    kind, program, source_volume = _member_program(
        container, pod.get("volumes") or [], template["metadata"]["annotations"]
    )
    member: Manifest = {
        "name": "member",
        "metadata": {"labels": template["metadata"]["labels"]},
        # The member fetches and stores these files itself; they are declared so that their paths are redirected.
        "inputs": {"artifacts": _file_artifacts(container["env"])},
        kind: program,
        "volumes": [volume for volume in pod.get("volumes") or [] if volume["name"] != source_volume],
        "podSpecPatch": json.dumps({"terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"]}),
    }
    return member | {field: pod[field] for field in ("activeDeadlineSeconds",) if field in pod}


def _member_variables(variable: Manifest, rank: int, port: str) -> list[Manifest]:
    name = variable["name"]
    if "fieldRef" in (variable.get("valueFrom") or {}):
        return [{"name": name, "value": str(rank)}]
    if name == _RENDEZVOUS_ENDPOINT:
        # torchrun sorts the nodes by address, and the first one must be the rendezvous host.
        local_address = {"name": "PET_LOCAL_ADDR", "value": f"127.0.0.{1 + rank}"}
        return [{**variable, "value": f"{_LOOPBACK}:{port}"}, local_address]
    value = _LOOPBACK if name in _ADDRESS_VARIABLES else port if name in _PORT_VARIABLES else variable.get("value", "")
    return [{**variable, "value": value}]


def _member_program(container: Manifest, volumes: list[Manifest], annotations: Manifest) -> tuple[str, Manifest, str]:
    """Template type, program, and the name of the volume that holds only the program's source (or empty)."""
    for volume in volumes:
        if "downwardAPI" in volume:
            field = volume["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"]
            source = annotations[field.partition("'")[2].rstrip("']")]
            mounts = [mount for mount in container["volumeMounts"] if mount["name"] != volume["name"]]
            program = {**container, "args": container["args"][:-1], "source": source, "volumeMounts": mounts}
            return "script", program, volume["name"]
    return "container", container, ""


def _file_artifacts(variables: list[Manifest]) -> list[Manifest]:
    text = next((variable["value"] for variable in variables if variable["name"] == environment.FILES), "{}")
    paths = [path for side in json.loads(text).values() for path in side.values()]
    return [{"name": f"file-{number}", "path": path} for number, path in enumerate(paths)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


async def run_gang(
    pods: PodRunner, gang: LocalGang, shutdown: WorkflowShutdown, show_message: Callable[[str], None] = lambda _: None
) -> NodeEnd:
    """Run all ranks to their ends; return the end of the rank that decided the gang's result.

    ``show_message`` is called as by `PodRunner.run`, for all ranks.
    """

    def run_rank(pod: LocalPod) -> Coroutine[None, None, NodeEnd]:
        return pods.run(pod, shutdown, lambda message: show_message(f"rank {pod.rank}: {message}"))

    running = {asyncio.ensure_future(run_rank(pod)): pod for pod in gang.pods}
    result: NodeEnd | None = None
    failed: list[LocalPod] = []
    pending = set(running)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                end, pod = task.result(), running[task]
                succeeded = end.phase is NodePhase.SUCCEEDED
                failed += [] if succeeded else [pod]
                if result is None and succeeded and gang.is_elastic:
                    result = NodeEnd(NodePhase.SUCCEEDED)
                if result is None and not succeeded and gang.has_failed(failed):
                    result = end._replace(message=f"rank {pod.rank}: {end.message}")
            if result is not None:
                for task in pending:  # repeated at each poll, because a pod that has not started cannot be deleted
                    pods.delete(running[task].name)
    finally:
        for task in pending:
            task.cancel()
    return result or NodeEnd(NodePhase.SUCCEEDED)
