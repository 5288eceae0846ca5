"""A copy of `tiphys-exec` runs where there is nothing but the kernel, and neither takes nor leaves variables."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tiphys.checkpoint.exec.runtime import LOADER, REQUIRED_PACKAGES, install_runtime, runtime_command
from tiphys.errors import StoreError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is copied on Linux only")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy in ``/runtime``, made by the command that an init container runs."""
    folder = tmp_path_factory.mktemp("root")
    command = [sys.executable, "-m", "tiphys.checkpoint.exec", "--install", str(folder / "runtime")]
    subprocess.run(command, check=True, timeout=600)
    return folder


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]


@pytest.mark.heavy
@pytest.mark.skipif(os.getuid() != 0, reason="only root may change the root folder")
def test_the_runtime_runs_in_an_empty_image(root: Path) -> None:
    command = [
        *runtime_command("/runtime"),
        "--dir",
        "/ckpt",
        "--",
        *runtime_command("/runtime")[:4],
        "-c",
        "print(6 * 7)",
    ]
    answer = run([shutil.which("chroot") or "chroot", str(root), *command], env={})
    assert (answer.returncode, answer.stdout) == (0, "42\n"), answer.stderr


def test_variables_of_the_program_do_not_reach_it_nor_its_own_the_program(root: Path, tmp_path: Path) -> None:
    poison = tmp_path / "pydantic"
    poison.mkdir()
    (poison / "__init__.py").write_text("raise SystemExit('of another Python')")
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
    answer = run([*runtime_command(f"{root}/runtime"), "--dir", str(tmp_path), "--", "env"], env=environ)
    assert answer.returncode == 0, answer.stderr
    assert dict(line.split("=", 1) for line in answer.stdout.splitlines()) == environ


def test_a_second_copy_into_the_folder_is_harmless(root: Path) -> None:
    before = (root / "runtime" / LOADER).read_bytes()
    install_runtime(root / "runtime")
    assert (root / "runtime" / LOADER).read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/runtime: tiphys-exec cannot be copied there"):
        install_runtime(tmp_path / "file" / "runtime")


def test_the_runtime_has_the_packages_that_tiphys_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {one.split(">")[0] for one in project["dependencies"]} == set(REQUIRED_PACKAGES)
