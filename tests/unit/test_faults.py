"""Failpoints: they do nothing unless told, and what they did is on record.

| action | effect |
|---|---|
| crash | SIGKILL |
| raise | InjectedFaultError |
| hang:S | sleeps S seconds |
| @n | at the n-th passage only, by default the first |
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiphys import faults
from tiphys.faults import InjectedFaultError, failpoint

PASS_TWICE = (
    "from tiphys.faults import failpoint; failpoint('a'); print('once', flush=True); failpoint('a'); print('twice')"
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    monkeypatch.setenv("TIPHYS_FAILPOINTS_LOG", str(path))
    return path


def set_failpoints(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    monkeypatch.setenv("TIPHYS_FAILPOINTS", plan)


@pytest.mark.parametrize("plan", [None, "", "other=crash", "a.b=crash;b=raise"])
def test_a_point_that_is_not_named_does_nothing(monkeypatch: pytest.MonkeyPatch, log: Path, plan: str | None) -> None:
    monkeypatch.delenv("TIPHYS_FAILPOINTS", raising=False)
    if plan is not None:
        set_failpoints(monkeypatch, plan)

    failpoint("a")

    assert not log.exists()


def test_raise_fails_at_the_first_passage_alone_and_is_on_record(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    set_failpoints(monkeypatch, "a=raise")

    with pytest.raises(InjectedFaultError, match="failpoint a is set to raise"):
        failpoint("a")
    failpoint("a")

    assert log.read_text() == "a=raise\n"


def test_a_passage_is_counted_for_each_point(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    set_failpoints(monkeypatch, "a=raise@3; b = raise@2")

    failpoint("a")
    failpoint("b")
    with pytest.raises(InjectedFaultError, match="failpoint b"):
        failpoint("b")
    failpoint("a")
    with pytest.raises(InjectedFaultError, match="failpoint a"):
        failpoint("a")

    assert log.read_text() == "b=raise\na=raise\n"


def test_a_point_may_act_at_several_passages(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    set_failpoints(monkeypatch, "a=raise@1;a=raise@3")

    outcomes = []
    for _ in range(4):
        try:
            failpoint("a")
        except InjectedFaultError:
            outcomes.append("failed")
        else:
            outcomes.append("passed")

    assert outcomes == ["failed", "passed", "failed", "passed"]


def test_hang_sleeps_for_the_given_time(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    set_failpoints(monkeypatch, "a=hang:2.5")

    failpoint("a")

    assert slept == [2.5]
    assert log.read_text() == "a=hang:2.5\n"


def test_an_unknown_action_does_not_pass_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_failpoints(monkeypatch, "a=explode")

    with pytest.raises(InjectedFaultError, match="unknown action 'explode'; use crash, raise or hang:SECONDS"):
        failpoint("a")


@pytest.mark.parametrize(("plan", "output"), [("a=crash", b""), ("a=crash@2", b"once\n")])
def test_crash_kills_the_process_at_its_passage(tmp_path: Path, plan: str, output: bytes) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "TIPHYS_FAILPOINTS": plan, "TIPHYS_FAILPOINTS_LOG": str(log)}

    done = subprocess.run([sys.executable, "-c", PASS_TWICE], env=environment, capture_output=True, timeout=120)

    assert done.returncode == -signal.SIGKILL
    assert done.stdout == output
    assert log.read_text() == "a=crash\n"


def test_a_fault_without_a_log_still_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIPHYS_FAILPOINTS_LOG", raising=False)
    set_failpoints(monkeypatch, "a=raise")

    with pytest.raises(InjectedFaultError):
        failpoint("a")
