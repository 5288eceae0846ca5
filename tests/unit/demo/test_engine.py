"""The demo fails when its engine does, and says where to look."""

from pathlib import Path

import pytest

from hera_pipelines.demo import fault_injection
from hera_pipelines.demo.fault_injection import PromiseBrokenError, TiphysProcess


def test_an_engine_that_ends_with_an_error_breaks_the_promise_with_its_last_words(tmp_path: Path) -> None:
    with (
        TiphysProcess(["plan", "r", "--store", str(tmp_path / "missing")], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"exit code 3; its last line: tiphys: .*missing"),
    ):
        engine.finish(30)


def test_an_engine_that_ends_too_early_breaks_the_promise(tmp_path: Path) -> None:
    with (
        TiphysProcess(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match="ended before training began; its last line: tiphys"),
    ):
        engine.wait_for(lambda: False, "training began", 30)


def test_time_that_is_up_breaks_the_promise(tmp_path: Path) -> None:
    with (
        TiphysProcess(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"timed out after 0 s while waiting for training began; see .*log"),
    ):
        engine.wait_for(lambda: False, "training began", 0)


def test_what_has_happened_is_not_waited_for(tmp_path: Path) -> None:
    with TiphysProcess(["--version"], tmp_path / "log") as engine:
        engine.wait_for(lambda: True, "anything", 0)


def test_leaving_the_block_leaves_nothing_running(tmp_path: Path) -> None:
    with TiphysProcess(["--version"], tmp_path / "log") as engine:
        assert fault_injection.is_process_alive(engine.pid)
    assert not fault_injection.is_process_alive(engine.pid)
