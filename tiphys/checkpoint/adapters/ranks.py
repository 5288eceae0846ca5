"""What the processes of one training decide together.

A save, a restore and an exit are taken by all ranks or by none: one that saves
alone waits for ever for the others. So each rank tells what it sees, and all of
them act on the same answer. Without ``torch.distributed`` there is one rank.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tiphys.errors import TiphysError

T = TypeVar("T")


class Ranks:
    """The processes that train together; make it in all of them at the same place of the program.

    Decisions and saves have groups of their own, on the CPU: a save in the
    background must not get between the messages of the training.
    """

    def __init__(self) -> None:
        self.together = bool(dist.is_available() and dist.is_initialized())
        self.rank: int = dist.get_rank() if self.together else 0
        self.world_size: int = dist.get_world_size() if self.together else 1
        self.saves: Any = dist.new_group(backend="gloo") if self.together else None
        self._decisions: Any = dist.new_group(backend="gloo") if self.together else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any(self, *mine: bool) -> list[bool]:
        """For each question, whether some rank says yes."""
        if not self.together:
            return list(mine)
        answers = torch.tensor(mine, dtype=torch.uint8)
        dist.all_reduce(answers, op=dist.ReduceOp.MAX, group=self._decisions)
        return [bool(answer) for answer in answers.tolist()]

    def all(self, mine: T) -> list[T]:
        """What each rank says, in their order."""
        if not self.together:
            return [mine]
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, mine, group=self._decisions)
        return answers

    def first(self, decide: Callable[[], T]) -> T:
        """What the first rank decides; an error of Tiphys that it meets is raised in every rank."""
        answer: list[Any] = [_outcome(decide) if self.is_first else None]
        if self.together:
            dist.broadcast_object_list(answer, src=0, group=self._decisions)
        value, error = answer[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]


def _outcome(decide: Callable[[], T]) -> tuple[T | None, TiphysError | None]:
    try:
        return decide(), None
    except TiphysError as error:
        return None, error
