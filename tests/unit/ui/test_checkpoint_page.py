"""The page of the checkpoints of a run: what stays and why, and what retention takes next."""

import re
from datetime import UTC, datetime, timedelta
from html import escape

import pytest
from support.builders.hostile_text import HOSTILE, control_characters
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, commit, ref, write_claim, write_run
from support.stories.pages import Pages, Texts

from hera_pipelines.ui import checkpoint_page
from hera_pipelines.ui.app import build_app
from tiphys.lineage.retention.policy import pin_checkpoint
from tiphys.records import QuarantineRecord, TombstoneRecord
from tiphys.store import DirectoryStore, LineageLayout, RunLayout

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
ADDRESS = f"/runs/{RUN}/checkpoints"


@pytest.fixture
def pages(store: DirectoryStore) -> Pages:
    return Pages(build_app(store, clock=lambda: NOW))


def write_checkpoints(store: DirectoryStore, *steps: int, delay_seconds: float = 3600.0) -> None:
    write_run(store, keep_last=1, delete_after_seconds=delay_seconds)
    write_claim(store, claim_of(1))
    for step in steps:
        commit(store, ref(1, step), data=(b"x" * 1024,))


def test_a_checkpoint_shows_why_it_stays_or_when_it_goes(store: DirectoryStore, pages: Pages) -> None:
    write_checkpoints(store, 10, 20, 30, 40, 50)
    pin_checkpoint(store, ref(1, 20), "release-1")
    layout = LineageLayout(LINEAGE)
    bad = QuarantineRecord(checkpoint=ref(1, 30), reason="it crashes", by="plugin")
    store.create(layout.quarantined(1, 30), bad.to_bytes())
    marked = TombstoneRecord(checkpoint=ref(1, 10)).model_copy(update={"written_at": NOW - timedelta(minutes=20)})
    store.create(layout.tombstone(1, 10), marked.to_bytes())
    before = [info.key for info in store.list("")]

    page = Texts(pages.get(ADDRESS).text).text

    assert "Retention takes 2 of 5 next, 2 KiB." in page
    assert "1-10 1 10 1 KiB goes next no rule keeps it; it may be deleted from 2030-01-01 12:40:00 UTC on" in page
    assert "1-40 1 40 1 KiB goes next no rule keeps it; it may be deleted from 2030-01-01 13:00:00 UTC on" in page
    assert "1-20 1 20 1 KiB stays pinned release-1" in page
    assert "1-30 1 30 1 KiB stays quarantined" in page
    assert "1-50 1 50 1 KiB stays newest 1" in page
    assert re.findall(r">1-(\d+)<", pages.get(ADDRESS).text) == ["10", "40", "50", "30", "20"]
    assert [info.key for info in store.list("")] == before


def test_a_checkpoint_that_is_due_goes_at_the_next_pass(store: DirectoryStore, pages: Pages) -> None:
    write_checkpoints(store, 10, 20, delay_seconds=0.0)
    assert (
        "1-10 1 10 1 KiB goes next no rule keeps it; it is deleted at the next pass"
        in Texts(pages.get(ADDRESS).text).text
    )


def test_only_so_many_are_shown(store: DirectoryStore, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_page, "MAX_CHECKPOINTS", 3)
    write_checkpoints(store, *range(10, 60, 10))
    page = Texts(pages.get(ADDRESS).text).text
    assert "Retention takes 4 of 5 next, 4 KiB." in page
    assert "2 more are not shown" in page
    assert "1-40" not in page


def test_without_a_policy_all_stay(store: DirectoryStore, pages: Pages) -> None:
    write_run(store, keep_last=None)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    assert "It stays." in Texts(pages.get(ADDRESS).text).text
    commit(store, ref(1, 20))
    assert "All 2 stay." in Texts(pages.get(ADDRESS).text).text
    assert f'href="{ADDRESS}"' in pages.get(f"/runs/{RUN}").text


def test_a_run_without_checkpoints_says_so(store: DirectoryStore, pages: Pages) -> None:
    write_run(store)
    assert "No step of this run keeps checkpoints." in Texts(pages.get(ADDRESS).text).text
    write_claim(store, claim_of(1))
    assert "It has no checkpoints." in Texts(pages.get(ADDRESS).text).text


def test_a_volume_that_is_not_here_is_named(store: DirectoryStore, pages: Pages) -> None:
    write_run(store, checkpoint_store="file:///mnt/absent<b>")
    write_claim(store, claim_of(1))
    page = pages.get(ADDRESS).text
    assert "The checkpoints cannot be read from here: there is no store at /mnt/absent" in Texts(page).text
    assert escape("absent<b>") in page


@pytest.mark.parametrize(
    ("path", "status"), [("/runs/absent/checkpoints", 404), ("/runs/%0aX/checkpoints", 400), (ADDRESS, 422)]
)
def test_an_unreadable_run_is_refused_in_words(store: DirectoryStore, pages: Pages, path: str, status: int) -> None:
    write_run(store)
    store.create(RunLayout(RUN).attempt(STEP, 1), b"{broken")
    answer = pages.get(path)
    assert answer.status_code == status
    assert "<h1>" in answer.text


def test_a_hostile_reason_stays_text(store: DirectoryStore, pages: Pages) -> None:
    volume = store.url.replace("store", "volume")
    write_run(store, checkpoint_store=f"{volume}{HOSTILE}")
    write_claim(store, claim_of(1))
    page = pages.get(ADDRESS).text
    assert "evil.example" in page
    assert not control_characters(page)
