"""Data goes to stdout, everything else to stderr, and pipes get neither colour nor line breaks."""

import json

import pytest
import yaml
from rich.text import Text

from hera_pipelines.cli.screen import Format, Screen


def test_notes_go_to_stderr_and_data_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.note("store /tmp/x")
    screen.write("data")
    assert capsys.readouterr() == ("data\n", "store /tmp/x\n")


def test_quiet_silences_notes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(quiet=True)
    screen.note("store /tmp/x")
    screen.write("data")
    assert capsys.readouterr() == ("data\n", "")


def test_a_table_in_a_pipe_is_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().table(("STEP", "REASON"), [("fit", "x" * 500), (Text("[b]", style="red"), "short")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].split() == ["STEP", "REASON"]
    assert lines[1].split() == ["fit", "x" * 500]
    assert lines[2].split() == ["[b]", "short"]


def test_json_has_null_for_what_is_no_number_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().document({"loss": [float("nan"), (float("inf"), 0.5)]}, Format.JSON)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": [None, [None, 0.5]]}


@pytest.mark.parametrize(("output", "load"), [(Format.JSON, json.loads), (Format.YAML, yaml.safe_load)])
def test_documents_read_back(output: Format, load, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    document = {"kind": "Plan", "steps": [{"name": "fit", "reason": "größer"}]}
    Screen().document(document, output)
    assert load(capsys.readouterr().out) == document
