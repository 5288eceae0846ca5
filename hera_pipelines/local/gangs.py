"""A training on several nodes as processes on this machine: one for each member of its Indexed Job.

The members are what the Job would have made: containers with their ranks, of
which none is started again alone. The first that fails has the others told to
stop, as Kubernetes does.
"""

import asyncio
import json
import socket
from collections.abc import Sequence

from hera_pipelines.local.attempt import Pod
from hera_pipelines.local.changes import NodePhase
from hera_pipelines.local.pods import Pods
from hera_pipelines.local.shutdown import Shutdown
from hera_pipelines.local.verdict import Verdict
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.gang import GANG_LABEL
from tiphys.protocol.pipeline import Manifest

_HERE = "127.0.0.1"
_ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
_LOOK_SECONDS = 0.1


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
    return [_member(spec["template"], rank, port) for rank in range(spec["completions"])]


def _member(template: Manifest, rank: int, port: str) -> Manifest:
    pod = template["spec"]
    container = {field: value for field, value in pod["containers"][0].items() if field != "name"}
    container["env"] = [_variable(one, rank, port) for one in container.get("env") or []]
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


def _variable(variable: Manifest, rank: int, port: str) -> Manifest:
    name = variable["name"]
    if "fieldRef" in (variable.get("valueFrom") or {}):
        return {"name": name, "value": str(rank)}
    value = _HERE if name in _ADDRESSES else port if name in _PORTS else variable.get("value", "")
    return {**variable, "value": value}


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


async def run_members(pods: Pods, members: Sequence[Pod], shutdown: Shutdown) -> Verdict:
    """Run all members to their ends; the verdict is that of the first that failed."""
    running = {asyncio.ensure_future(pods.run(pod, shutdown)): pod for pod in members}
    first: Verdict | None = None
    pending = set(running)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                verdict = one.result()
                if first is None and verdict.phase is not NodePhase.SUCCEEDED:
                    first = verdict._replace(message=f"rank {running[one].rank}: {verdict.message}")
            if first is not None:
                for one in pending:  # again and again: one that is not yet running cannot be told
                    pods.delete(running[one].name)
    finally:
        for one in pending:
            one.cancel()
    return first or Verdict(NodePhase.SUCCEEDED)
