"""Samples that betray a confusion of two things which regular samples hide, drawn from a seed.

Regular samples share a bug with the code: where every name is `digits-1`, a memory whose key lacks the run answers
right; where no two files have one size, nothing shows that names are derived from sizes; where a secret is no prefix
of another, the order in which secrets are masked does not matter. So here there are two of everything, and two of a
kind differ in one respect alone: a dot for a dash, one part of an identity, the bytes but not the size.

    draw = Irregular()
    first, second = draw.run_names(2)  # ("k4.q2", "k4-q2")
    for other in differing_in_one_part(Place("default", "k4.q2", "uid"), Place("ml", "k4-q2", "uid-2")):
        ...  # nothing that is remembered of the first may answer for the other
"""

import random
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from support.builders.seeds import SEED

_ALPHABET = string.ascii_lowercase + string.digits
_LETTERS_BEYOND_ASCII = "äöüßéøłЖ中🚢"
IdentityT = TypeVar("IdentityT", bound=NamedTuple)
ValueT = TypeVar("ValueT", str, bytes)


class WorkflowPlace(NamedTuple):
    """What identifies a Workflow and what it acts for."""

    namespace: str
    name: str
    uid: str
    run: str
    submission: int


def differing_in_one_part(first: IdentityT, second: IdentityT) -> Iterator[IdentityT]:
    """``first`` once for each of its parts, with this part of ``second``: what a key that lacks the part confuses.

    Raises:
        ValueError: the two share a part, so that it would go untested.
    """
    for number, (part, other) in enumerate(zip(first, second, strict=True)):
        if part == other:
            raise ValueError(f"both have {part!r} as part {number}")
        yield first._replace(**{first._fields[number]: other})


class Irregular:
    """Draws samples; two that were made with one seed draw the same ones.

    Args:
        seed: By default the seed of this run of the tests, which each round of `make fuzz` changes.
    """

    def __init__(self, seed: int = SEED) -> None:
        self._random = random.Random(seed)

    def run_names(self, count: int) -> Sequence[str]:
        """Names of runs: the second has a dash for the first's dot, the third begins with the whole first."""
        return self._related(count, "{a}.{b}", "{a}-{b}", "{a}.{b}.{c}", "{c}")

    def step_names(self, count: int) -> Sequence[str]:
        """DNS labels; the second begins with the whole first, the third ends with it."""
        return self._related(count, "{a}", "{a}-{b}", "{b}-{a}", "{c}")

    def namespaces(self, count: int) -> Sequence[str]:
        """DNS labels; ``default`` is always the first, and the second begins with it."""
        return self._related(count, "default", "default-{a}", "{a}", "{a}-{b}")

    def parameters(self, count: int) -> Sequence[str]:
        """Names with a dot, upper case and letters beyond ASCII; the second is the first in another case."""
        return self._related(count, "{a}.{U}", "{A}.{U}", "{a}_{U}", "{U}")

    def texts(self, count: int) -> Sequence[str]:
        """Text of one length in characters, of several in bytes, with quotes and line ends."""
        return self._distinct(count, lambda: "".join(self._random.choices(_LETTERS_BEYOND_ASCII + 'aZ"\n', k=12)))

    def equal_sized_bytes(self, count: int, size: int = 64) -> Sequence[bytes]:
        """Distinct bytes of one size, as the shards of equal ranks are."""
        return self._distinct(count, lambda: self._random.randbytes(size))

    def secrets(self, count: int) -> Sequence[str]:
        """Secrets of which each begins with the whole one before it; the shortest has eight characters."""
        found = [self._word(8)]
        while len(found) < count:
            found.append(found[-1] + self._word(4))
        return found

    def workflows(self) -> Sequence[WorkflowPlace]:
        """One Workflow first; the others differ from it in one part each, such as the uid of a Workflow made anew."""
        (near, far), (first, second) = self.namespaces(2), self.run_names(2)
        names = self._related(2, "{a}-{b}", "{a}-{b}-2")
        mine = WorkflowPlace(near, names[0], self._word(12), first, 1)
        others = WorkflowPlace(far, names[1], self._word(12), second, 2)
        return [mine, *differing_in_one_part(mine, others)]

    def _related(self, count: int, *forms: str) -> Sequence[str]:
        """Names in the order of the forms, which share their words; further ones have other words."""
        found: dict[str, None] = {}
        while len(found) < count:
            words = {"a": self._word(3), "b": self._word(2), "c": self._word(4), "U": self._unusual()}
            found |= dict.fromkeys(form.format(**words, A=words["a"].upper()) for form in forms)
        return list(islice(found, count))

    def _word(self, length: int) -> str:
        return self._random.choice(string.ascii_lowercase) + "".join(self._random.choices(_ALPHABET, k=length - 1))

    def _unusual(self) -> str:
        return "".join(self._random.sample(_LETTERS_BEYOND_ASCII, k=2)) + self._random.choice(string.ascii_uppercase)

    def _distinct(self, count: int, draw: Callable[[], ValueT]) -> Sequence[ValueT]:
        found: dict[ValueT, None] = {}
        while len(found) < count:
            found[draw()] = None
        return list(found)
