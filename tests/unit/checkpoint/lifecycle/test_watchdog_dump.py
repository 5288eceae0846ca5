"""A program that crashes leaves the signal where kubelet looks; others' use of faulthandler is left to them."""

import faulthandler
import os
import subprocess
import sys

import pytest

from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog
from tiphys.failures.classify import AttemptObservation

CRASH = """
import os, pathlib, signal, sys
from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog
CrashLog(pathlib.Path(sys.argv[1])).open()
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "termination-log"
    path.touch()
    return path


def test_a_crash_names_its_signal_in_the_termination_log(log):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", CRASH, str(log)], env=environ, timeout=300)
    assert ended.returncode == -11
    assert AttemptObservation("Failed", 137, termination_message=log.read_text()).effective_exit_code == 139


def test_faulthandler_is_left_to_a_program_that_uses_it(log, monkeypatch):
    done = []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: True)
    monkeypatch.setattr(faulthandler, "enable", lambda *_, **__: done.append("enable"))
    monkeypatch.setattr(faulthandler, "disable", lambda: done.append("disable"))
    words = CrashLog(log)
    words.open()
    words.close()
    assert done == []


def test_outside_of_a_container_nothing_is_noted(tmp_path):
    before = faulthandler.is_enabled()
    words = CrashLog(tmp_path / "no such file")
    words.open()
    words.close()
    assert faulthandler.is_enabled() == before
