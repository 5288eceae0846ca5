"""``tiphys why`` of a run that no ledger of a cluster knows: its store tells how its steps failed."""

import json
from pathlib import Path

import pytest
from support.stories import small_pipeline

from .conftest import Command, Finished


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))


def test_a_failed_run_of_this_machine_is_explained_from_its_store(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    tiphys("run", file, "--run", "r", "-p", "fail=yes", "--store", tmp_path / "store", "--speed", "50")
    answer = tiphys("why", "r", "--store", tmp_path / "store")
    assert (answer.code, answer.out.splitlines()[0]) == (
        0,
        "r/report attempt 1 ended by user error: the program exited with 1 (told to fail)",
    )
    sound = tiphys("why", "r/fit", "--store", tmp_path / "store")
    assert (sound.code, sound.out) == (0, "r/fit waits for nothing, and did not fail\n")
    document = json.loads(tiphys("why", "r", "--store", tmp_path / "store", "-o", "json").out)
    assert [failure["step"] for failure in document["failures"]] == ["report"]


def test_a_run_that_succeeded_waits_for_nothing_and_did_not_fail(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("why", finished.run, "--store", finished.store)
    assert (answer.code, answer.out) == (0, f"run {finished.run} succeeded: it waits for nothing, and did not fail\n")
    document = json.loads(tiphys("why", finished.run, "--store", finished.store, "-o", "json").out)
    assert not any(document[part] for part in ("holding", "waiting", "failures", "obstacles"))
    assert tiphys("why", f"{finished.run}/absent", "--store", finished.store).code == 3


def test_a_run_that_the_store_does_not_know_is_looked_up_in_the_cluster(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("why", "another", "--store", finished.store)
    assert answer.code != 0
    assert "cannot connect to a Kubernetes cluster" in answer.error


def test_the_store_of_this_directory_needs_no_option(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    tiphys("run", file, "--run", "r", "-p", "fail=yes", "--speed", "50")
    assert "r/report attempt 1 ended by user error" in tiphys("why", "r/report").out
    assert "run r has no step 'reprot'" in tiphys("why", "r/reprot").error
