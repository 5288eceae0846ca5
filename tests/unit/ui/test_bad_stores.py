"""The pages over stores that are damaged, half deleted, slow, or written by someone with bad intentions.

| store | pages |
|---|---|
| any one object is deleted, cut off, empty, or other JSON | each answers: what it can, or an error in words |
| objects go away between a listing and a read, as while a run is deleted | the same |
| any one text of any record is markup and escapes | it stays text |
| names of runs, steps and files that no program of Tiphys would choose | the same |
| every request takes long | a page that says so, and no thread that grows |
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.builders.hostile_text import HOSTILE, MARK, NAMES, control_characters, hostile_variants, write_full_run
from support.builders.lineage import RUN, STEP, write_run
from support.processes.polling import until
from support.stories.pages import Pages, Texts

from hera_pipelines.ui import app as ui_app
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.home_page import HomeFilter, read_home_view
from hera_pipelines.ui.run_index import RunIndex
from tiphys.store import DirectoryStore, ObjectInfo, RunLayout

PATHS = (
    "/",
    f"/runs/{RUN}",
    f"/runs/{RUN}?submission=1&page=2&outputs=2",
    f"/runs/{RUN}/checkpoints",
    f"/runs/{RUN}/logs/{STEP}?attempt=1",
    f"/runs/{RUN}/lineage.svg",
    f"/runs/{RUN}/metrics.svg",
    f"/runs/{RUN}/times.svg",
)
DAMAGE: dict[str, Any] = {
    "deleted": None,
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "of another kind": lambda _: b"{}",
    "no object": lambda _: b"[1, null]",
    "no text": lambda data: b"\xff\xfe" + data,
}
IN_WORDS = {200, 404, 422}


def overwrite(store: DirectoryStore, key: str, data: bytes | None) -> None:
    store.delete(key)
    if data is not None:
        store.create(key, data)


def ask_all(store: DirectoryStore) -> Iterator[tuple[str, int, str]]:
    """Path, status and text of each page, from an application that has read nothing before."""
    index = RunIndex(store, reads_holds=True)
    index.refresh()
    pages = Pages(build_app(store, index=index))
    for path in PATHS:
        answer = pages.get(path)
        yield path, answer.status_code, answer.text


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_costs_at_most_the_pages_that_need_it(store: DirectoryStore, kind: str) -> None:
    write_full_run(store)
    damage, objects = DAMAGE[kind], {info.key: store.read(info.key) for info in store.list("")}
    whole = noticed = 0
    for key, data in objects.items():
        overwrite(store, key, damage and damage(data))
        for path, status, text in ask_all(store):
            assert status in IN_WORDS, (key, path, status, text)
            assert status == 200 or "<h1>" in text, (key, path)
            noticed += status != 200 or "damaged" in text
            whole += status == 200
        overwrite(store, key, data)
    assert noticed
    assert whole > len(objects) * len(PATHS) / 2, "most objects are needed by few pages"


class Vanishing(DirectoryStore):
    """Deletes an object as soon as it is listed, as a deletion that goes on beside the reader."""

    prey = ""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in list(super().list(prefix)):
            if info.key == self.prey:
                self.delete(info.key)
            yield info


def test_an_object_that_goes_away_after_it_was_listed(tmp_path: Path) -> None:
    store = Vanishing(tmp_path / "store")
    write_full_run(store)
    objects = {info.key: store.read(info.key) for info in DirectoryStore.list(store, "")}
    for key, data in objects.items():
        for path in PATHS:
            store.prey = key
            index = RunIndex(store)
            index.refresh()
            overwrite(store, key, data)
            answer = Pages(build_app(store, index=index)).get(path)
            assert answer.status_code in IN_WORDS, (key, path, answer.text)
            store.prey = ""
            overwrite(store, key, data)


def test_a_run_of_which_only_the_checkpoints_are_left(store: DirectoryStore) -> None:
    write_full_run(store)
    for info in list(store.list(RunLayout(RUN).control)):
        store.delete(info.key)
    statuses = {path: status for path, status, _ in ask_all(store)}
    assert statuses == {path: 200 if path == "/" else 404 for path in PATHS}


@pytest.mark.parametrize("part", range(2))
def test_a_hostile_text_of_a_record_stays_text(part: int, store: DirectoryStore) -> None:
    records = write_full_run(store)
    # The same field of two records of one kind is shown by the same code: the first of them is tried.
    variants = {
        (type(record), field): (key, field, data)
        for key, record in reversed(records.items())
        for field, data in hostile_variants(record)
    }
    reached = 0
    for key, field, data in [*variants.values()][part::2]:
        data = data.replace(MARK.encode(), b"<script src=//" + MARK.encode() + b">")
        overwrite(store, key, data)
        for path, status, text in ask_all(store):
            assert status in {200, 400, 404, 422, 503}, (key, field, path, status)
            assert not control_characters(text), (key, field, path)
            assert f"<script src=//{MARK}" not in text, (key, field, path)
            reached += MARK in text
        overwrite(store, key, records[key].to_bytes())
    assert reached >= 5, "the text has to get as far as a page, or this shows nothing"


def test_hostile_names_of_objects_reach_no_page_as_more_than_text(store: DirectoryStore) -> None:
    write_full_run(store)
    for name in NAMES.values():
        store.create(name, b"{}")
    for path, status, text in ask_all(store):
        assert status == 200, path
        assert not control_characters(text), path


@pytest.mark.parametrize("name", ["x" * 1024, "<script>alert(1)</script>", HOSTILE.replace("/", "."), "é" * 512])
@pytest.mark.parametrize("place", ["/runs/{}", "/runs/{}/checkpoints", "/runs/{}/logs/fit", "/runs/{}/lineage.svg"])
def test_a_name_in_the_address_is_refused_in_words(store: DirectoryStore, place: str, name: str) -> None:
    write_run(store)
    answer = Pages(build_app(store)).get(place.format(quote(name, safe="")))
    assert answer.status_code in (400, 404), answer.text
    assert "<script>alert" not in answer.text
    assert not control_characters(answer.text)


def test_long_names_of_pipelines_and_steps_stay_readable(store: DirectoryStore) -> None:
    step = "s" * 60
    write_run(store, step=step, code_version=f"<b>{'v' * 1024}", parameters={"p" * 1024: "<i>" * 300})
    index = RunIndex(store)
    index.refresh()
    page = Pages(build_app(store, index=index)).get(f"/runs/{RUN}")
    assert page.status_code == 200
    assert f"{'p' * 1024}=" in Texts(page.text).text
    assert "<i><i>" not in page.text
    assert read_home_view(index, HomeFilter()).known == 1


class Slow(DirectoryStore):
    """Every listing and read waits until the test ends."""

    gate: threading.Event | None = None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._wait()
        return super().list(prefix)

    def read(self, key: str) -> bytes:
        self._wait()
        return super().read(key)

    def prefixes(self, prefix: str) -> Iterator[str]:
        self._wait()
        return super().prefixes(prefix)

    def _wait(self) -> None:
        if self.gate is not None:
            self.gate.wait(120)


def test_a_store_that_is_slow_gives_each_page_up_and_the_list_of_runs_answers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui_app, "_PAGE_SECONDS", 0.05)
    store = Slow(tmp_path / "store")
    write_full_run(store)
    store.gate = threading.Event()
    index = RunIndex(store)
    index.start()
    pages = Pages(build_app(store, index=index))
    try:
        assert pages.get("/").status_code == 200
        assert "No run has been read yet." in Texts(pages.get("/").text).text
        for path in PATHS[1:]:
            answer = pages.get(path)
            assert (answer.status_code, "it did not answer within 0.05 s" in answer.text) == (503, True), path
    finally:
        store.gate.set()
        until(lambda: index.total == 1, 120)
        index.stop()
    monkeypatch.setattr(ui_app, "_PAGE_SECONDS", 120.0)
    assert pages.get(f"/runs/{RUN}").status_code == 200
