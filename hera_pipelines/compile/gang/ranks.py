"""What tells a member of an Indexed Job which one it is, in the words of torchrun and of plain PyTorch.

``PET_…`` are the defaults of torchrun's own options, so ``torchrun train.py``
needs none of them. A program that is its node's only process finds ``RANK``
and ``WORLD_SIZE``; below torchrun each process gets its own of these.
"""

from hera_pipelines.compile.gated import GatedStep
from tiphys.protocol.gang import PORT
from tiphys.protocol.pipeline import Manifest

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
        **processes(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        *({"name": name, "valueFrom": index} for name in ("RANK", "NODE_RANK", "PET_NODE_RANK")),
    ]


def processes(step: GatedStep) -> dict[str, str]:
    """One process for each GPU of a node; without GPUs torchrun starts one."""
    gpu = step.settings.gpu
    return {"PET_NPROC_PER_NODE": str(gpu.gpus // gpu.members)} if gpu else {}
