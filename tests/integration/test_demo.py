"""The demo as a person runs it. Each of its acts checks its own promise, so its exit code is the test."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.processes.polling import until

from hera_pipelines.demo.story import DemoRun
from tiphys.store.incarnations import count_incarnations

PATIENCE_SECONDS = 900
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2 * PATIENCE_SECONDS)]


@pytest.fixture(scope="module")
def performed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("demo") / "made"
    line = [sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", folder]
    return folder, subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


Performed = tuple[Path, subprocess.CompletedProcess[str]]


def test_every_promise_is_kept(performed: Performed) -> None:
    _, done = performed
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d)  ", done.stdout, re.MULTILINE) == list("1234567")


def test_the_last_line_states_repeated_steps_and_equal_digests(performed: Performed) -> None:
    folder, done = performed
    run = DemoRun(folder, "digits")
    verdict = re.fullmatch(
        r"(\d+) of 2000 steps were executed again, and the two models are bit-identical \(sha256 (\w{16})…\)\.",
        done.stdout.splitlines()[-1],
    )
    assert verdict
    assert int(verdict[1]) == run.count_repeated_steps() > 100
    assert run.digest_model().startswith(verdict[2])


def test_demo_makes_two_attempts_in_two_submissions_from_checkpoints(performed: Performed) -> None:
    folder, _ = performed
    attempts = DemoRun(folder, "digits").attempts()["train"]
    claims = [attempt.claim for attempt in attempts]
    assert [(claim.attempt, claim.submission) for claim in claims] == [(1, 1), (2, 2)]
    assert [claim.starts_from.attempt if claim.starts_from else None for claim in claims] == [None, 1]
    assert count_incarnations(DemoRun(folder, "digits").store, "digits", "train", 1) == 2


def test_the_model_has_learnt_something(performed: Performed) -> None:
    folder, _ = performed
    [accuracy] = DemoRun(folder, "digits").find_result("register").outputs
    assert float(accuracy.value or 0) > 0.95


def test_the_picture_shows_the_damaged_checkpoint(performed: Performed) -> None:
    folder, _ = performed
    picture = ElementTree.parse(folder / "lineage.svg")
    checkpoints = [group for group in picture.iter() if re.fullmatch(r"train-\d+-\d+", group.get("id", ""))]
    damaged = [group for group in checkpoints if any(part.get("class") == "quarantined" for part in group)]
    assert len(damaged) == 1
    assert damaged[0].get("id", "").startswith("train-1-")


def test_a_pipe_gets_neither_colour_nor_padding(performed: Performed) -> None:
    _, done = performed
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_demo_that_is_asked_to_end_leaves_no_engine_behind(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    line = [sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", folder]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        until(lambda: len(engines(folder)) == 2, PATIENCE_SECONDS)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    until(lambda: not engines(folder), PATIENCE_SECONDS)


def engines(folder: Path) -> list[int]:
    """Processes whose command line names the folder of a demo, but for the demo itself."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended since the listing
            continue
        if b"run" in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(entry.name))
    return found
