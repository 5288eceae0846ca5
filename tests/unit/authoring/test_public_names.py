"""What `from hera_pipelines import …` offers, and that it costs nothing until it is used."""

import subprocess
import sys

import pytest

import hera_pipelines


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(hera_pipelines, name) is not None for name in hera_pipelines.__all__)
    assert set(hera_pipelines._MODULE_BY_NAME) == set(hera_pipelines.__all__)


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trian'"):
        hera_pipelines.Trian  # noqa: B018


def test_importing_the_package_does_not_import_hera() -> None:
    code = "import sys, hera_pipelines; print('hera' in sys.modules, 'hera.workflows' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["False", "False"]
