"""Who won a create-only record, also when the reply was lost."""

from pathlib import Path

import pytest

from tiphys.errors import IntegrityError, ObjectExistsError, ObjectMissingError, StoreError
from tiphys.records import CrashRecord, SubmissionEnd
from tiphys.store import DirectoryStore, claim_record, find_record, read_record


class LosesReplies(DirectoryStore):
    """Applies the write; the reply is lost, and the repeated request finds the key taken."""

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        super().create(key, data)


class OutOfReach(DirectoryStore):
    def create(self, key: str, data: bytes) -> None:
        raise StoreError("out of reach")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def seal() -> SubmissionEnd:
    return SubmissionEnd(run="digits", submission=1, status="Failed")


def test_the_first_claim_wins_and_is_stored(store: DirectoryStore) -> None:
    outcome = claim_record(store, "end.json", mine := seal())

    assert outcome == (mine, True)
    assert read_record(store, "end.json", SubmissionEnd) == mine


def test_the_second_claim_loses_and_learns_the_winner(store: DirectoryStore) -> None:
    claim_record(store, "end.json", first := seal())

    outcome = claim_record(store, "end.json", seal())

    assert outcome == (first, False)
    assert read_record(store, "end.json", SubmissionEnd) == first


def test_a_record_with_the_same_content_still_belongs_to_its_writer(store: DirectoryStore) -> None:
    first = seal()
    twin = first.model_copy(update={"nonce": "other"})
    claim_record(store, "end.json", first)

    assert not claim_record(store, "end.json", twin).is_ours


def test_a_claim_whose_reply_was_lost_has_won(tmp_path: Path) -> None:
    assert claim_record(LosesReplies(tmp_path), "end.json", mine := seal()) == (mine, True)


def test_the_same_claim_again_still_has_won(store: DirectoryStore) -> None:
    claim_record(store, "end.json", mine := seal())

    assert claim_record(store, "end.json", mine).is_ours


def test_an_outcome_that_is_unknown_is_neither_won_nor_lost(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="out of reach"):
        claim_record(OutOfReach(tmp_path), "end.json", seal())


def test_a_key_that_holds_something_else_is_damage(store: DirectoryStore) -> None:
    store.create("end.json", b"{}")

    with pytest.raises(IntegrityError, match="is not a valid SubmissionEnd"):
        claim_record(store, "end.json", seal())


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b'{"run": 1}', b'{"run": "digits"}', b"\xff"])
def test_bytes_that_are_no_such_record_are_damage_that_says_what_to_do(store: DirectoryStore, data: bytes) -> None:
    store.create("end.json", data)

    with pytest.raises(IntegrityError, match="records are never edited: restore the object or remove the run"):
        read_record(store, "end.json", SubmissionEnd)
    with pytest.raises(IntegrityError):
        find_record(store, "end.json", SubmissionEnd)


def test_a_record_may_have_as_many_bytes_as_its_kind_and_no_more(store: DirectoryStore) -> None:
    longest = CrashRecord(run="digits", step="fit", attempt=1, error="x").to_bytes().ljust(CrashRecord.max_bytes)
    store.create("longest.json", longest)
    store.create("longer.json", longest + b" ")

    assert read_record(store, "longest.json", CrashRecord).run == "digits"
    with pytest.raises(IntegrityError, match="has 65,537 bytes, and a CrashRecord has at most 65,536"):
        read_record(store, "longer.json", CrashRecord)


def test_a_record_that_is_absent_is_missing_or_none(store: DirectoryStore) -> None:
    with pytest.raises(ObjectMissingError):
        read_record(store, "end.json", SubmissionEnd)
    assert find_record(store, "end.json", SubmissionEnd) is None


def test_a_plain_write_to_a_taken_key_is_refused(store: DirectoryStore) -> None:
    claim_record(store, "end.json", seal())

    with pytest.raises(ObjectExistsError):
        store.create("end.json", b"")
