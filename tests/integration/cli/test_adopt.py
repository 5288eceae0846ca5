"""``tiphys adopt``: a Workflow that knows nothing of Tiphys, marked, run, killed by an error and resumed."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from .conftest import Command, invoke

DOCS = Path(__file__).parents[3] / "docs"
TEXT = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  generateName: greet-
spec:
  entrypoint: greet
  arguments:
    parameters: [{name: who, value: world}]
  templates:
  - name: greet
    inputs:
      parameters: [{name: who}]
    steps:
    - - name: Make
        template: make
        arguments: {parameters: [{name: who, value: "{{inputs.parameters.who}}"}]}
    - - name: check
        template: check
        arguments: {artifacts: [{name: greeting, from: "{{steps.Make.outputs.artifacts.greeting}}"}]}
  - name: make
    inputs:
      parameters: [{name: who}]
    container:
      image: busybox
      command: [sh, -c]
      args: ["echo hello {{inputs.parameters.who}} > /tmp/greeting"]
    outputs:
      artifacts: [{name: greeting, path: /tmp/greeting}]
  - name: check   # fails for a while
    inputs:
      artifacts: [{name: greeting, path: /tmp/greeting}]
    script:
      image: busybox
      command: [sh]
      source: |
        grep "hello world" /tmp/greeting && FAILS
"""


