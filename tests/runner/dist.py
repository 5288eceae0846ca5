"""Packages a release into a folder: ``python -m runner.dist [FOLDER]``, with ``tests`` on PYTHONPATH.

The folder gets wheel, source archive, chart, a list of packages (CycloneDX) of
each image and of the desk, and the SHA-256 of all of them. The same commit gives
the same bytes: times are those of the commit, and nothing random is left.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = "charts/tiphys"
SUMS = "SHA256SUMS"
EXTRAS = {"tiphys": ("plugin", "controller", "cluster", "ui"), "tiphys-trainer": ("numpy",), "desk": ("all",)}
"""Optional dependencies in each list of packages: those of the two images, and of a desk."""


def main(folder: Path) -> None:
    """Replace ``folder`` by the files of a release of the present commit.

    Raises:
        SystemExit: files differ from the commit, so that it would not give the same release again.
    """
    if changed := _run("git", "status", "--porcelain"):
        raise SystemExit(f"dist: commit or remove these first, because a release is that of a commit:\n{changed}")
    uv = os.environ.get("UV") or "uv"
    epoch = int(_run("git", "log", "-1", "--format=%ct"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    _run(uv, "build", "--quiet", "--out-dir", str(folder), environ=environ)
    (folder / ".gitignore").unlink(missing_ok=True)
    tracked = _run("git", "ls-files", "-z", CHART).split("\0")[:-1]
    version = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())["version"]
    (folder / f"tiphys-{version}.tgz").write_bytes(
        pack({name.removeprefix("charts/"): (ROOT / name).read_bytes() for name in tracked}, epoch)
    )
    for name, extras in EXTRAS.items():
        options = [part for extra in extras for part in ("--extra", extra)]
        exported = _run(
            *(uv, "export", "--quiet", "--locked", "--no-dev", "--preview-features", "sbom-export"),
            *("--format", "cyclonedx1.5", *options),
        )
        (folder / f"{name}.cdx.json").write_text(stable_packages(json.loads(exported), epoch))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (folder / SUMS).write_text(sums)
    sys.stdout.write(sums)


def pack(files: dict[str, bytes], epoch: int) -> bytes:
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


def _run(*command: str, environ: dict[str, str] | None = None) -> str:
    return subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist"))
