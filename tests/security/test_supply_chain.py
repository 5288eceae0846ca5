"""What gets into an image is what was locked, and somebody looks up what is known about it.

| what | outcome |
|---|---|
| a dependency without an upper bound | fails here |
| a locked package from elsewhere, or without a hash | fails here |
| uv, which installs all others | by hash, the locked version |
| the audit where the database cannot be reached | says so and passes |
| the audit where it knows a vulnerability of a locked package | fails |
| the list of packages of an image | what is locked for its extras, with hashes |
| a locked package of an image without a wheel for amd64 or arm64 | fails here |
"""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cluster.images.recipe import recipes
from support.checks.locked_packages import ROOT, locked_packages, read_lock

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools/bin/uv")
"""`uv run` names itself in this variable."""

needs_uv = pytest.mark.skipif(not shutil.which(UV), reason="uv is not installed here; `make test` brings it")


def requirements() -> Iterator[str]:
    yield from PROJECT["build-system"]["requires"]
    yield from PROJECT["project"]["dependencies"]
    for listed in (*PROJECT["project"]["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()):
        yield from (one for one in listed if not one.startswith("tiphys["))


def test_every_dependency_has_an_upper_bound() -> None:
    assert [one for one in requirements() if not re.search(r"<\d", one)] == []


def test_every_locked_package_comes_from_the_index_by_hash() -> None:
    packages = [one for one in read_lock()["package"] if one["name"] != "tiphys"]
    assert {str(one["source"]) for one in packages} == {"{'registry': 'https://pypi.org/simple'}"}
    files = [file for one in packages for file in (*one.get("wheels", ()), *([one["sdist"]] if "sdist" in one else ()))]
    assert len(files) > len(packages)
    assert [file["url"] for file in files if not file.get("hash", "").startswith("sha256:")] == []


def runs_on(wheel: str, machine: str) -> bool:
    """Whether CPython 3.11 on Debian 12 takes the wheel of this file name (PEP 425, PEP 600)."""
    python, abi, platform = (tags.split(".") for tags in wheel.removesuffix(".whl").split("-")[-3:])
    versions = {tag: int(tag[3:] or 0) for tag in python if tag.startswith(("cp3", "py3"))}
    fits = any(tag in ("py3", "py311", "cp311") for tag in versions) or (
        "abi3" in abi and any(version <= 11 for version in versions.values())
    )
    glibc = (re.fullmatch(rf"manylinux_2_(\d+)_{machine}", tag) for tag in platform)
    return fits and ("any" in platform or any(found and int(found[1]) <= 36 for found in glibc))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("image", sorted(recipes()))
def test_an_image_is_built_of_wheels_on_both_architectures(image: str, machine: str) -> None:
    names = locked_packages(recipes()[image].extras) - {"tiphys"}
    assert names
    files: dict[str, list[str]] = {name: [] for name in names}
    for package in read_lock()["package"]:  # of some there are several versions, each for some versions of Python
        for wheel in package.get("wheels", ()) if package["name"] in names else ():
            files[package["name"]].append(wheel["url"].rpartition("/")[2])
    assert sorted(name for name in names if not any(runs_on(file, machine) for file in files[name])) == []


def test_a_wheel_of_another_architecture_or_version_does_not_count() -> None:
    arm = "numpy-2.3-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl"
    assert (runs_on(arm, "aarch64"), runs_on(arm, "x86_64")) == (True, False)
    assert runs_on("x-1-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "x86_64")
    assert runs_on("x-1-py2.py3-none-any.whl", "aarch64")
    assert not runs_on("x-1-cp312-cp312-manylinux_2_17_aarch64.whl", "aarch64")
    assert not runs_on("x-1-cp312-abi3-manylinux_2_17_aarch64.whl", "aarch64")
    assert not runs_on("x-1-cp311-cp311-musllinux_1_2_aarch64.whl", "aarch64")
    assert not runs_on("x-1-cp311-cp311-manylinux_2_39_aarch64.whl", "aarch64")


def test_pip_gets_the_uv_that_is_locked() -> None:
    [locked] = [one for one in read_lock()["package"] if one["name"] == "uv"]
    version, *hashes = (ROOT / "plugin/uv.txt").read_text().replace("\\\n", "").split()
    known = {f"--hash={file['hash']}" for file in (*locked["wheels"], locked["sdist"])}
    assert (version, set(hashes)) == (f"uv=={locked['version']}", known), "run `make lock`"


@pytest.mark.parametrize("file", ["Makefile", "plugin/Dockerfile", "plugin/trainer.Dockerfile"])
def test_pip_installs_by_hash_alone(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if "pip install" in line and "#" not in line]
    assert lines
    assert [line for line in lines if "--require-hashes" not in line] == []


class _Database(BaseHTTPRequestHandler):
    """osv.dev with one entry, for the package that the server names."""

    def do_GET(self) -> None:
        if self.path.startswith("/v1/vulns/"):
            package = {"ecosystem": "PyPI", "name": self.server.vulnerable}  # type: ignore[attr-defined]
            affected = {"package": package, "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}
            self._answer({"id": "OSV-1", "modified": "2026-01-01T00:00:00Z", "summary": "bad", "affected": [affected]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        self.server.asked.extend(one["package"]["name"] for one in queries)  # type: ignore[attr-defined]
        found = [{"id": "OSV-1", "modified": "2026-01-01T00:00:00Z"}]
        vulnerable = self.server.vulnerable  # type: ignore[attr-defined]
        self._answer({"results": [{"vulns": found} if one["package"]["name"] == vulnerable else {} for one in queries]})

    def _answer(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """The test reads the output of the audit."""


@contextmanager
def database(vulnerable: str = "") -> Iterator[tuple[str, list[str]]]:
    """Address of the database, and the packages that it was asked about."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Database) as server:
        server.vulnerable, server.asked = vulnerable, []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    line = ["make", "--no-print-directory", "audit", f"UV={UV}"]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        line, cwd=ROOT, env={**environment, "OSV_URL": url}, capture_output=True, text=True, timeout=240, check=False
    )


@needs_uv
def test_the_audit_fails_for_a_known_vulnerability() -> None:
    with database(vulnerable="jinja2") as (url, asked):
        done = audit(url)
    assert done.returncode != 0
    assert "jinja2" in done.stdout + done.stderr
    assert {"jinja2", "numpy", "pytest", "boto3"} <= set(asked), "runtime and tools alike"


@needs_uv
def test_the_audit_passes_when_nothing_is_known() -> None:
    with database() as (url, asked):
        done = audit(url)
    assert (done.returncode, bool(asked)) == (0, True), done.stderr


@needs_uv
def test_the_audit_says_when_it_could_not_look() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens here, and nobody else can
        done = audit(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert done.returncode == 0
    assert "were not looked up: the database of vulnerabilities" in done.stdout
    assert "make audit" in done.stdout


def test_continuous_integration_runs_the_audit() -> None:
    assert re.search(r"^make audit$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


@needs_uv
def test_an_image_comes_with_the_list_of_its_packages(tmp_path: Path) -> None:
    subprocess.run(
        ["make", "--silent", "sbom", f"UV={UV}", f"SBOM_DIR={tmp_path}"], cwd=ROOT, check=True, capture_output=True
    )
    for recipe in recipes().values():
        listed = json.loads((tmp_path / f"{recipe.name}.cdx.json").read_text())
        assert listed["bomFormat"] == "CycloneDX"
        packages = listed["components"]
        assert {one["name"] for one in packages} == locked_packages(recipe.extras) - {"tiphys"}
        assert all(one["purl"].startswith("pkg:pypi/") and one["version"] for one in packages)
        assert all(file["hashes"] for one in packages for file in one["externalReferences"])
    desk = json.loads((tmp_path / "desk.cdx.json").read_text())
    assert {"hera", "rich", "typer"} <= {one["name"] for one in desk["components"]}


def test_a_finder_of_a_hole_learns_what_to_do() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for word in ("privately", "supported", "make audit", "make sbom"):
        assert word in text
    assert "SECURITY.md" in (ROOT / "README.md").read_text()
