"""The versions of Argo that ``tests/argo`` passed on: its runs write them, and the installation guide shows them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.checks.chart import ROOT

GUIDE = ROOT / "docs" / "install.md"
VERSIONS = ROOT / "tests" / "argo" / "versions.json"
_BEGIN, _END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"

Versions = dict[str, dict[str, dict[str, dict[str, int]]]]
"""Number of tests by version of Argo, mode, module of tests, and outcome: ``passed`` or ``skipped``."""


class ModeOutcome(NamedTuple):
    """How a test ended: its module, the mode of the cluster, and ``passed``, ``skipped`` or ``failed``."""

    mode: str
    module: str
    outcome: str


def read_versions(file: Path) -> Versions:
    """The versions in ``file``; none without a file."""
    versions: Versions = json.loads(file.read_text()) if file.exists() else {}
    return versions


def add_outcomes(versions: Versions, version: str, outcomes: Mapping[ModeOutcome, int]) -> Versions:
    """``versions`` with the outcomes of one more run, without other patches of the same minor version.

    The modules of the run replace their earlier outcomes. A module with a failed test is left out.
    """
    minor = version.rpartition(".")[0]
    kept = {one: modes for one, modes in versions.items() if one == version or one.rpartition(".")[0] != minor}
    modes = {mode: dict(modules) for mode, modules in kept.get(version, {}).items()}
    for mode, module in sorted({(one.mode, one.module) for one in outcomes}):
        counts = {name: outcomes.get(ModeOutcome(mode, module, name), 0) for name in ("passed", "skipped", "failed")}
        modules = modes.setdefault(mode, {})
        modules.pop(module, None)
        if not counts.pop("failed") and counts["passed"]:
            modules[module] = counts
    passed = {mode: modules for mode, modules in sorted(modes.items()) if modules}
    return {one: modes for one, modes in {**kept, version: passed}.items() if modes}


def write_versions(file: Path, versions: Versions) -> None:
    """Write ``versions``, sorted."""
    file.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


def versions_table(versions: Versions) -> str:
    """The table of the guide, the newest version first."""
    rows = ["| Argo Workflows | mode | passed | skipped | tests |", "|---|---|---|---|---|"]
    for version in sorted(versions, key=lambda one: [int(part) for part in one.split(".")], reverse=True):
        for mode, modules in sorted(versions[version].items(), reverse=True):
            passed, skipped = (sum(counts[name] for counts in modules.values()) for name in ("passed", "skipped"))
            names = ", ".join(f"`{name.removeprefix('test_')}`" for name in sorted(modules))
            rows.append(f"| {version} | `{mode}` | {passed} | {skipped} | {names} |")
    return "\n".join(rows) + "\n"


def guide_with_versions(versions: Versions) -> str:
    """The text of the guide with the table of ``versions`` in its place."""
    before, _, rest = GUIDE.read_text().partition(_BEGIN)
    return before + _BEGIN + "\n" + versions_table(versions) + "\n" + _END + rest.partition(_END)[2]
