"""The stored form of records: stable, tolerant of the future, and told apart by its writer."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError
from support.builders.lineage import START_TIMES

import tiphys.records
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CheckpointManifest,
    CheckpointRef,
    Event,
    EventBatch,
    Output,
    OutputKind,
    OutputObject,
    QuarantineRecord,
    RunRecord,
    Shard,
    StoredRecord,
    SubmissionEnd,
    utc_now,
)


def sealed(**fields: object) -> SubmissionEnd:
    return SubmissionEnd.model_validate({"run": "digits", "submission": 1, "status": "Failed", **fields})


def test_stored_times_sort_as_text() -> None:
    # Without fixed decimals, 04:13:33Z would sort behind 04:13:33.054Z.
    start = datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone(timedelta(hours=2)))
    times = [start + timedelta(milliseconds=number) for number in (0, 54, 100, 999, 1000)]

    stored = [json.loads(sealed(written_at=time).to_bytes())["written_at"] for time in times]

    assert stored == sorted(stored)
    assert stored[0] == "2026-05-04T01:02:01.000Z"
    assert [sealed(written_at=text).written_at for text in stored] == times


def test_the_stored_form_is_sorted_json_with_a_final_newline() -> None:
    written = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)

    data = sealed(message="käse", nonce="n", written_at=written).to_bytes()

    assert data.decode() == (
        '{"message": "käse", "nonce": "n", "run": "digits", "status": "Failed", "submission": 1, '
        '"version": 1, "written_at": "2026-05-04T03:02:01.000Z"}\n'
    )


def test_an_unknown_field_is_not_stored() -> None:
    end = AttemptEnd(run="digits", step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FENCED)

    assert {"cause", "exit_code"}.isdisjoint(json.loads(end.to_bytes()))


@pytest.mark.parametrize(
    "record",
    [
        AttemptEnd(
            run="digits",
            step="fit",
            attempt=2,
            submission=1,
            outcome=AttemptEndOutcome.DONE,
            cause=Cause.OUT_OF_MEMORY,
            exit_code=137,
            outputs=(
                Output(
                    name="model",
                    kind=OutputKind.ARTIFACT,
                    key="k",
                    directory=True,
                    objects=(OutputObject(key="k/a", size=1, sha256="s"),),
                ),
            ),
        ),
        AttemptClaim(
            run="digits",
            step="fit",
            attempt=2,
            submission=1,
            uid="u",
            node="n",
            instance="i",
            step_key="k",
            starts_from=CheckpointRef(lineage="digits/fit", attempt=1, global_step=10),
        ),
        QuarantineRecord(
            checkpoint=CheckpointRef(lineage="digits/fit", attempt=1, global_step=7), reason="bad", by="restore"
        ),
        RunRecord(run="digits", pipeline="digits", workflow={"metadata": {"creationTimestamp": None}}, digest="d"),
        EventBatch(
            run="digits", source="plugin", events=(Event(name="run.sealed", message="m", data={"a": [1, None]}),)
        ),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_reads_back_as_it_was_written(record: StoredRecord) -> None:
    assert type(record).model_validate_json(record.to_bytes()) == record


def test_a_field_that_was_added_later_is_ignored() -> None:
    document = json.loads(sealed().to_bytes()) | {"new": {"field": 1}}

    assert SubmissionEnd.model_validate_json(json.dumps(document)) == SubmissionEnd.model_validate(document)


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_a_foreign_schema_version_is_refused_and_named(version: object) -> None:
    document = json.loads(sealed().to_bytes()) | {"version": version}

    with pytest.raises(ValidationError, match=f"it has schema version {json.dumps(version)}"):
        SubmissionEnd.model_validate_json(json.dumps(document))


def test_a_record_never_changes() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        sealed().status = "Succeeded"  # type: ignore[misc]


def test_writers_of_the_same_record_are_told_apart() -> None:
    assert sealed().nonce != sealed().nonce


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValidationError, match="timezone"):
        sealed(written_at=datetime(2026, 1, 1))  # noqa: DTZ001  what is to be refused


def test_now_is_utc_to_the_millisecond() -> None:
    now = utc_now()

    assert now.utcoffset() == timedelta(0)
    assert now.microsecond % 1000 == 0


@pytest.mark.parametrize("seal", [{}, {"seal": ""}, {"seal": None}, {"seal": "0" * 64}])
@pytest.mark.parametrize(
    "record",
    [
        CheckpointManifest(
            run="r", step="fit", lineage="r/fit", attempt=1, global_step=1, shards=(), began=START_TIMES
        ).with_seal(),
        AttemptEnd(run="r", step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.DONE),
    ],
)
def test_a_record_without_its_seal_is_refused(record: StoredRecord, seal: dict[str, object]) -> None:
    document = json.loads(record.to_bytes())
    assert type(record).model_validate_json(json.dumps(document)) == record
    del document["seal"]
    with pytest.raises(ValidationError, match="its seal does not match"):
        type(record).model_validate_json(json.dumps({**document, **seal}))


def test_a_manifest_names_its_checkpoint_and_its_size() -> None:
    manifest = CheckpointManifest(
        lineage="digits/fit",
        run="digits",
        step="fit",
        attempt=2,
        global_step=1200,
        shards=(Shard(key="k", size=3, sha256="5" * 64), Shard(key="l", size=4, sha256="7" * 64)),
        began=START_TIMES,
    )

    assert manifest.ref == CheckpointRef(lineage="digits/fit", attempt=2, global_step=1200)
    assert str(manifest.ref) == "2-1200"
    assert manifest.size_bytes == 7


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        CheckpointRef(lineage="digits/fit", attempt=1, global_step=-1)


def test_the_package_offers_every_record() -> None:
    assert sorted(tiphys.records.__all__) == tiphys.records.__all__
    assert all(hasattr(tiphys.records, name) for name in tiphys.records.__all__)
    assert {record.__name__ for record in StoredRecord.__subclasses__()} <= set(tiphys.records.__all__)


@pytest.mark.parametrize("cause", list(Cause))
def test_an_end_is_read_with_the_cause_that_was_written(cause: Cause) -> None:
    end = AttemptEnd(run="digits", step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FAILED, cause=cause)

    assert json.loads(end.to_bytes())["cause"] == cause.value
    assert AttemptEnd.model_validate_json(end.to_bytes()) == end
