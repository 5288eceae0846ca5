"""Files that DVC itself writes are read, and say what its own commands changed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hera_pipelines import Dvc
from hera_pipelines.authoring.data_versions import read_data_version

UV = os.environ.get("UV") or shutil.which("uv") or ""
PATIENCE_SECONDS = 600
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2 * PATIENCE_SECONDS),
    pytest.mark.skipif(not (UV and shutil.which("git")), reason="uv or git is not installed"),
]
# The version of the files in `tests/unit/authoring/data_versions/dvc_3_67`.
PACKAGES = ("--from", "dvc==3.67.1")

PIPELINE = """
stages:
  prepare:
    cmd: mkdir -p data/train && cp raw/* data/train
    deps: [raw]
    outs: [data/train]
  split:
    foreach: [a, b]
    do:
      cmd: echo ${item} > data/${item}.txt
      outs:
      - data/${item}.txt
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Git repository with DVC, and the working directory."""
    home = tmp_path / "home"
    home.mkdir()
    cache = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
    variables = {"UV_CACHE_DIR": cache, "UV_PYTHON_DOWNLOADS": "never", "DVC_NO_ANALYTICS": "1", "HOME": str(home)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    repository = tmp_path / "repository"
    (repository / "raw").mkdir(parents=True)
    monkeypatch.chdir(repository)
    subprocess.run(["git", "init", "--quiet"], check=True)
    dvc("init", "--quiet")
    (repository / "dvc.yaml").write_text(PIPELINE)
    return repository


def dvc(*arguments: str) -> None:
    line = [UV, "tool", "run", "--quiet", "--isolated", *PACKAGES, "dvc", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_files_written_by_dvc_are_read(folder: Path) -> None:
    (folder / "raw" / "one").write_text("1\n")
    (folder / "raw" / "two").write_text("2\n")
    dvc("add", "--quiet", "raw")
    dvc("repro", "--quiet")

    raw, train, item = (read_data_version(Dvc(path)) for path in ("raw.dvc", "data/train", "data/b.txt"))

    assert (raw.name, raw.files, raw.size_bytes) == ("raw", 2, 4)
    assert raw.digest.endswith(".dir")
    assert str(train) == str(raw)  # the same content
    assert (item.digest, item.size_bytes) == ("3b5d5c3712955042212316173ccf37be", 2)  # md5sum of "b\n"

    (folder / "raw" / "two").write_text("3\n")
    dvc("add", "--quiet", "raw")
    assert read_data_version(Dvc("raw.dvc")).digest != raw.digest
    assert read_data_version(Dvc("data/train")) == train  # until the stage is run
    dvc("repro", "--quiet")
    assert str(read_data_version(Dvc("data/train"))) == str(read_data_version(Dvc("raw.dvc")))
    assert read_data_version(Dvc("data/b.txt")) == item
