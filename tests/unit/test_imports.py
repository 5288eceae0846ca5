"""Every module beside the tests can be imported: one that is used twice a year breaks unseen."""

import importlib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OPTIONAL = {"torch", "lightning", "transformers", "accelerate", "keras", "jax", "mlflow", "playwright", "ray", "dvc"}
"""Packages of the environments of `make test-torch`, `test-programs`, `test-mlflow` and `test-ui`."""
PROGRAMS = {"scripts", "peer_programs", "trainer.py"}
"""Folders and files of programs, which run when they are imported. The commands that start them have tests."""
MODULES = sorted(
    path.relative_to(TESTS)
    for path in TESTS.rglob("*.py")
    if not path.name.startswith(("test_", "conftest", "__main__")) and PROGRAMS.isdisjoint(path.parts)
)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_is_imported(path: Path) -> None:
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}")
