"""Where ``tiphys import-kfp`` writes the Workflow: to a file, or to stdout without one and for ``-``."""

from pathlib import Path

import pytest
import yaml

from hera_pipelines.cli import main

PIPELINE = Path(__file__).parents[2] / "authoring" / "adoption" / "kubeflow" / "addition-pipeline.yaml"


@pytest.mark.parametrize("options", [(), ("--output", "-")])
def test_a_translation_goes_to_stdout(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["import-kfp", str(PIPELINE), *options]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["kind"] == "Workflow"
    assert not [*tmp_path.iterdir()]


def test_a_translation_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "workflow.yaml"
    assert main(["import-kfp", str(PIPELINE), "--output", str(target)]) == 0
    printed = capsys.readouterr()
    assert (printed.out, yaml.safe_load(target.read_text())["kind"]) == ("", "Workflow")
    assert f"run it with `tiphys run {target}`" in printed.err.replace("\n", "")
