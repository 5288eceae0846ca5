"""Many threads want to change one book, and one write can store what all of them want.

Whoever comes while another writes waits. Who goes on then takes everybody along
that has come in the meantime: their transitions are applied one after the other
to the same book, and stored together.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tiphys.errors import StoreError
from tiphys_plugin.ledger.backend import Transition
from tiphys_plugin.ledger.stored import LedgerFullError

_Answer = TypeVar("_Answer")


class Turn(Generic[_Answer]):
    """One who waits for the book. If ``transition`` makes the line longer, ``spare_bytes`` must be left."""

    def __init__(self, transition: Transition[_Answer], spare_bytes: int) -> None:
        self.transition = transition
        self.spare_bytes = spare_bytes
        self.answer: Future[_Answer] = Future()


class Turns:
    """Gives everybody a turn.

    Args:
        apply: The answers to these turns in their order, once all of them are stored.
        patience_seconds: How long one waits for the others.
        what: Whose turns, for the error.
    """

    def __init__(
        self, apply: Callable[[Sequence[Turn[Any]]], list[Any]], patience_seconds: float, what: object
    ) -> None:
        self._apply = apply
        self._patience_seconds = patience_seconds
        self._what = what
        self._changed = threading.Condition()
        self._is_serving = False
        self._waiting: list[Turn[Any]] = []

    def take(self, transition: Transition[_Answer], spare_bytes: int = 0) -> _Answer:
        """The answer of ``transition``, once it is stored.

        Raises:
            StoreError: the others do not come to an end; or what ``apply`` raises.
        """
        turn = Turn(transition, spare_bytes)
        if turns := self._when_free(turn):
            try:
                self._serve(turns)
            finally:
                with self._changed:
                    self._is_serving = False
                    self._changed.notify_all()
        return turn.answer.result()

    def _when_free(self, turn: Turn[Any]) -> list[Turn[Any]]:
        """Everybody who waits, to be served by the caller; nobody if another has served it in the meantime."""
        with self._changed:
            self._waiting.append(turn)
            if not self._changed.wait_for(lambda: turn.answer.done() or not self._is_serving, self._patience_seconds):
                if turn in self._waiting:  # else it is being decided, and found by who asks again
                    self._waiting.remove(turn)
                waited = f"others have waited for the API server for {self._patience_seconds:g} s"
                raise StoreError(f"{self._what} is busy: {waited}")
            if turn.answer.done():
                return []
            self._is_serving, turns, self._waiting = True, self._waiting, []
            return turns

    def _serve(self, turns: Sequence[Turn[Any]]) -> None:
        try:
            answers = self._apply(turns)
        except LedgerFullError as full:
            if len(turns) == 1:
                turns[0].answer.set_exception(full)
                return
            for turn in turns:  # what has no room together with others may have it alone
                self._serve([turn])
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            for turn in turns:
                turn.answer.set_exception(error)
        else:
            for turn, answer in zip(turns, answers, strict=True):
                turn.answer.set_result(answer)
