"""What is asked of nodes: so much for one pod, for so many pods at once."""

from dataclasses import dataclass, replace

WHOLE_GPU = 1000
"""A GPU is counted in thousandths, so that a share of one can be asked for."""


@dataclass(frozen=True)
class Ask:
    """What one pod needs on its node.

    The service asks for whole GPUs, with a type or a least memory of each. A
    share of one GPU (``gpu_milli`` below a thousand) and what is needed of the
    host exist to rehearse clusters that share GPUs.
    """

    gpus: int
    gpu_type: str | None = None
    """None: of any type."""
    min_gpu_memory_mb: int | None = None
    gpu_milli: int = WHOLE_GPU
    cpu_milli: int = 0
    host_memory_mb: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.cpu_milli < 0 or self.host_memory_mb < 0:
            raise ValueError(f"less than nothing is asked for: {self}")
        if not 0 < self.gpu_milli <= WHOLE_GPU or (self.gpu_milli < WHOLE_GPU and self.gpus != 1):
            raise ValueError(f"a share is a part of one GPU: {self.gpus} × {self.gpu_milli}/{WHOLE_GPU} is not")

    @property
    def is_share(self) -> bool:
        return self.gpu_milli < WHOLE_GPU

    def times(self, pods: int) -> "Ask":
        """As much as so many pods need on one node; shares of GPUs do not add up."""
        if pods == 1:
            return self
        return replace(
            self, gpus=pods * self.gpus, cpu_milli=pods * self.cpu_milli, host_memory_mb=pods * self.host_memory_mb
        )


@dataclass(frozen=True)
class Gang:
    """Pods that start together or not at all; a plain request is a gang of one.

    A member never spans nodes. All members get GPUs of one type. ``tensor_parallel``
    members after one another form a group that stays in one NVLink domain.
    """

    member: Ask
    members: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.members < 1 or self.tensor_parallel < 1 or self.members % self.tensor_parallel:
            raise ValueError(f"{self.members} members cannot form groups of {self.tensor_parallel}")
        if self.members > 1 and (self.member.is_share or not self.member.gpus):
            raise ValueError("each member of a gang gets whole GPUs, at least one")

    @property
    def gpus(self) -> int:
        return self.members * self.member.gpus

    @property
    def groups(self) -> int:
        return self.members // self.tensor_parallel


@dataclass(frozen=True)
class Placement:
    """The node of each member, in the order of their ranks."""

    gang: Gang
    nodes: tuple[str, ...]
    device_milli: int = WHOLE_GPU
    """What was free of the GPU that a share is taken from."""
