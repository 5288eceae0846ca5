"""A trial finds the fault of a store that has one, and none in a store that has none.

| store | what is found |
|---|---|
| sound; repeats its requests after lost replies | held |
| overwrites; forgets what it acknowledged; lists late, or not all | broken |
| is out of reach | not tried |
"""

import random
import time
from collections.abc import Callable, Iterator

import pytest
from support.fakes.memory_store import MemoryStore
from tiphys_controller.doctor import CheckStatus, Finding
from tiphys_controller.doctor.check import passed

from hera_pipelines.conformance import store_promises
from hera_pipelines.conformance.promises import ON_CLUSTER, PROMISES, UntriedError, try_promises
from hera_pipelines.conformance.report import build_report, report_page
from hera_pipelines.conformance.store_promises import StorePromises
from hera_pipelines.conformance.writer import claim
from hera_pipelines.demo.processes import check
from tiphys.errors import NotFoundError, ObjectExistsError, StoreError
from tiphys.store import ObjectInfo

SEED = 11
PROCESSES = {"claims", "killed-commit", "damage"}
"""Promises whose trials start processes; tests/integration/test_conformance.py has them."""


class LosesReplies(MemoryStore):
    """Each write is repeated by its client, and meets its own object."""

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        super().create(key, data)
        if "claims/" in key:
            super().create(key, data)


class Overwrites(MemoryStore):
    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        self.objects[key] = bytes(data)


class Forgets(MemoryStore):
    """Acknowledges a write, and does not keep it."""

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        if not key.endswith("/3"):
            super().create(key, data)


class ListsLate(MemoryStore):
    """Shows of each prefix what was there when it was first listed."""

    def __init__(self) -> None:
        super().__init__()
        self.listings: dict[str, list[ObjectInfo]] = {}

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.listings.setdefault(prefix, list(super().list(prefix))))


class ListsNoPins(MemoryStore):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if "/pins/" not in info.key)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_promises, "FENCES", 2)
    monkeypatch.setattr(store_promises, "RETENTIONS", 2)


def found_in(store: MemoryStore) -> dict[str, Finding]:
    promises = StorePromises(store, store, random.Random(SEED), deadline=0)
    findings: list[Finding] = []
    trials = [trial for trial in promises.trials() if trial[0] not in PROCESSES]
    try_promises(trials, findings, time.monotonic() + 600, lambda _: None)
    return {finding.check: finding for finding in findings}


def states(store: MemoryStore) -> dict[str, str]:
    return {name: finding.state.value for name, finding in found_in(store).items()}


def test_a_sound_store_holds_all_and_its_clock_is_not_compared() -> None:
    found = states(MemoryStore())
    assert found.pop("clock") == "unknown"
    assert set(found) == {"create-only", "race", "read-after-write", "listing", "fence", "pins"}
    assert set(found.values()) == {"ok"}


@pytest.mark.parametrize(
    ("store", "broken"),
    [
        (Overwrites, {"create-only", "race"}),
        (Forgets, {"read-after-write"}),
        (ListsLate, {"read-after-write", "fence"}),
        (ListsNoPins, {"pins"}),
    ],
)
def test_a_fault_of_a_store_breaks_the_promise_that_rests_on_it(store: type[MemoryStore], broken: set[str]) -> None:
    found = states(store())
    assert broken <= {name for name, state in found.items() if state == "failed"}


def test_a_late_listing_lets_a_replaced_attempt_commit_and_that_is_what_is_said() -> None:
    assert "attempt 1 of fence-0 committed after its end was recorded" in found_in(ListsLate())["fence"].sentence


def test_a_deleted_pin_is_named_with_its_checkpoint() -> None:
    assert "had to stay, and is not whole" in found_in(ListsNoPins())["pins"].sentence


def test_a_store_out_of_reach_has_broken_nothing() -> None:
    store = MemoryStore()
    store.refuses = lambda operation, key: operation == "create"
    assert set(states(store).values()) == {"unknown"}


def test_a_claim_whose_reply_is_lost_is_won_by_its_writer_alone() -> None:
    store = LosesReplies()
    with pytest.raises(ObjectExistsError):
        store.create("claims/a", b"")
    first, second = (claim(store, "claims/b.json", writer) for writer in ("one", "two"))
    assert (first["won"], second["won"]) == (True, False)
    assert first["winner"] == second["winner"] == "one"
    assert first["listed"] == ["claims/b.json"]


