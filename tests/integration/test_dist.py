"""A release: twice the same bytes, signed, and a desk that is set up as the page without a connection says works."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv") or ""
PATIENCE_SECONDS = 1800

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2 * PATIENCE_SECONDS),
    pytest.mark.skipif(not UV, reason="uv is not installed"),
]


def run(*command: str | Path, cwd: Path) -> str:
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "UV": UV, "PYTHONPATH": str(cwd / "tests"), "UV_PYTHON_DOWNLOADS": "never"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# In the place of Docker, which builds nothing here: it answers as `docker buildx build --metadata-file` does.
DOCKER = """#!/bin/sh
[ "$2" = build ] || exit 0
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != --metadata-file ]; do [ "$1" != --file ] || file=$2; shift; done
echo "{\\"containerimage.digest\\": \\"sha256:$(sha256sum "$file" | cut -c1-64)\\"}" > "$2"
"""


def commands_of_a_desk() -> list[str]:
    """The blocks of the page of air-gapped installations that fetch the packages of a desk, and install them."""
    page = (ROOT / "docs" / "air-gapped.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    commands = [block for block in blocks if "-m pip " in block]
    assert [word for command in commands for word in ("pip download", "--no-index") if word in command] == [
        *("pip download", "--no-index"),
    ]
    return commands


def test_a_release_from_two_clones_is_the_same_and_its_wheel_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker, key = tmp_path / "bin" / "docker", tmp_path / "key"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key, cwd=tmp_path)
    for name in ("one", "two"):
        run("git", "clone", "--quiet", ROOT, name, cwd=tmp_path)
        options = ("--repository", "registry.example.com/team", "--key", key)
        run(sys.executable, "-m", "runner.dist", *options, cwd=tmp_path / name)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "dist").iterdir()} for name in ("one", "two")
    )
    assert {Path(name).suffix for name in first} == {".whl", ".gz", ".tgz", ".json", ".md", ".sig", ".txt", ""}
    assert first == second
    run("sha256sum", "--check", "SHA256SUMS", cwd=tmp_path / "one" / "dist")
    signers = tmp_path / "signers"
    signers.write_text(f"tiphys {key.with_suffix('.pub').read_text()}")
    verify = "ssh-keygen -Y verify -f ../../signers -I tiphys -n tiphys-release -s SHA256SUMS.sig < SHA256SUMS"
    run("sh", "-c", verify, cwd=tmp_path / "one" / "dist")

    images = first["images.txt"].decode().splitlines()
    assert [image.partition("@sha256:")[0] for image in images] == [
        f"registry.example.com/team/{name}" for name in ("tiphys", "tiphys-trainer")
    ]
    calls = (docker.parent / "calls").read_text()
    assert calls.count("--platform linux/amd64,linux/arm64") == 4
    [chart] = (tmp_path / "one" / "dist").glob("*.tgz")
    with tarfile.open(chart) as archive:
        values = archive.extractfile("tiphys/values.yaml")
        assert values is not None
        pinned = yaml.safe_load(values)["image"]
    assert f"{pinned['repository']}@{pinned['digest']}" == images[0]
    assert "boto3==" in first["tiphys-trainer.requirements.txt"].decode()
    assert "--hash=sha256:" in first["desk.requirements.txt"].decode()

    # The Python of a desk has pip, and that of this environment need not.
    outside = [folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.startswith(sys.prefix)]
    monkeypatch.setenv("PATH", os.pathsep.join(outside))
    for command in commands_of_a_desk():
        run("bash", "-euc", command, cwd=tmp_path / "one" / "dist")
    finished = subprocess.run(
        [tmp_path / "one/dist/tiphys/bin/tiphys", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={name: value for name, value in os.environ.items() if not name.startswith(("TIPHYS_", "PYTHON"))},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "bit-identical" in finished.stdout + finished.stderr
