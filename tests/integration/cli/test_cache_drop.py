"""``tiphys cache drop``: shows what it would drop, drops it with --yes, and the next run computes its own result."""

import json
from pathlib import Path

import pytest

from .conftest import Command, snapshot

PIPELINE = """
from hera_pipelines import Pipeline, step

@step(share=True, image="python:3.12")
def prep() -> None:
    pass

with Pipeline("digits") as pipeline:
    prep()
"""


@pytest.fixture
def shared(tiphys: Command) -> Command:
    """A store with one run, which shares a result."""
    Path("digits.py").write_text(PIPELINE)
    assert computes(tiphys, "digits-1")
    return tiphys


def computes(tiphys: Command, run: str) -> bool:
    """Whether a new run computes the result of ``prep``; otherwise it takes over the one of another run."""
    answer = tiphys("run", "digits.py", "--run", run, "--speed", "100")
    assert answer.code == 0, answer.err
    return "prep was not run: adopted from run" not in tiphys("events", run).out


def test_without_yes_nothing_is_dropped(shared: Command) -> None:
    before = snapshot(Path(".tiphys/store"))
    answer = shared("cache", "drop")
    assert answer.code == 0
    [row] = answer.out.splitlines()[1:]
    assert row.split()[:3] == ["prep", "digits-1", "digits"]
    assert "would be dropped" in row
    assert answer.err.endswith("nothing was dropped; add --yes to drop\n")
    assert snapshot(Path(".tiphys/store")) == before
    assert not computes(shared, "digits-2")


def test_after_a_drop_the_next_run_computes_its_own_result_and_shares_it(shared: Command) -> None:
    answer = shared("cache", "drop", "--pipeline", "digits", "--step", "prep", "--yes", "-o", "json")
    document = json.loads(answer.out)
    assert (answer.code, document["dry_run"]) == (0, False)
    assert [(one["run"], one["step"]) for one in document["results"]] == [("digits-1", "prep")]
    assert computes(shared, "digits-2")
    assert not computes(shared, "digits-3")
    assert shared("verify", "digits-1").code == 0


def test_results_that_do_not_match_are_kept(shared: Command) -> None:
    for option in (["--older-than", "1d"], ["--pipeline", "other"], ["--run", "digits-2"], ["--step", "fit"]):
        answer = shared("cache", "drop", *option, "--yes")
        assert (answer.code, answer.out) == (0, "")
        assert "no shared result matches" in answer.err
    assert not computes(shared, "digits-2")


def test_a_duration_that_cannot_be_read_is_refused(shared: Command) -> None:
    answer = shared("cache", "drop", "--older-than", "soon", "--yes")
    assert answer.code == 2
    assert "soon" in answer.error
    assert not computes(shared, "digits-2")
