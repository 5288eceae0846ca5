"""A training on several nodes as processes on this machine: one for each member of its Indexed Job.

The members are what the Job would have made: containers with their ranks, of
which none is started again alone. The first that fails has the others told to
stop, as Kubernetes does; in an elastic one that is the first member, or one more
than can be spared.
"""

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import NamedTuple

from hera_pipelines.local.nodes import NodePhase, Verdict
from hera_pipelines.local.pods.pod import Pods
from hera_pipelines.local.pods.pod_files import Pod
from hera_pipelines.local.shutdown import Shutdown
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GANG_LABEL

_HERE = "127.0.0.1"
_ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
_MEETING = "PET_RDZV_ENDPOINT"
_LOOK_SECONDS = 0.1


class Members(NamedTuple):
    """Pods of one gang, by rank; it goes on while at most ``spare`` are lost, and not the first."""

    pods: Sequence[Pod]
    spare: int = 0
    is_elastic: bool = False

    def cannot_lose(self, failed: Sequence[Pod]) -> bool:
        """Whether it is over once these have failed."""
        return len(failed) > self.spare or any(pod.rank == 0 for pod in failed)

    def has_all_it_needs(self, succeeded: Pod) -> bool:
        """Whether it has succeeded once this one has."""
        return self.is_elastic and succeeded.rank == 0


def gang_of(job: Manifest, pods: Sequence[Pod]) -> Members:
    """The pods of a Job, and what it says about losing some."""
    is_elastic = "backoffLimitPerIndex" in job["spec"]
    return Members(pods, int(job["spec"].get("maxFailedIndexes") or 0), is_elastic)


def member_templates(job: Manifest) -> list[Manifest]:
    """A container or script template for each member of a Job, by rank.

    Raises:
        UsageError: the object is not a Job that compile made for a training on several nodes.
    """
    labels = (job.get("metadata") or {}).get("labels") or {}
    if job.get("kind") != "Job" or GANG_LABEL not in labels:
        raise UsageError(
            f"resource: a {job.get('kind') or 'nameless object'} cannot be created here; of resources, only the Job "
            "of a training on several nodes can be run"
        )
    spec, port = job["spec"], str(_free_port())
    return [_member(spec["template"], rank, port) for rank in range(int(spec["completions"]))]


def _member(template: Manifest, rank: int, port: str) -> Manifest:
    pod = template["spec"]
    container = {field: value for field, value in pod["containers"][0].items() if field != "name"}
    container["env"] = [found for one in container.get("env") or [] for found in _variables(one, rank, port)]
    kind, program, ours = _program(container, pod.get("volumes") or [], template["metadata"]["annotations"])
    made: Manifest = {
        "name": "member",
        "metadata": {"labels": template["metadata"]["labels"]},
        # Fetched and stored by the member itself; only that they are paths of its own must be known here.
        "inputs": {"artifacts": _files(container["env"])},
        kind: program,
        "volumes": [volume for volume in pod.get("volumes") or [] if volume["name"] != ours],
        "podSpecPatch": json.dumps({"terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"]}),
    }
    return made | {field: pod[field] for field in ("activeDeadlineSeconds",) if field in pod}


def _variables(variable: Manifest, rank: int, port: str) -> list[Manifest]:
    name = variable["name"]
    if "fieldRef" in (variable.get("valueFrom") or {}):
        return [{"name": name, "value": str(rank)}]
    if name == _MEETING:
        # By their addresses torchrun puts the nodes in order, and the first must be the one where they meet.
        own = {"name": "PET_LOCAL_ADDR", "value": f"127.0.0.{1 + rank}"}
        return [{**variable, "value": f"{_HERE}:{port}"}, own]
    value = _HERE if name in _ADDRESSES else port if name in _PORTS else variable.get("value", "")
    return [{**variable, "value": value}]


def _program(container: Manifest, volumes: list[Manifest], annotations: Manifest) -> tuple[str, Manifest, str]:
    """Kind of template, program, and the name of the volume that only carried its source."""
    for volume in volumes:
        if "downwardAPI" in volume:
            field = volume["downwardAPI"]["items"][0]["fieldRef"]["fieldPath"]
            source = annotations[field.partition("'")[2].rstrip("']")]
            mounts = [mount for mount in container["volumeMounts"] if mount["name"] != volume["name"]]
            program = {**container, "args": container["args"][:-1], "source": source, "volumeMounts": mounts}
            return "script", program, volume["name"]
    return "container", container, ""


def _files(variables: list[Manifest]) -> list[Manifest]:
    text = next((one["value"] for one in variables if one["name"] == environment.FILES), "{}")
    paths = [path for side in json.loads(text).values() for path in side.values()]
    return [{"name": f"file-{number}", "path": path} for number, path in enumerate(paths)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_HERE, 0))
        port: int = found.getsockname()[1]
        return port


async def run_members(pods: Pods, members: Members, shutdown: Shutdown) -> Verdict:
    """Run all members to their ends; the verdict is that of the first that could not be lost."""
    running = {asyncio.ensure_future(pods.run(pod, shutdown)): pod for pod in members.pods}
    decided: Verdict | None = None
    failed: list[Pod] = []
    pending = set(running)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                verdict, pod = one.result(), running[one]
                succeeded = verdict.phase is NodePhase.SUCCEEDED
                failed += [] if succeeded else [pod]
                if decided is None and succeeded and members.has_all_it_needs(pod):
                    decided = Verdict(NodePhase.SUCCEEDED)
                if decided is None and not succeeded and members.cannot_lose(failed):
                    decided = verdict._replace(message=f"rank {pod.rank}: {verdict.message}")
            if decided is not None:
                for one in pending:  # again and again: one that is not yet running cannot be told
                    pods.delete(running[one].name)
    finally:
        for one in pending:
            one.cancel()
    return decided or Verdict(NodePhase.SUCCEEDED)
