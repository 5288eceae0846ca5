"""What a checkpoint was made with, gathered where it is made.

After a resume under other code, data or versions a loss curve can bend, and
weeks later nobody remembers why. The manifest does. Nothing is imported for it
and nothing is asked twice, so that a save does not wait for it.
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
from tiphys.records import AttemptClaim, Facts

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
"""Modules whose version can change what a training computes, and the packages that they come from."""

_COMMIT_VARIABLES = (environment.GIT_COMMIT, "GIT_COMMIT", "SOURCE_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
"""Where the commit is found, first one first: what compile gives, then what builders of images leave in them."""


def gather(
    environ: Mapping[str, str],
    *,
    epoch: int | None = None,
    data_position: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    claim: AttemptClaim | None = None,
) -> Facts:
    """The facts of a save that is being made now; costs microseconds after the first time.

    ``world_size`` is that of the launcher (``WORLD_SIZE``) where it is None.
    ``claim`` is the attempt's own, which knows its parameters and its data.

    Raises:
        UsageError: ``epoch`` or ``data_position`` is not made of numbers and text.
    """
    return Facts(
        epoch=_epoch(epoch),
        data_position={str(name): _plain(name, value) for name, value in (data_position or {}).items()},
        world_size=world_size if world_size is not None else _world_size(environ),
        git_commit=next((environ[name] for name in _COMMIT_VARIABLES if environ.get(name)), ""),
        image=environ.get(environment.IMAGE, ""),
        dataset=claim.dataset if claim else "",
        parameters=claim.parameters if claim else "",
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are loaded by now."""
    loaded = {package: _version(package) for module, package in PACKAGES.items() if module in sys.modules}
    return {"python": platform.python_version(), **{name: version for name, version in loaded.items() if version}}


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""  # a module of that name which no package brought


def _epoch(epoch: Any) -> int | None:
    if epoch is None:
        return None
    plain = _scalar(epoch)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise UsageError(f"epoch {epoch!r} is not a whole number; give the number of the epoch, or leave it out")
    return plain


def _plain(name: Any, value: Any) -> int | float | str:
    plain = _scalar(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    if isinstance(plain, int | float | str):
        return plain
    raise UsageError(
        f"data_position[{name!r}] is a {type(value).__name__}; give numbers and text, such as "
        '{"epoch": 3, "sample": 51200}, and put larger things into the state'
    )


def _scalar(value: Any) -> Any:
    """The Python form of a scalar of NumPy or PyTorch."""
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1 else value


def _world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else 1
