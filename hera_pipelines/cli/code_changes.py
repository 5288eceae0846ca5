"""Going on with other code or parameters: what `resume` and `fork` share."""

import difflib
import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from tiphys_controller import Change, Difference, in_words

from hera_pipelines.cli.progress.local import remember_code
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import load, parse, require_values, with_parameters
from hera_pipelines.compile.output import commit_of, record_code_version
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, parameters_of
from tiphys.protocol.drift_policy import Drift, DriftAction
from tiphys.store import Store, current_workflow

FromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="STEP",
        help="Run this step again although it is done, and all that hang on it; may be repeated.",
    ),
]
FileArgument = Annotated[
    Path | None, typer.Argument(metavar="[PIPELINE.py]", help="Go on with this file in place of what was submitted.")
]
DriftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drift",
        metavar="CLASS=ACTION",
        help=f"What to do about a change, in place of what the pipeline says. Classes: {', '.join(Drift)}; "
        f"actions: {', '.join(DriftAction)}; may be repeated.",
    ),
]

_CONTEXT_LINES = 1
_MOST_LINES = 40


@dataclass(frozen=True)
class Edits:
    """What is to be other than before, as it was asked for on the command line."""

    file: Path | None = None
    which: str | None = None
    parameters: Sequence[str] = ()
    drift: Sequence[str] = ()
    executor_plugin: Path | None = None
    here: bool = True
    """Whether the programs will run on this machine, with what is installed here."""

    def of(self, store: Store, run: str) -> Change:
        """What to go on with.

        Parameters of the run stay in force for a changed file, as far as it has them.

        Raises:
            UsageError: the file defines no such pipeline, or there is no such parameter, class or action.
        """
        given, actions = parse(self.parameters), _actions(self.drift)
        found = installed if self.here else None
        if self.file is None and not given:
            return Change(None, actions, found)
        before = current_workflow(store, run)
        if self.file is None:
            return Change(with_parameters(before, given), actions, found)
        return Change(self._from_file(self.file, store, before, given), actions, found)

    def _from_file(self, file: Path, store: Store, before: Manifest, given: dict[str, str]) -> Manifest:
        from hera_pipelines import CronPipeline  # imports Hera, for which no other command should wait

        pipeline = load(file, self.which)
        make = pipeline.workflow if isinstance(pipeline, CronPipeline) else pipeline.compile
        manifest = make(store=store.url, executor_plugin=self.executor_plugin)
        kept = {name: value for name, value in parameters_of(before).items() if name in parameters_of(manifest)}
        ours = {name: value for name, value in kept.items() if not name.startswith("tiphys-")}
        manifest = with_parameters(manifest, {**ours, **given})
        require_values(manifest)
        record_code_version(manifest, commit_of(file.parent))
        remember_code(manifest, file.parent)
        if account := before["spec"].get("serviceAccountName"):
            manifest["spec"].setdefault("serviceAccountName", account)
        return manifest


def installed(package: str) -> str:
    """The version of a package on this machine, or of ``python``; empty where there is none."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show_drift(screen: Screen, found: Sequence[Difference]) -> None:
    """Tell every difference on stderr, with the lines that differ where it is one of source code."""
    for one in found:
        screen.note(f"{one.action}: {in_words(one)}")
        if "\n" in one.before + one.after:
            for line in _lines(one):
                screen.note(f"  {line}")


def _lines(one: Difference) -> list[str]:
    texts = (one.before.splitlines(), one.after.splitlines())
    lines = list(difflib.unified_diff(*texts, lineterm="", n=_CONTEXT_LINES))[2:]
    left = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"… and {left} more lines"] if left > 0 else lines


def _actions(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, action = text.partition("=")
        if not equals:
            raise UsageError(f"drift {text!r} is not CLASS=ACTION; write, for example, --drift image=warn")
        found[name.replace("-", "_")] = action
    return found
