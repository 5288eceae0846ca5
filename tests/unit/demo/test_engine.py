"""The demo fails when its engine does, and says where to look."""

from pathlib import Path

import pytest

from hera_pipelines.demo import fault_injection as sabotage
from hera_pipelines.demo.fault_injection import Engine, PromiseBrokenError


def test_an_engine_that_ends_with_an_error_breaks_the_promise_with_its_last_words(tmp_path: Path) -> None:
    with (
        Engine(["plan", "r", "--store", str(tmp_path / "missing")], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"exit code 3; it said: tiphys: .*missing"),
    ):
        engine.finish(30)


def test_an_engine_that_ends_too_early_breaks_the_promise(tmp_path: Path) -> None:
    with (
        Engine(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match="ended before training began; it said: tiphys"),
    ):
        engine.wait_for(lambda: False, "training began", 30)


def test_time_that_is_up_breaks_the_promise(tmp_path: Path) -> None:
    with (
        Engine(["--version"], tmp_path / "log") as engine,
        pytest.raises(PromiseBrokenError, match=r"after 0 s, still waiting: training began; see .*log"),
    ):
        engine.wait_for(lambda: False, "training began", 0)


def test_what_has_happened_is_not_waited_for(tmp_path: Path) -> None:
    with Engine(["--version"], tmp_path / "log") as engine:
        engine.wait_for(lambda: True, "anything", 0)


def test_leaving_the_block_leaves_nothing_running(tmp_path: Path) -> None:
    with Engine(["--version"], tmp_path / "log") as engine:
        assert sabotage.alive(engine.pid)
    assert not sabotage.alive(engine.pid)
