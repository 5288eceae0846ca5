"""What `tiphys run`, `submit` and `fork` say of a run that they have started."""

import json

import pytest
from tiphys_controller import StartResult

from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import Format
from hera_pipelines.cli.start.run import show_started

STARTED = StartResult("digits-2", 1, "digits-2", "uid-1")


def test_a_run_that_takes_nothing_over_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show_started(Screen(), STARTED, Format.TABLE)
    assert capsys.readouterr() == ("digits-2\n", "")


def test_results_that_a_run_takes_over_are_named_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    sources = tuple(f"fit[{index}] (run digits-1, attempt 1)" for index in range(12))
    show_started(Screen(), STARTED._replace(taken_over=sources), Format.TABLE)
    out, err = capsys.readouterr()
    assert out == "digits-2\n"
    assert err == f"taken over: {', '.join(sources[:10])} and 2 more\n"


def test_a_document_lists_all_that_is_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    show_started(Screen(), STARTED._replace(taken_over=("prep (run a, attempt 1)",)), Format.JSON, parent="a")
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["parent"]) == ("StartedRun", "a")
    assert document["taken_over"] == ["prep (run a, attempt 1)"]
