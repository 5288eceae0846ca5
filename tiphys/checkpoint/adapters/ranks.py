"""Agreement between the ranks of one training through ``torch.distributed``.

All ranks save, restore and exit together: a rank that saves alone waits for the
others for ever. So every rank contributes its observation, and all ranks act on
the same answer. Without ``torch.distributed`` there is one rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tiphys.errors import TiphysError

T = TypeVar("T")


class RankAgreement:
    """Collective decisions of all ranks; every rank must create it at the same point of the program.

    Decisions and saves use their own process groups on the CPU, so that a
    background save does not interfere with the collectives of the training.
    """

    def __init__(self) -> None:
        self.is_distributed = bool(dist.is_available() and dist.is_initialized())
        self.rank: int = dist.get_rank() if self.is_distributed else 0
        self.world_size: int = dist.get_world_size() if self.is_distributed else 1
        self.save_group: Any = dist.new_group(backend="gloo") if self.is_distributed else None
        self._decision_group: Any = dist.new_group(backend="gloo") if self.is_distributed else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any_rank(self, *own: bool) -> list[bool]:
        """Return for each flag whether it is set in any rank."""
        if not self.is_distributed:
            return list(own)
        answers = torch.tensor(own, dtype=torch.uint8)
        dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=self._decision_group)
        return [bool(answer) for answer in answers.tolist()]

    def gather_all(self, own: T) -> list[T]:
        """Return the values of all ranks in their order."""
        if not self.is_distributed:
            return [own]
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, own, group=self._decision_group)
        return answers

    def decide_on_first(self, decide: Callable[[], T]) -> T:
        """Call ``decide`` in rank 0 and return its result in every rank; a `TiphysError` is raised in every rank."""
        answer: list[Any] = [_run_decision(decide) if self.is_first else None]
        if self.is_distributed:
            dist.broadcast_object_list(answer, src=0, group=self._decision_group)
        value, error = answer[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]


def _run_decision(decide: Callable[[], T]) -> tuple[T | None, TiphysError | None]:
    try:
        return decide(), None
    except TiphysError as error:
        return None, error
