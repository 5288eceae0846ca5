"""Packages a release into a folder: ``python -m runner.dist [FOLDER]``, with ``tests`` on PYTHONPATH.

The folder gets wheel, source archive, chart, release notes, and for each image and the desk the list of its
packages (CycloneDX) and the same as requirements with hashes, by which `pip download` mirrors them; and the
SHA-256 of all of them. The same commit gives the same bytes: times are those of the commit, and nothing random
is left.

``--repository`` also has Docker build the images for both architectures and push them; their digests are then in
``images.txt`` and in the chart. ``--key`` signs the sums with a key of OpenSSH. What is left out without them is
said, and ``--release`` refuses to leave anything out.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.images.recipe import recipes

ROOT = Path(__file__).parents[2]
CHART = "charts/tiphys"
SUMS = "SHA256SUMS"
PLATFORMS = "linux/amd64,linux/arm64"
DESK = "desk"
NAMESPACE = "tiphys-release"
"""Purpose that the signature names, so that none for another purpose passes for it (OpenSSH, PROTOCOL.sshsig)."""

CHECK_AND_INSTALL = """
### Check and install

The public key, `tiphys-release.pub`, comes by another way than these files. The pages are in `docs/` of the source
archive.

```
echo "tiphys $(cat tiphys-release.pub)" > signers
ssh-keygen -Y verify -f signers -I tiphys -n tiphys-release -s SHA256SUMS.sig < SHA256SUMS
sha256sum --check SHA256SUMS
python3 -m venv tiphys
tiphys/bin/python -m pip install --quiet --require-hashes --only-binary :all: --requirement desk.requirements.txt
tiphys/bin/python -m pip install --quiet --no-index --no-deps ./tiphys-VERSION-py3-none-any.whl
tiphys/bin/tiphys demo
```
"""
"""End of ``RELEASE.md``, for those who have nothing but the files."""


def main(folder: Path, *, repository: str = "", key: str = "", is_release: bool = False) -> None:
    """Replace ``folder`` by the files of a release of the present commit.

    Raises:
        SystemExit: files differ from the commit, so that it would not give the same release again; or ``is_release``
            and something is missing.
    """
    if changed := _run("git", "status", "--porcelain"):
        raise SystemExit(f"dist: commit or remove these first, because a release is that of a commit:\n{changed}")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    tags = _run("git", "tag", "--points-at", "HEAD").split()
    missing = list(find_missing(changelog, version, tags, repository=repository, key=key))
    if missing and is_release:
        raise SystemExit("dist: this would be no complete release:\n" + "".join(f"- {line}\n" for line in missing))
    uv = os.environ.get("UV") or "uv"
    epoch = int(_run("git", "log", "-1", "--format=%ct"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run(uv, "build", "--quiet", "--out-dir", str(folder), environ={"SOURCE_DATE_EPOCH": str(epoch)})
    (folder / ".gitignore").unlink(missing_ok=True)
    install = CHECK_AND_INSTALL.replace("VERSION", version)
    (folder / "RELEASE.md").write_text(read_release_notes(changelog, version) + install)
    for name, extras in {**{recipe.name: recipe.extras for recipe in recipes().values()}, DESK: ["all"]}.items():
        export = [uv, "export", "--quiet", "--locked", "--no-dev", "--preview-features", "sbom-export", "--format"]
        chosen = [part for extra in extras for part in ("--extra", extra)]
        packages = json.loads(_run(*export, "cyclonedx1.5", *chosen))
        (folder / f"{name}.cdx.json").write_text(stable_packages(packages, epoch))
        requirements = _run(*export, "requirements.txt", "--no-header", "--no-emit-project", *chosen)
        (folder / f"{name}.requirements.txt").write_text(requirements)
    images = {name: _push_image(repository, name, version, epoch) for name in recipes()} if repository else {}
    if images:
        (folder / "images.txt").write_text("".join(f"{image}\n" for image in images.values()))
    tracked = _run("git", "ls-files", "-z", CHART).split("\0")[:-1]
    chart = {name.removeprefix("charts/"): (ROOT / name).read_bytes() for name in tracked}
    chart["tiphys/values.yaml"] = pin_image(chart["tiphys/values.yaml"].decode(), images.get("tiphys", "")).encode()
    (folder / f"tiphys-{version}.tgz").write_bytes(pack(chart, epoch))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / SUMS).write_text(sums)
    if key:
        signing = ("ssh-keygen", "-q", "-Y", "sign", "-f", str(Path(key).absolute()), "-n", NAMESPACE)
        _run(*signing, str(folder.absolute() / SUMS))
    sys.stdout.write(sums)
    sys.stderr.writelines(f"dist: left out: {line}\n" for line in missing)


def find_missing(changelog: str, version: str, tags: Collection[str], *, repository: str, key: str) -> Iterator[str]:
    """What a complete release of a commit with ``tags`` would lack, each with its remedy."""
    if f"## [{version}]" not in changelog:
        yield f"release notes of {version}: CHANGELOG.md has no section [{version}], so those of [Unreleased] are taken"
    if f"v{version}" not in tags:
        yield f"the tag, by which later versions find this one: `git tag v{version}` on this commit"
    if not repository:
        yield (
            "images.txt, and the digest of the image in the chart: give REPOSITORY=registry.example.com/team, to which "
            "Docker pushes the images"
        )
    elif not shutil.which("docker") or subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode:
        raise SystemExit("dist: REPOSITORY is given, and `docker buildx`, which builds and pushes images, is not here")
    if not key:
        yield f"{SUMS}.sig: give KEY=FILE, a private key of OpenSSH; `ssh-keygen -t ed25519 -f FILE` makes one"
    elif not Path(key).is_file():
        raise SystemExit(f"dist: KEY={key} is no file; `ssh-keygen -t ed25519 -f {key}` makes a key")


def read_release_notes(changelog: str, version: str) -> str:
    """The section of ``version`` in the changelog, or that of what is not released yet."""
    sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    titles = (f"## [{version}]", "## [Unreleased]")
    found = (section for title in titles for section in sections if section.startswith(title))
    text = next(found, "").partition("\n")[2].strip()
    if not text:
        raise SystemExit(f"dist: CHANGELOG.md says nothing about {version}; write what a user notices")
    return f"# Tiphys {version}\n\n{text}\n"


def pin_image(values: str, image: str) -> str:
    """The values of the chart with ``image``, a repository with a digest, as its image; unchanged without one."""
    repository, _, digest = image.partition("@")
    head, marker, rest = values.partition("\nimage:\n")
    for field, value in (("repository", repository), ("digest", digest)):
        rest = rest.replace(f'  {field}: ""\n', f'  {field}: "{value}"\n', 1)
    return head + marker + rest


def _push_image(repository: str, name: str, version: str, epoch: int) -> str:
    """Build an image for all platforms and push it; its repository with the digest of the index."""
    image, revision = f"{repository.rstrip('/')}/{name}", _run("git", "rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.json"
        _run(
            *("docker", "buildx", "build", "--platform", PLATFORMS, "--provenance=false"),
            *("--file", recipes()[name].dockerfile, "--tag", f"{image}:{version}"),
            *("--build-arg", f"VERSION={version}", "--build-arg", f"REVISION={revision}"),
            *("--build-arg", f"SOURCE_DATE_EPOCH={epoch}", "--output", "type=image,push=true,rewrite-timestamp=true"),
            *("--metadata-file", str(metadata), "."),
        )
        return f"{image}@{json.loads(metadata.read_text())['containerimage.digest']}"


def pack(files: Mapping[str, bytes], epoch: int) -> bytes:
    """A gzipped tar archive of ``files`` by name, which depends on nothing else but the time ``epoch``."""
    packed = io.BytesIO()
    # Without a time and a file name in the header of gzip.
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(files[name]), epoch, 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return packed.getvalue()


def stable_packages(document: dict[str, Any], epoch: int) -> str:
    """A list of packages without a random number and the time of its making."""
    moment = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    content = {key: value for key, value in document.items() if key != "serialNumber"}
    content["metadata"] = {**content.get("metadata", {}), "timestamp": moment}
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return json.dumps({**content, "serialNumber": f"urn:uuid:{digest}"}, indent=2, sort_keys=True) + "\n"


def _run(*command: str, environ: Mapping[str, str] | None = None) -> str:
    environment = {**os.environ, **(environ or {})}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="package a release of the present commit")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--repository", default="", help="where Docker pushes the images: registry.example.com/team")
    parser.add_argument("--key", default="", help="private key of OpenSSH that signs the sums")
    parser.add_argument("--release", action="store_true", help="refuse to leave anything out")
    given = parser.parse_args()
    main(given.folder, repository=given.repository, key=given.key, is_release=given.release)
