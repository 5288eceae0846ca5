"""What an image holds, as `plugin/images.toml` says it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PYTHON = "python3.11"
HOME = "/opt/tiphys"
"""A virtual environment: programs find it by PATH, and PYTHONPATH stays free for whoever builds upon the image."""
SITE = f"{HOME}/lib/{PYTHON}/site-packages"
ENVIRONMENT = {
    "PATH": f"{HOME}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Recipe:
    name: str
    dockerfile: str
    extras: list[str]
    sources: list[str]
    """Packages of this repository."""
    botocore_services: list[str]
    """Descriptions of services to keep; empty: all."""
    user: str
    entrypoint: list[str]
    command: list[str]
    working_dir: str
    labels: dict[str, str]

    def config(self, revision: str) -> dict[str, Any]:
        """The configuration of the image, as OCI names it."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        labels = {
            **self.labels,
            "org.opencontainers.image.version": project["version"],
            "org.opencontainers.image.revision": revision,
        }
        return {
            "User": self.user,
            "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "Entrypoint": self.entrypoint or None,
            "Cmd": self.command,
            "WorkingDir": self.working_dir,
            "Labels": labels,
        }


def recipes() -> dict[str, Recipe]:
    text = (ROOT / "plugin/images.toml").read_text()
    return {name: Recipe(name=name, **fields) for name, fields in tomllib.loads(text).items()}
