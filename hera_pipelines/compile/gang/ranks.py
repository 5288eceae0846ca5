"""What tells a member of an Indexed Job which one it is, in the words of torchrun and of plain PyTorch.

``PET_…`` are the defaults of torchrun's own options, so ``torchrun train.py``
needs none of them. A program that is its node's only process finds ``RANK``
and ``WORLD_SIZE``; below torchrun each process gets its own of these.
"""

from hera_pipelines.compile import names
from hera_pipelines.compile.gated import GatedStep
from hera_pipelines.compile.operations import input_value
from tiphys.protocol import environment
from tiphys.protocol.gang import PORT
from tiphys.protocol.pipeline import Manifest

_JOIN_SECONDS = 600
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def rank_variables(step: GatedStep, members: int, first: str) -> list[Manifest]:
    """Variables of each member; ``first`` is the host name of member 0."""
    index = {"fieldRef": {"fieldPath": _INDEX}}
    texts = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(members),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": str(PORT),
        "PET_NNODES": str(members),
        "PET_SHUTDOWN_TIMEOUT": _time_to_save(step),
        **processes(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        *({"name": name, "valueFrom": index} for name in ("RANK", "NODE_RANK", "PET_NODE_RANK")),
    ]


def elastic_variables(step: GatedStep, first: str) -> list[Manifest]:
    """Variables of each member where some may be lost: who is which rank, the members agree on again each time.

    They meet at member 0. Each meeting gets a port of its own (see
    `tiphys.checkpoint.gang`), so that nothing of one is taken for the next.
    """
    gang = step.settings.gang
    assert gang is not None
    assert gang.min_members is not None
    index = {"fieldRef": {"fieldPath": _INDEX}}
    texts = {
        "PET_NNODES": f"{gang.min_members}:{input_value(names.answer('members'))}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
        "PET_RDZV_ID": input_value(names.answer("gang")),
        # Pods come minutes after one another where an image has to be fetched.
        "PET_RDZV_CONF": f"join_timeout={_JOIN_SECONDS},read_timeout={_JOIN_SECONDS}",
        # A member that comes late and one that is lost each cost the others one.
        "PET_MAX_RESTARTS": str(2 * (gang.members - gang.min_members)),
        "PET_SHUTDOWN_TIMEOUT": _time_to_save(step),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        environment.ELASTIC: f"{gang.min_members}:{gang.members}",
        **processes(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        {"name": "NODE_RANK", "valueFrom": index},
    ]


def _time_to_save(step: GatedStep) -> str:
    """Else torchrun would give the ranks 30 s between SIGTERM and SIGKILL, whatever the grace period is."""
    return str(step.grace_seconds)


def processes(step: GatedStep) -> dict[str, str]:
    """One process for each GPU of a node; without GPUs torchrun starts one."""
    gpu = step.settings.gpu
    return {"PET_NPROC_PER_NODE": str(gpu.gpus // gpu.members)} if gpu else {}
