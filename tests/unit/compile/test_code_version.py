"""The commit of the code, from a checkout into the environment of training programs."""

import copy
import subprocess
from pathlib import Path

import pytest
from support.builders.authored_workflows import step, train, workflow

from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.compile.output import read_git_commit, record_code_version
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import CheckpointPolicy


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("a")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "--no-verify", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_known_by_its_commit(checkout: Path) -> None:
    (checkout / "untracked").write_text("b")
    assert read_git_commit(checkout) == git(checkout, "rev-parse", "HEAD")


def test_changed_files_are_named(checkout: Path) -> None:
    (checkout / "train.py").write_text("b")
    assert read_git_commit(checkout) == f"{git(checkout, 'rev-parse', 'HEAD')}-dirty"


def test_code_outside_of_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git_commit(tmp_path) == ""
    assert read_git_commit(tmp_path / "missing") == ""


def test_a_machine_without_git_knows_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert read_git_commit(checkout) == ""


def compiled() -> Manifest:
    programs = step(), train(asked={"checkpoints": CheckpointPolicy()})
    return compile_workflow(workflow(*programs), CompileOptions(store="s3://ml-runs/tiphys"))


def code_versions(manifest: Manifest) -> dict[str, str]:
    """Templates whose program is told a commit, and which."""
    found = {}
    for template in manifest["spec"]["templates"]:
        for variable in (template.get("container") or {}).get("env", []):
            if variable["name"] == "TIPHYS_GIT_COMMIT":
                found[template["name"]] = variable["value"]
    return found


def test_training_programs_and_the_workflow_tell_the_commit() -> None:
    manifest = compiled()
    record_code_version(manifest, "c0ffee")
    assert code_versions(manifest) == {"fit-run": "c0ffee"}
    assert manifest["metadata"]["annotations"]["tiphys.dev/code-version"] == "c0ffee"


def test_recording_it_again_changes_nothing_more() -> None:
    once = compiled()
    record_code_version(once, "c0ffee")
    twice = copy.deepcopy(once)
    record_code_version(twice, "c0ffee")
    assert once == twice


def test_an_unknown_commit_leaves_the_workflow_as_it_is() -> None:
    manifest = compiled()
    record_code_version(manifest, "")
    assert manifest == compiled()
