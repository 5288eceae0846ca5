"""Declared inputs and outputs are found by their names."""

import subprocess
import sys

import pytest

from tiphys import inputs, outputs
from tiphys.errors import NotFoundError, UsageError


def test_an_output_has_a_path_whose_folder_exists(monkeypatch, tmp_path):
    monkeypatch.setenv("TIPHYS_OUTPUT_VAL_LOSS", str(tmp_path / "deep" / "loss"))
    path = outputs.path("val-loss")
    path.write_text("0.5")
    assert path == tmp_path / "deep" / "loss"


def test_an_input_has_the_path_of_what_lies_there(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("TIPHYS_INPUT_DATA_SET", str(tmp_path / "data"))
    assert inputs.path("data-set") == tmp_path / "data"


@pytest.mark.parametrize("value", [None, ""])
def test_an_undeclared_path_is_named_with_its_variable(monkeypatch, value):
    for variable in ("TIPHYS_OUTPUT_MODEL", "TIPHYS_INPUT_MODEL"):
        monkeypatch.setenv(variable, value) if value is not None else monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match="TIPHYS_OUTPUT_MODEL is not set"):
        outputs.path("model")
    with pytest.raises(UsageError, match="TIPHYS_INPUT_MODEL is not set"):
        inputs.path("model")


def test_an_input_that_did_not_arrive_is_an_error_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TIPHYS_INPUT_DATA", str(tmp_path / "absent"))
    with pytest.raises(NotFoundError, match="which does not exist"):
        inputs.path("data")


def test_a_program_that_only_asks_for_checkpoints_loads_neither_numpy_nor_boto3():
    code = "import sys; from tiphys import checkpoint, inputs, outputs; print({'numpy', 'boto3'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
