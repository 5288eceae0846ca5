"""Which shared results a filter selects, and what is left of one that is dropped.

| filter | selects |
|---|---|
| empty | all, also those whose record is damaged, or whose run is gone |
| damaged | those whose record is damaged, and no others |
| pipeline, run, step | results of that pipeline, run or step; of a fan-out all items, or one |
| shared before | older ones |
"""

from datetime import timedelta

import pytest
from support.builders.lineage import RUN, write_run

from tiphys.lineage.shared_results import SharedResult, SharedResultFilter, drop_shared_result, list_shared_results
from tiphys.records import MemoRecord, item_step_id, utc_now
from tiphys.store import DirectoryStore, Store, memo_key
from tiphys.store.layout import parse_memo

NOW = utc_now()
KEYS = [digit * 64 for digit in "abcdef"]
ITEMS = [item_step_id("fit", value, 0) for value in ("0.1", "0.3")]


@pytest.fixture
def store(tmp_path) -> Store:
    """Two runs that share results: two items of a fan-out and a step; one of a run that is gone; one is damaged."""
    store = DirectoryStore(tmp_path / "store")
    write_run(store, items=("0.1", "0.3"))
    write_run(store, run="digits-2", step="prep")
    share(store, KEYS[0], RUN, ITEMS[0])
    share(store, KEYS[1], RUN, ITEMS[1], days=40)
    share(store, KEYS[2], "digits-2", "prep", days=3)
    share(store, KEYS[3], "gone-1", "prep")
    store.create(memo_key(KEYS[4]), b"{}")
    return store


def share(store: Store, key: str, run: str, step: str, days: int = 0) -> None:
    record = MemoRecord(run=run, step=step, attempt=1, written_at=NOW - timedelta(days=days))
    store.create(memo_key(key), record.to_bytes())


def listed(store: Store, **selected: object) -> list[tuple[str, str, str]]:
    results = list_shared_results(store, SharedResultFilter(**selected))  # type: ignore[arg-type]
    return [(one.run, one.pipeline, one.step) for one in results if not one.damage]


FIRST, SECOND = (RUN, "digits", "fit[0]"), (RUN, "digits", "fit[1]")
PREP, GONE = ("digits-2", "digits", "prep"), ("gone-1", "", "prep")


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({}, [FIRST, SECOND, PREP, GONE]),
        ({"pipeline": "digits"}, [FIRST, SECOND, PREP]),
        ({"pipeline": "other"}, []),
        ({"run": RUN}, [FIRST, SECOND]),
        ({"run": "gone-1"}, [GONE]),
        ({"step": "fit"}, [FIRST, SECOND]),
        ({"step": "fit[1]"}, [SECOND]),
        ({"step": "fit[0.1]"}, [FIRST]),
        ({"step": "prep"}, [PREP, GONE]),
        ({"step": "prep", "pipeline": "digits"}, [PREP]),
        ({"step": "unknown"}, []),
        pytest.param({"shared_before": NOW - timedelta(days=30)}, [SECOND], id="a month"),
        pytest.param({"shared_before": NOW - timedelta(days=2)}, [SECOND, PREP], id="two days"),
    ],
)
def test_a_filter_selects(store: Store, selected: dict[str, object], expected: list[tuple[str, str, str]]) -> None:
    assert listed(store, **selected) == expected


def test_a_damaged_record_is_shown_and_can_be_dropped(store: Store) -> None:
    [damaged] = [one for one in list_shared_results(store, SharedResultFilter()) if one.damage]
    assert damaged.step_key == KEYS[4]
    assert "is not a valid MemoRecord" in damaged.damage
    assert not [one for one in list_shared_results(store, SharedResultFilter(pipeline="digits")) if one.damage]
    assert list_shared_results(store, SharedResultFilter(damaged=True)) == [damaged]
    drop_shared_result(store, damaged)
    assert not [one for one in list_shared_results(store, SharedResultFilter()) if one.damage]


def test_only_the_record_of_the_dropped_result_goes(store: Store) -> None:
    before = {info.key for info in store.list("")}
    [result] = list_shared_results(store, SharedResultFilter(run="digits-2"))
    assert result.attempt == 1
    drop_shared_result(store, result)
    drop_shared_result(store, result)
    assert before - {info.key for info in store.list("")} == {memo_key(KEYS[2])}


def test_a_run_whose_record_is_damaged_hides_no_results(store: Store) -> None:
    store.create("control/runs/digits-3/run.json", b"{}")
    share(store, KEYS[5], "digits-3", ITEMS[0])
    assert ("digits-3", "", ITEMS[0]) in listed(store)
    assert listed(store, step="fit", run="digits-3") == [("digits-3", "", ITEMS[0])]


def test_of_other_keys_no_step_key_is_read() -> None:
    assert parse_memo(memo_key(KEYS[0])) == KEYS[0]
    assert parse_memo("control/memo/k.json") is None
    assert SharedResult(KEYS[0]).damage == ""
