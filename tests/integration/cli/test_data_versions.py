"""A run whose training reads data of DVC, as a person meets it when that data changes.

| the hash in dvc.lock       | plan, resume                                       | fork              |
|----------------------------|----------------------------------------------------|-------------------|
| is the same                | the result is taken over                           | taken over        |
| changed                    | refused, with both hashes; `--drift data=warn`     | trains again      |
| is not there               | the error of the file, and nothing is changed      |                   |
"""

import json
from pathlib import Path

import pytest
from support.stories import small_pipeline

from .conftest import Command, snapshot

OLD, NEW = "a" * 32 + ".dir", "b" * 32 + ".dir"


def write_lock(folder: Path, digest: str) -> None:
    output = f"    - path: data/train\n      hash: md5\n      md5: {digest}\n      size: 4\n      nfiles: 2\n"
    (folder / "dvc.lock").write_text(f"schema: '2.0'\nstages:\n  prepare:\n    cmd: prepare\n    outs:\n{output}")


def write_pipeline(folder: Path) -> Path:
    """The tiny pipeline, whose training reads data of DVC and keeps what it was told about it."""
    file = small_pipeline.write(folder)
    text = file.read_text().replace("import Checkpoints,", "import Checkpoints, Dvc,")
    file.write_text(text.replace('    name="fit",\n', '    name="fit",\n    data=Dvc("data/train"),\n'))
    programs = folder / "tiny_programs.py"
    keep = 'def fit(seed, steps):\n    (Path(here) / "told.json").write_text(os.environ["TIPHYS_DATA"])\n'
    programs.write_text(programs.read_text().replace("def fit(seed, steps):\n", keep))
    return file


@pytest.mark.heavy
def test_changed_data_is_drift_and_trains_again(tiphys: Command, tmp_path: Path) -> None:
    write_lock(tmp_path, OLD)
    file = write_pipeline(tmp_path / "code")
    assert tiphys("run", file, "--run", "tiny-1").code == 0
    versions = json.loads((tmp_path / "code" / "told.json").read_text())
    assert versions == [{"name": "data/train", "algorithm": "md5", "digest": OLD, "size_bytes": 4, "files": 2}]
    assert "data: data/train md5 aaaaaaaaaaaa" in tiphys("lineage", "tiny-1").out
    document = json.loads(tiphys("get", "tiny-1/fit", "-o", "json").out)
    assert document["steps"][0]["attempts"][0]["data"] == versions
    same = tiphys("plan", "tiny-1", file)
    assert (same.code, "data/train" in same.err) == (0, False)

    write_lock(tmp_path, NEW)
    before = snapshot(tmp_path / ".tiphys" / "store")
    refused = tiphys("resume", "tiny-1", file)
    assert refused.code == 4
    assert f"fit: data data/train md5 {OLD} → md5 {NEW}" in refused.error
    assert "begin a run of its own with `tiphys fork tiny-1 …`" in refused.error
    assert snapshot(tmp_path / ".tiphys" / "store") == before
    assert "warn: fit: data data/train" in tiphys("plan", "tiny-1", file, "--drift", "data=warn").err

    resumed = tiphys("resume", "tiny-1", file, "--drift", "data=warn")
    assert resumed.code == 0
    # Report reads what fit has written anew.
    assert small_pipeline.ran(tmp_path / "code") == ["prepare", "fit", "report", "fit", "report"]
    assert json.loads((tmp_path / "code" / "told.json").read_text())[0]["digest"] == NEW
    tree = tiphys("lineage", "tiny-1").out
    assert "data: data/train md5 bbbbbbbbbbbb" in tree

    # A resume without the file goes on with the Workflow that was submitted last.
    (tmp_path / "dvc.lock").unlink()
    assert tiphys("resume", "tiny-1", "--from", "report").code == 0
    assert small_pipeline.ran(tmp_path / "code")[5:] == ["report"]


@pytest.mark.heavy
def test_a_fork_on_new_data_trains_again(tiphys: Command, tmp_path: Path) -> None:
    write_lock(tmp_path, OLD)
    file = write_pipeline(tmp_path / "code")
    assert tiphys("run", file, "--run", "tiny-1").code == 0
    write_lock(tmp_path, NEW)

    forked = tiphys("fork", "tiny-1", file, "--run", "tiny-2")

    assert forked.code == 0
    assert f"fork: fit: data data/train md5 {OLD} → md5 {NEW}" in forked.err
    assert small_pipeline.ran(tmp_path / "code").count("fit") == 2


def test_without_a_lock_nothing_is_submitted_or_changed(tiphys: Command, tmp_path: Path) -> None:
    file = write_pipeline(tmp_path / "code")
    missing = tiphys("run", file, "--run", "tiny-1")
    assert missing.code == 3
    assert f"step 'fit': dvc.lock does not exist in {tmp_path}; `dvc repro` writes it" in missing.error
    assert not (tmp_path / ".tiphys" / "store" / "control" / "runs").exists()
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages: {a: }{\n")
    damaged = tiphys("compile", file, "--store", "s3://ml-runs/tiphys")
    assert damaged.code == 2
    assert "step 'fit': dvc.lock, line 2, column 14, is not valid YAML" in damaged.error
