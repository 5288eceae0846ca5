"""An image is a few tar files and two JSON texts: what `docker save` writes, written without Docker."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(target: Path, reference: str, layers: Sequence[Path], config: dict[str, Any]) -> None:
    """Write an archive that `ctr images import` and `docker load` take. `config` is the image's, as OCI names it."""
    digests = [_sha256(layer) for layer in layers]
    description = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{} for _ in digests],
    }
    blob = json.dumps(description).encode()
    name = hashlib.sha256(blob).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}.tar" for digest in digests]}]
    new = target.with_name(f".{target.name}.new")
    with tarfile.open(new, "w") as archive:
        for layer, digest in zip(layers, digests, strict=True):
            archive.add(layer, arcname=f"{digest}.tar")
        for member, data in ((name, blob), ("manifest.json", json.dumps(manifest).encode())):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    new.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
