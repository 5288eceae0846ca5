"""The runs that a fork comes from, and which of their results still count."""

from collections.abc import Mapping
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.records import RunRecord, SubmissionClaim
from tiphys.store import RunLayout, Store, read_record, read_run
from tiphys.store.layout import parse_submission


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
    layout = RunLayout(record.run)
    places = (parse_submission(info.key) for info in store.list(layout.submissions))
    last = max((number for number, what in filter(None, places) if what == "claim"), default=0)
    if not last:
        return dict.fromkeys(record.fresh, 1)
    return read_record(store, layout.submission(last), SubmissionClaim).fresh_since
