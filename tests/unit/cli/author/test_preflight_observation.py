"""Reads with one time limit: a value, a reason, or the bug."""

import threading

import pytest
from tiphys_controller.doctor import UnknownValue

from hera_pipelines.cli.author import preflight_observation
from hera_pipelines.cli.author.preflight_observation import BoundedReads
from tiphys.errors import NotFoundError, StoreError


def test_a_value_in_time() -> None:
    reads = BoundedReads(60)
    assert [reads.start("it", lambda value=value: value).wait() for value in (7, False, "")] == [7, False, ""]


def test_an_expected_error_is_a_reason() -> None:
    def fail() -> int:
        raise StoreError("storage is down")

    assert BoundedReads(60).start("it", fail).wait() == UnknownValue("storage is down")


def test_a_bug_is_not_hidden() -> None:
    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BoundedReads(60).start("it", fail).wait()


def test_pending_reads_share_one_time_limit() -> None:
    forever = threading.Event()
    reads = BoundedReads(0.05)
    pending = [reads.start(f"read {number}", forever.wait) for number in range(3)]
    try:
        found = [one.wait() for one in pending]
    finally:
        forever.set()
    assert found == [UnknownValue(f"read {number} did not answer within 0.05 s") for number in range(3)]


def test_a_machine_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "hera_pipelines.cli.author.preflight_observation.start_background_thread"
    monkeypatch.setattr(where, lambda work: None)
    assert BoundedReads(60).start("the store", lambda: 7).wait() == UnknownValue(
        "the store: no thread could be started"
    )


@pytest.mark.parametrize(
    ("url", "state"),
    [("s3://nope/x", "failed"), ("gs://nope/x", "failed"), ("az://account/nope/x", "failed"), ("/nope", "ok")],
)
def test_only_a_folder_is_made_by_the_first_run(monkeypatch: pytest.MonkeyPatch, url: str, state: str) -> None:
    def refuse(url: str, **_: object) -> None:
        raise NotFoundError(f"{url} does not exist")

    monkeypatch.setattr(preflight_observation, "open_store", refuse)
    [found] = preflight_observation._probe(url, tries_used_store=False)
    assert found.state == state
