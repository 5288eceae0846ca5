"""What ``uv.lock`` says."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@cache
def read_lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text())


def locked_packages(extras: list[str]) -> set[str]:
    """Names of the packages that uv installs for these extras of Tiphys, without those for tests."""
    locked = {one["name"]: one for one in read_lock()["package"]}
    found: set[tuple[str, str]] = set()
    pending = [("tiphys", ""), *(("tiphys", extra) for extra in extras)]
    while pending:
        name, extra = key = pending.pop()
        if key in found:
            continue
        found.add(key)
        package: dict[str, Any] = locked[name]
        for needed in (
            package.get("optional-dependencies", {}).get(extra, []) if extra else package.get("dependencies", [])
        ):
            pending += [(needed["name"], ""), *((needed["name"], one) for one in needed.get("extra", []))]
    return {name for name, _ in found}
