"""The move from Hera is as small as docs/from-hera.md says."""

import difflib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from hera_pipelines import load_pipeline
from tiphys.protocol.compiled_workflow import CompiledPipeline

DOCS = Path(__file__).parents[2] / "docs"
BEFORE, AFTER = DOCS / "from_hera" / "before.py", DOCS / "from_hera" / "after.py"


def changed() -> list[str]:
    before, after = BEFORE.read_text().splitlines(), AFTER.read_text().splitlines()
    return list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_move_from_hera_changes_three_lines() -> None:
    gone = [line[1:] for line in changed() if line.startswith("-")]

    assert [line.split("(")[0] for line in gone] == [
        "from hera.workflows import DAG, Artifact, Parameter, Workflow, script",
        "@script",
        "with Workflow",
    ]
    assert len([line for line in changed() if line.startswith("+") and line != "+"]) == len(gone) + 1


def test_the_shown_difference_is_the_real_one() -> None:
    shown = re.search(r"```diff\n(.*?)```", (DOCS / "from-hera.md").read_text(), re.DOTALL)
    real = [line for line in changed() if not line.startswith("@@")]

    assert shown
    assert [line.rstrip() for line in shown[1].splitlines()] == [line.rstrip() for line in real]


def test_a_moved_pipeline_keeps_its_plain_step_unchanged() -> None:
    before = imported(BEFORE).workflow.to_dict()
    after = load_pipeline(AFTER).to_dict()

    assert list(CompiledPipeline.from_manifest(after).steps) == ["fit"]
    plain = [t for m in (before, after) for t in m["spec"]["templates"] if t["name"] == "preprocess"]
    assert plain[0] == plain[1]
    assert {task["name"] for task in CompiledPipeline.from_manifest(after).tasks()} == {"preprocess", "fit"}
