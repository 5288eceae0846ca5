"""The benchmark of start-up counts the CPU time of the process that it starts, and refuses a failing one."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.cli import AIMS, BASELINES, READS, cpu_seconds


def test_the_cpu_time_of_the_process_is_counted(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert cpu_seconds([sys.executable, "-c", busy], tmp_path, {}) >= 0.3
    assert cpu_seconds([sys.executable, "-c", "import time; time.sleep(0.01)"], tmp_path, {}) > 0


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        cpu_seconds([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, {})


def test_every_command_that_is_measured_has_an_aim() -> None:
    assert set(READS) < set(AIMS)
    assert not set(BASELINES) & set(AIMS)
