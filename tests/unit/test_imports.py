"""Every module beside the tests can be imported: one that is used twice a year breaks unseen."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
OPTIONAL = {"torch", "lightning", "transformers", "accelerate", "keras", "jax", "mlflow", "playwright", "ray", "dvc"}
"""Packages of the environments of `make test-torch`, `test-programs`, `test-mlflow` and `test-ui`."""
PROGRAMS = {"scripts", "peer_programs", "trainer.py"}
"""Folders and files of programs, which run when they are imported. The commands that start them have tests."""
IMPORTER = """
import importlib, json, sys
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = [getattr(error, "name", None) or "", repr(error)]
json.dump(failed, sys.stdout)
"""


def test_modules_are_imported() -> None:
    paths = sorted(path.relative_to(TESTS) for path in TESTS.rglob("*.py"))
    names = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in paths
        if not path.name.startswith(("test_", "conftest", "__main__")) and PROGRAMS.isdisjoint(path.parts)
    ]
    assert len(names) > 150
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    # In a process of its own: plugins of pytest that are imported already are not rewritten by it.
    done = subprocess.run(
        [sys.executable, "-c", IMPORTER],
        env=environ,
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
    )
    failed = json.loads(done.stdout)
    assert {name: error for name, (missing, error) in failed.items() if missing.partition(".")[0] not in OPTIONAL} == {}
