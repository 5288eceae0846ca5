"""Which fault an attempt meets, and when: drawn from the seed, and placed at what the program does, never at a time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TERM, KILL, MEMORY, DAMAGE = "SIGTERM", "SIGKILL", "out of memory", "damaged checkpoint"
KINDS = (TERM, KILL, MEMORY, DAMAGE)
_SHARES = (6, 2, 2, 2)
_EVENTS = {
    "imports": "start",
    "first step": "resumed",
    "training": "step",
    "evaluation": "evaluation",
    "data loading": "load",
}


@dataclass(frozen=True)
class Fault:
    """A fault, and its place: the passage of a moment since the attempt began."""

    kind: str
    moment: str
    passage: int

    @property
    def event(self) -> str:
        """The line of the program that marks the moment; empty for a save, which files show."""
        return _EVENTS.get(self.moment, "")


def draw_fault(generator: random.Random, passages: Mapping[str, int], only: str = "") -> Fault:
    """Draw the next fault.

    Args:
        generator: The source of the campaign's seed.
        passages: Moments of the program, and how often each came in an undisturbed run. Faults come in the
            first half of that, so that a run has several.
        only: The only kind of fault; empty: all.
    """
    kind = only or generator.choices(KINDS, _SHARES)[0]
    # A checkpoint can be damaged only where there is one.
    moments = [moment for moment in passages if kind != DAMAGE or moment not in ("imports", "first step")]
    moment = generator.choice(moments)
    # A drawn integer would use more or less of the generator when a loader has read one sample more ahead.
    return Fault(kind, moment, 1 + int(generator.random() * max(1, passages[moment] // 2)))


def passages_of(events: Sequence[str], steps_per_save: int) -> dict[str, int]:
    """How often each moment came in a run that printed ``events``; a program that says no save saves by its steps."""
    saves = events.count("saved") or events.count("step") // steps_per_save
    return {moment: count for moment, event in _EVENTS.items() if (count := events.count(event))} | {"save": saves}
