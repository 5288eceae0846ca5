"""Gathers what a checkpoint was made with: code, data position, versions and world size.

After a resume with other code, data or versions a loss curve can bend, and weeks
later the manifest is the only record of the cause. Gathering imports no package
and caches every lookup, so that a save does not wait for it.
"""

import functools
import importlib.metadata
import math
import platform
import sys
from collections.abc import Mapping
from typing import Any

from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.records import Provenance

PACKAGES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "flax": "flax",
    "jax": "jax",
    "lightning": "lightning",
    "numpy": "numpy",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "peft": "peft",
    "pytorch_lightning": "pytorch-lightning",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow",
    "tiphys": "tiphys",
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "xgboost": "xgboost",
}
"""Modules whose version can change the result of a training, and the packages that contain them."""

_COMMIT_VARIABLES = (environment.GIT_COMMIT, "GIT_COMMIT", "SOURCE_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
"""Variables of the Git commit by priority: the one that compile sets, then those that image builders set."""


def gather_provenance(
    environ: Mapping[str, str],
    *,
    epoch: int | None = None,
    data_position: Mapping[str, Any] | None = None,
    world_size: int | None = None,
) -> Provenance:
    """Return the provenance of a save; takes microseconds after the first call.

    Without ``world_size`` it is the launcher's ``WORLD_SIZE``.

    Raises:
        UsageError: ``epoch`` or ``data_position`` contains other values than numbers and text.
    """
    return Provenance(
        epoch=_check_epoch(epoch),
        data_position={str(name): _plain_position(name, value) for name, value in (data_position or {}).items()},
        world_size=world_size if world_size is not None else _launcher_world_size(environ),
        git_commit=next((environ[name] for name in _COMMIT_VARIABLES if environ.get(name)), ""),
        image=environ.get(environment.IMAGE, ""),
        versions=package_versions(),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of those `PACKAGES` that are imported."""
    loaded = {package: _package_version(package) for module, package in PACKAGES.items() if module in sys.modules}
    return {"python": platform.python_version(), **{name: version for name, version in loaded.items() if version}}


@functools.cache
def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""  # the module of this name belongs to no package


def _check_epoch(epoch: Any) -> int | None:
    if epoch is None:
        return None
    plain = _python_scalar(epoch)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise UsageError(f"epoch {epoch!r} is not a whole number; pass the number of the epoch, or omit it")
    return plain


def _plain_position(name: Any, value: Any) -> int | float | str:
    plain = _python_scalar(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    if isinstance(plain, int | float | str):
        return plain
    raise UsageError(
        f"data_position[{name!r}] is a {type(value).__name__}; pass numbers and text, such as "
        '{"epoch": 3, "sample": 51200}, and put larger values into the state'
    )


def _python_scalar(value: Any) -> Any:
    """Convert a scalar of NumPy or PyTorch to Python."""
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1 else value


def _launcher_world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else 1
