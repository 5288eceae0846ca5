"""Results that steps with ``share=True`` offer to other runs, each by a `MemoRecord` under its step key.

Nothing rests on such a record: the result belongs to the run that made it, and a
run that took it over names its source in a record of its own. So it may be
dropped at any time; the next run with this step key computes its own result, and
shares that.
"""

from datetime import datetime
from functools import partial
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames, selects_step
from tiphys.records import MemoRecord
from tiphys.store import Store, find_record, memo_key
from tiphys.store.layout import MEMOS, parse_memo
from tiphys.store.runs import read_concurrently


class SharedResult(NamedTuple):
    """A result that runs may share; with ``damage``, its record cannot be read, and only the step key is known."""

    step_key: str
    run: str = ""
    pipeline: str = ""
    """Empty if the record of the run is gone or damaged."""
    step: str = ""
    """Name of the step or item for people; its step id if the run cannot be read."""
    attempt: int = 0
    shared_at: datetime | None = None
    damage: str = ""


class SharedResultFilter(NamedTuple):
    """Which shared results to select; an empty field selects all, and an empty filter also damaged ones."""

    pipeline: str = ""
    run: str = ""
    step: str = ""
    """Name of a step or item; the name of a fan-out selects all its items."""
    shared_before: datetime | None = None
    damaged: bool = False
    """Whether to select damaged ones alone."""


def list_shared_results(store: Store, selected: SharedResultFilter) -> list[SharedResult]:
    """The shared results that the filter selects, by run and step.

    Costs a listing, a read for each shared result, and a few for each run that made one.

    Raises:
        UsageError: several items of a run have the value that the filter names.
        StoreError: storage did not answer.
    """
    keys = [key for info in store.list(MEMOS) if (key := parse_memo(info.key))]
    found = [entry for entry in read_concurrently(partial(_read, store), keys) if entry is not None]
    memos = {key: memo for key, memo in found if isinstance(memo, MemoRecord)}
    is_damage_selected = selected.damaged or not any(selected)
    results = [SharedResult(key, damage=text) for key, text in found if isinstance(text, str) and is_damage_selected]
    if selected.damaged:
        return results
    runs = sorted({memo.run for memo in memos.values() if selected.run in ("", memo.run)})
    sources = dict(zip(runs, read_concurrently(partial(_read_source, store), runs), strict=True))
    for key, memo in memos.items():
        if memo.run in sources and _selects(selected, memo, source := sources[memo.run]):
            step = source.names.name(memo.step) if source.names else memo.step
            results.append(SharedResult(key, memo.run, source.pipeline, step, memo.attempt, memo.written_at))
    return sorted(results, key=lambda result: (result.run, result.step, result.step_key))


def drop_shared_result(store: Store, result: SharedResult) -> None:
    """Withdraw a shared result; its outputs stay in the run that made it. Does nothing if it is gone."""
    store.delete(memo_key(result.step_key))


class _Source(NamedTuple):
    """The run that made shared results; without names, its record is gone or damaged."""

    pipeline: str = ""
    names: StepNames | None = None


def _read(store: Store, step_key: str) -> tuple[str, MemoRecord | str] | None:
    try:
        memo = find_record(store, memo_key(step_key), MemoRecord)
    except IntegrityError as error:
        return step_key, str(error)
    return (step_key, memo) if memo is not None else None


def _read_source(store: Store, run: str) -> _Source:
    try:
        history = RunHistory(store, run)
        return _Source(history.record.pipeline, history.names)
    except (IntegrityError, NotFoundError, UsageError):
        return _Source()


def _selects(selected: SharedResultFilter, memo: MemoRecord, source: _Source) -> bool:
    if selected.pipeline not in ("", source.pipeline):
        return False
    if selected.shared_before is not None and memo.written_at >= selected.shared_before:
        return False
    return not selected.step or _is_step(selected.step, memo.step, source.names)


def _is_step(wanted: str, step_id: str, names: StepNames | None) -> bool:
    if names is None:
        return selects_step(wanted, step_id)
    try:
        return selects_step(names.resolve(wanted), step_id)
    except NotFoundError:  # a step of another pipeline
        return False