def test_a_workflow_is_adopted_run_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(TEXT.replace("FAILS", "exit 3"))
    adopted = invoke(["adopt", "old.yaml", "--output", "new.yaml"], tmp_path)
    assert adopted.code == 0, adopted.err
    assert "LINE   TEMPLATE" in adopted.out
    assert "wrote new.yaml; compile it with `tiphys compile new.yaml`" in adopted.err
    assert "# fails for a while" in (tmp_path / "new.yaml").read_text()

    failed = invoke(["run", "new.yaml", "--run", "r"], tmp_path)
    assert failed.code == 1, failed.err
    assert "check failed in attempt 1 by user error" in failed.err

    text = (tmp_path / "new.yaml").read_text()
    (tmp_path / "new.yaml").write_text(text.replace("exit 3", "exit 0"))
    resumed = invoke(["resume", "r", "new.yaml"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert "1 of 2 steps would run" in resumed.err + resumed.out


FLIP = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: flip-}
spec:
  entrypoint: main
  templates:
  - name: main
    steps:
    - - {name: flip, template: flip}
    - - name: heads
        template: say
        when: "{{steps.flip.outputs.result}} == heads"
        arguments: {parameters: [{name: side, value: "{{steps.flip.outputs.result}}"}]}
      - name: tails
        template: say
        when: "{{steps.flip.outputs.result}} == tails"
        arguments: {parameters: [{name: side, value: no}]}
      - name: each
        template: say
        withParam: '["{{steps.flip.outputs.result}}", "none"]'
        arguments: {parameters: [{name: side, value: "{{item}}"}]}
  - name: flip
    script:
      image: busybox
      command: [sh]
      source: |
        echo flipped >> FOLDER/flips
        echo heads
  - name: say
    inputs: {parameters: [{name: side}]}
    container:
      image: busybox
      command: [sh, -c]
      args: ["echo {{inputs.parameters.side}} >> FOLDER/said; test -e FOLDER/may-end"]
"""


@pytest.mark.heavy
def test_a_printed_output_chooses_the_branch_and_is_reused(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(FLIP.replace("FOLDER", str(tmp_path)))
    adopted = invoke(["adopt", "old.yaml", "--output", "new.yaml"], tmp_path)
    assert re.search(r"flip +step", adopted.out), adopted.out
    failed = invoke(["run", "new.yaml", "--run", "r"], tmp_path)
    assert failed.code == 1, failed.err
    (tmp_path / "may-end").touch()
    (tmp_path / "said").unlink()
    resumed = invoke(["resume", "r"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert (tmp_path / "flips").read_text().split() == ["flipped"]
    assert sorted((tmp_path / "said").read_text().split()) == ["heads", "heads", "none"]


@pytest.mark.heavy
def test_the_example_of_the_guide_is_what_the_command_prints_and_runs(tmp_path: Path) -> None:
    for name in ("before.yaml", "after.yaml"):
        shutil.copy(DOCS / "adopt" / name, tmp_path)
    shown = re.search(r"```\n\$ tiphys (adopt .*?)\n(.*?)```", (DOCS / "adopt.md").read_text(), re.DOTALL)
    assert shown is not None
    adopted = invoke(shlex.split(shown[1].replace("after.yaml", "new.yaml")), tmp_path)
    assert adopted.out == shown[2]
    assert (tmp_path / "new.yaml").read_text() == (tmp_path / "after.yaml").read_text()
    ran = invoke(["run", "after.yaml", "--run", "r"], tmp_path)
    assert ran.code == 0, ran.err
    assert "run r succeeded" in ran.err


def test_a_folder_is_described_in_one_line_for_each_workflow(tmp_path: Path) -> None:
    folder = tmp_path / "flows"
    folder.mkdir()
    (folder / "old.yaml").write_text(TEXT)
    (folder / "no.yaml").write_text(TEXT.replace("entrypoint: greet", "onExit: make"))
    (folder / "other.yml").write_text("apiVersion: v1\nkind: Service\n")
    found = invoke(["adopt", folder], tmp_path)
    assert found.code == 0
    lines = [line.split() for line in found.out.splitlines()]
    assert lines[2][-2:] == ["2", "step"]
    assert "stays: it has no entrypoint" in found.out
    assert "1 of 2 can be adopted" in found.err
    document = json.loads(invoke(["adopt", folder, "-o", "json"], tmp_path).out)
    assert [one["adopted"] for one in document["items"]] == [False, True]
    assert {one["template"]: one["becomes"] for one in document["items"][1]["templates"]} == {
        "greet": "plain",
        "make": "step",
        "check": "step",
    }


def test_a_workflow_of_standard_input_goes_marked_to_standard_output(
    tiphys: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.replace("hello", "grüße").replace("\n", "\r\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "ascii"))
    adopted = tiphys("adopt", "-", "--output", "-")
    assert adopted.code == 0, adopted.err
    assert adopted.out.replace("    metadata:\n      annotations:\n        tiphys.dev/adopt: step\n", "") == (
        TEXT.replace("hello", "grüße")
    )
    assert adopted.out.count("tiphys.dev/adopt: step") == 2

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a: &a [*a]"), "ascii"))
    refused = tiphys("adopt", "-")
    assert refused.code == 2
    assert "-:1: this is not YAML: an anchor contains its own alias" in refused.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.yaml"], "absent.yaml cannot be read"),
        (["bad.yaml"], "bad.yaml:1: this is not YAML"),
        (["service.yaml"], "service.yaml: it has no Workflow, template or schedule of Argo, but Service"),
        (["empty"], "empty has no YAML files"),
        (["no.yaml"], "no.yaml: nothing can be adopted"),
        (["old.yaml", "no.yaml", "--output", "x"], "--output is for one file"),
        (["old.yaml", "--output", "absent/x.yaml"], "cannot write the file to absent/x.yaml"),
    ],
)
def test_a_file_that_cannot_be_adopted_is_one_line_of_an_error(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.yaml").write_text(TEXT)
    (tmp_path / "no.yaml").write_text(TEXT.replace("entrypoint: greet", "onExit: make"))
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "service.yaml").write_text("apiVersion: v1\nkind: Service\n")
    answer = invoke(["adopt", *words], tmp_path)
    assert answer.code == 2
    assert said in answer.error


def test_a_file_without_marks_names_the_command_that_finds_them(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(TEXT)
    answer = invoke(["compile", "old.yaml"], tmp_path)
    assert answer.code == 2
    assert "tiphys adopt" in answer.error
