"""How many processes an attempt had, by what its program wrote: it may write anything."""

import pytest
from support.fakes.memory_store import MemoryStore

from tiphys.records import CrashRecord
from tiphys.store.incarnations import count_incarnations, find_crash_record

PREFIX = "data/runs/night/incarnations/fit/000000001/"


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ([], 1),
        (["000000002.json"], 2),
        (["000000002.json", "000000003.json", "000000003.crash.json"], 3),
        (["000000001.crash.json"], 1),
        (["000000000.json"], 1),
        (["999999999.json"], 1),
        (["9" * 200 + ".json"], 1),
        (["2.json", "00000000²..json", "²00000002.json", "000000002", "x/000000004.json"], 1),
    ],
)
def test_count_of_processes_is_that_of_sound_names(names: list[str], count: int) -> None:
    store = MemoryStore()
    for name in names:
        store.create(PREFIX + name, b"{}")
    assert count_incarnations(store, "night", "fit", 1) == count


def test_crash_report_is_that_of_the_last_process() -> None:
    store = MemoryStore()
    store.create(f"{PREFIX}000000002.json", b"{}")
    for number, error in (("000000001", "first"), ("000000002", "last")):
        report = CrashRecord(run="night", step="fit", attempt=1, error=error)
        store.create(f"{PREFIX}{number}.crash.json", report.to_bytes())
    found = find_crash_record(store, "night", "fit", 1)
    assert found is not None
    assert found.error == "last"


def test_crash_report_of_a_strange_number_is_none() -> None:
    store = MemoryStore()
    store.create(f"{PREFIX}{'9' * 200}.json", b"{}")
    assert find_crash_record(store, "night", "fit", 1) is None
