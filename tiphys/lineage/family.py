"""The runs that a fork comes from, and which of their results still count."""

from collections.abc import Mapping
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.records import RunRecord
from tiphys.store import Store, last_claim, read_run


class Ancestor(NamedTuple):
    """A run that another one is a fork of, or a fork of a fork.

    ``fresh_since`` says by step from which submission of it on its results
    count; such a step was to be made anew there, so no older run has it.
    """

    run: str
    fresh_since: Mapping[str, int]


def ancestors(store: Store, record: RunRecord) -> tuple[Ancestor, ...]:
    """The runs that ``record`` comes from, the nearest first, as far as they are still there.

    Costs two reads and a listing for each.

    Raises:
        IntegrityError: one of their records is damaged.
    """
    found: list[Ancestor] = []
    while record.parent and record.parent not in [one.run for one in found]:
        try:
            record = read_run(store, record.parent)
        except NotFoundError:
            break
        found.append(Ancestor(record.run, _fresh_since(store, record)))
    return tuple(found)


def _fresh_since(store: Store, record: RunRecord) -> Mapping[str, int]:
    last = last_claim(store, record.run)
    return last.fresh_since if last else dict.fromkeys(record.fresh, 1)