def test_a_claim_that_a_store_refuses_is_answered_with_the_reason() -> None:
    store = MemoryStore()
    store.refuses = lambda operation, key: True
    assert "no space left" in str(claim(store, "claims/a.json", "one")["error"])


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["starts 0", "damage 8", "starts 6"], "step 8 was damaged, and [] are in quarantine"),
        ([], "the training that meets it did not end as it should"),
    ],
)
def test_damage_that_was_not_noticed_is_no_success(lines: list[str], sentence: str) -> None:
    store = MemoryStore()
    promises = StorePromises(store, store, random.Random(SEED), 0, training=lines)
    findings: list[Finding] = []
    try_promises([("damage", promises.damage)], findings, time.monotonic() + 600, lambda _: None)
    assert sentence in findings[0].sentence
    assert findings[0].state in (CheckStatus.FAILED, CheckStatus.UNKNOWN)


def raising(error: BaseException) -> Callable[[], Finding]:
    def trial() -> Finding:
        raise error

    return trial


@pytest.mark.parametrize(
    ("promise", "error", "state"),
    [
        ("race", StoreError("down"), "unknown"),
        ("race", UntriedError("no NumPy", "install it"), "unknown"),
        ("race", NotFoundError("it is gone"), "failed"),
        ("quota", NotFoundError("no such namespace"), "unknown"),
    ],
)
def test_an_error_breaks_a_promise_only_if_it_is_the_answer_of_the_store(
    promise: str, error: Exception, state: str
) -> None:
    findings: list[Finding] = []
    try_promises([(promise, raising(error))], findings, time.monotonic() + 600, lambda _: None)
    assert [(finding.check, finding.state.value) for finding in findings] == [(promise, state)]


def test_trials_after_the_deadline_are_not_tried() -> None:
    findings: list[Finding] = []
    try_promises([("race", lambda: passed("it ran"))], findings, time.monotonic() - 1, lambda _: None)
    assert [(finding.state.value, finding.remedy) for finding in findings] == [
        ("unknown", "give it more with --minutes")
    ]


def test_an_interrupt_leaves_a_finding_for_each_trial_that_had_no_turn() -> None:
    trials = [("race", lambda: passed("fair")), ("fence", raising(KeyboardInterrupt())), ("pins", lambda: passed(""))]
    findings: list[Finding] = []
    with pytest.raises(KeyboardInterrupt):
        try_promises(trials, findings, time.monotonic() + 600, lambda _: None)
    assert [(finding.check, finding.sentence) for finding in findings] == [
        ("race", "fair"),
        ("fence", "interrupted"),
        ("pins", "interrupted"),
    ]


def test_every_trial_has_a_promise_in_words() -> None:
    store = MemoryStore()
    names = [name for name, _ in StorePromises(store, store, random.Random(SEED), 0).trials()]
    assert {*names, *ON_CLUSTER} <= set(PROMISES)


FACTS = {"store": "s3://b", "namespace": "", "seed": 3, "versions": {}, "beganAt": "1 Nov", "endedAt": "2 Nov"}
HELD, MISSING = passed("fair")._replace(check="race"), Finding("quota", CheckStatus.UNKNOWN, "no queue", "--queue")
BROKEN = Finding("fence", CheckStatus.FAILED, "<b>late</b>", "use another")


@pytest.mark.parametrize(
    ("findings", "result"),
    [([HELD], "held"), ([HELD, MISSING], "not tried"), ([HELD, MISSING, BROKEN], "broken")],
)
def test_a_report_is_as_bad_as_its_worst_finding(findings: list[Finding], result: str) -> None:
    assert build_report(findings, **FACTS)["result"] == result


def test_a_report_says_of_each_promise_what_held_and_what_to_do() -> None:
    report = build_report([HELD, MISSING, BROKEN], **FACTS)
    assert report["summary"] == "1 held, 1 broken, 1 not tried"
    assert report["promises"][2] == {
        "name": "fence",
        "promise": PROMISES["fence"],
        "result": "broken",
        "evidence": "<b>late</b>",
        "remedy": "use another",
    }


def test_a_page_shows_the_report_and_no_markup_of_others() -> None:
    page = report_page(build_report([HELD, MISSING, BROKEN], **FACTS))
    assert "with seed 3" in page
    assert PROMISES["quota"] in page
    assert "&lt;b&gt;late" in page
    assert "<b>late" not in page


def test_a_promise_that_does_not_hold_is_told_with_what_to_do() -> None:
    findings: list[Finding] = []

    def trial() -> Finding:
        check(False, "two won")
        return passed("")

    try_promises([("race", trial)], findings, time.monotonic() + 600, lambda _: None)
    assert (findings[0].sentence, findings[0].state.value) == ("two won", "failed")
    assert "send this report" in findings[0].remedy
