"""Where the absolute paths of a container lie on this machine.

Every attempt gets a folder of its own. A path that the template declares (an
artifact, an output, a mounted volume) is moved below it, and replaced wherever
it stands in the command, the arguments, the environment or the source. A
program that has such a path built in cannot be redirected this way, so `check`
refuses it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tiphys.protocol.pipeline import Manifest

_BEFORE = r"(?:(?<![\w./-])|(?<=file://))"
_AFTER = r"(?![\w.-])"


@dataclass(frozen=True)
class Layout:
    """Maps declared paths to real ones."""

    root: Path
    mounts: Mapping[str, Path]
    """Where each mounted volume lies."""
    paths: tuple[str, ...]
    """Every declared path, volumes included."""
    keep: str = ""
    """Text that is never touched: the URL of the store, which lies where it lies."""

    def real(self, path: str) -> Path:
        """Where a declared path lies here."""
        declared = PurePosixPath(path)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if declared.is_relative_to(mount):
                return self.mounts[mount] / declared.relative_to(mount)
        return self.root / declared.relative_to("/")

    def rewrite(self, text: str) -> str:
        """``text`` with every declared path replaced, longest first, whole path parts only."""
        if not self.paths:
            return text
        choices = "|".join(re.escape(path) for path in sorted(self.paths, key=len, reverse=True))
        kept = f"{re.escape(self.keep)}|" if self.keep else ""
        found = re.compile(f"{kept}{_BEFORE}(?P<path>{choices}){_AFTER}")
        return found.sub(lambda match: str(self.real(match["path"])) if match["path"] else match[0], text)


def declared_paths(template: Manifest) -> Iterator[tuple[str, str]]:
    """(what it is, path) of every path that a template declares."""
    inputs, outputs = template.get("inputs") or {}, template.get("outputs") or {}
    for artifact in inputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"input artifact {artifact['name']}", normal(artifact["path"])
    for artifact in outputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"output artifact {artifact['name']}", normal(artifact["path"])
    for parameter in outputs.get("parameters") or []:
        if "path" in (parameter.get("valueFrom") or {}):
            yield f"output parameter {parameter['name']}", normal(parameter["valueFrom"]["path"])
    for mount in program_of(template).get("volumeMounts") or []:
        yield f"volume {mount['name']}", normal(mount["mountPath"])


def program_of(template: Manifest) -> Manifest:
    """The container or script of a template."""
    program: Manifest = template.get("container") or template.get("script") or {}
    return program


def texts_of(template: Manifest) -> list[str]:
    """Every text of the program in which a path may stand."""
    program = program_of(template)
    values = [str(variable.get("value", "")) for variable in program.get("env") or []]
    return [*program.get("command", []), *program.get("args", []), *values, program.get("source", "")]


def mentions(text: str, path: str) -> bool:
    """Whether ``path`` stands in ``text`` as a whole path."""
    return re.search(f"{_BEFORE}{re.escape(path)}{_AFTER}", text) is not None


def normal(path: str) -> str:
    """``path`` without a final slash."""
    return path.rstrip("/") or "/"
