"""The environment of a training program, checked before the first step."""

import pytest

from tiphys.checkpoint.settings import CheckpointSettings, IntervalBounds, SaveInterval
from tiphys.errors import UsageError
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy
from tiphys.records import CheckpointRef

GIVEN = {
    "TIPHYS_STORE": "s3://ml-runs/tiphys",
    "TIPHYS_RUN": "digits-1",
    "TIPHYS_STEP": "fit",
    "TIPHYS_ATTEMPT": "3",
    "TIPHYS_LINEAGE": "digits-1/fit",
}


def read(**changes):
    return CheckpointSettings.from_environment(
        {**GIVEN, **{f"TIPHYS_{name}": value for name, value in changes.items()}}
    )


@pytest.mark.parametrize("environ", [{}, {**GIVEN, "TIPHYS_LINEAGE": ""}, {"TIPHYS_STORE": "s3://ml-runs"}])
def test_without_a_lineage_there_are_no_settings(environ):
    assert CheckpointSettings.from_environment(environ) is None


def test_the_least_that_is_given_has_defaults_for_the_rest():
    assert read() == CheckpointSettings(
        run="digits-1",
        step="fit",
        attempt=3,
        lineage="digits-1/fit",
        store="s3://ml-runs/tiphys",
        checkpoint_store="s3://ml-runs/tiphys",
    )


def test_empty_variables_count_as_absent():
    empty = dict.fromkeys(("CHECKPOINT_STORE", "SAVE_EVERY", "KEEP_LAST", "RESUME_FROM", "GRACE_SECONDS"), "")
    assert read(**empty) == read()


def test_every_variable_that_compile_writes_is_read():
    found = read(
        CHECKPOINT_STORE="file:///mnt/checkpoints",
        RESUME_FROM="2-1180",
        SAVE_EVERY="100 steps",
        KEEP_LAST="3",
        GRACE_SECONDS="120",
        HANG_AFTER_SECONDS="1800",
    )
    assert found.hang_after_seconds == 1800.0
    assert found.checkpoint_store == "file:///mnt/checkpoints"
    assert found.resume_from == CheckpointRef(lineage="digits-1/fit", attempt=2, global_step=1180)
    assert (found.save_every, found.keep, found.grace_seconds) == (
        SaveInterval(100, "steps"),
        RetentionPolicy(last=3),
        120.0,
    )


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("600s", SaveInterval(600, "seconds")),
        ("0.5s", SaveInterval(0.5, "seconds")),
        ("10m", SaveInterval(600, "seconds")),
        ("1h", SaveInterval(3600, "seconds")),
        ("100 steps", SaveInterval(100, "steps")),
        ("1e+06 steps", SaveInterval(1_000_000, "steps")),
        ("1 step", SaveInterval(1, "steps")),
        ("auto", SaveInterval(600, "seconds", auto=IntervalBounds(60, 3600))),
        ("auto:30s..2m", SaveInterval(120, "seconds", auto=IntervalBounds(30, 120))),
        ("auto:0.5h..2h", SaveInterval(1800, "seconds", auto=IntervalBounds(1800, 7200))),
    ],
)
def test_intervals(text, every):
    assert read(SAVE_EVERY=text).save_every == every


def test_keeping_all_is_said_by_a_word():
    assert read(KEEP_LAST="all").keep is None


def test_every_retention_variable_is_read():
    found = read(KEEP_LAST="2", KEEP_EVERY="1000 steps", KEEP_BEST="val:loss:min:2", DELETE_AFTER_SECONDS="90")
    best = BestCheckpoints(metric="val:loss", order="min", count=2)
    assert found.keep == RetentionPolicy(last=2, every_steps=1000, best=best, delay_seconds=90)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SAVE_EVERY", "often", "write 600s, 10m, 1h, 100 steps"),
        ("SAVE_EVERY", "0s", "write 600s"),
        ("SAVE_EVERY", "600", "write 600s"),
        ("SAVE_EVERY", "-5s", "write 600s"),
        ("SAVE_EVERY", "auto:1m", "auto:1m..1h"),
        ("SAVE_EVERY", "auto:2m..1m", "the lower bound comes first"),
        ("SAVE_EVERY", "auto:0s..1m", "the lower bound comes first"),
        ("ASYNCHRONOUS", "no", "TIPHYS_ASYNCHRONOUS='no' is not valid: write true or false"),
        ("WHEN_BUSY", "hurry", "TIPHYS_WHEN_BUSY='hurry' is not valid: write skip, wait or queue"),
        ("KEEP_LAST", "0", "TIPHYS_KEEP_LAST='0' is not a whole number above 0"),
        ("KEEP_LAST", "some", "not a whole number"),
        ("KEEP_EVERY", "0 steps", "TIPHYS_KEEP_EVERY='0 steps' is not valid: write a number of global steps"),
        ("KEEP_EVERY", "1h", "such as 1000 steps"),
        ("KEEP_BEST", "loss", "TIPHYS_KEEP_BEST='loss' is not valid: write a metric, min or max"),
        ("KEEP_BEST", "loss:min:0", "such as loss:min:2"),
        ("DELETE_AFTER_SECONDS", "10m", "not a number of seconds"),
        ("ATTEMPT", "first", "TIPHYS_ATTEMPT='first'"),
        ("ATTEMPT", "²", "not a whole number"),
        ("RESUME_FROM", "1180", "<attempt>-<global step>"),
        ("GRACE_SECONDS", "2m", "not a number of seconds"),
        ("RUN", "Not/A/Run", "not valid"),
        ("STEP", "Fit", "not valid"),
        ("STORE", "", "TIPHYS_STORE is not"),
        ("RUN", "", "TIPHYS_RUN is not"),
        ("ATTEMPT", "", "TIPHYS_ATTEMPT is not"),
    ],
)
def test_an_invalid_variable_is_named(variable, value, words):
    with pytest.raises(UsageError, match=words):
        read(**{variable: value})


def test_a_rank_variable_outside_of_tiphys_is_ignored():
    assert CheckpointSettings.from_environment({"RANK": "1"}) is None
