"""The paths that a step declares: how they become its own on a machine that has one file system for all.

Inputs, outputs, volumes and the folder of `tiphys-exec` belong to the step, as in a
container. Where the kernel allows it, the program gets a mount namespace with them
(`plan_mounts`). Elsewhere the paths are replaced in the command, the arguments, the
environment and the source (`PathMapping.rewrite_paths`), and a path that none of
these names is refused.
"""

import functools
import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hera_pipelines.local.pods import mount_namespace
from tiphys.protocol.compiled_workflow import Manifest

NAMESPACE_VARIABLE = "TIPHYS_LOCAL_NAMESPACE"
"""``off`` makes the local engine replace paths also where it could mount them."""

_EXEC_PROGRAMS = ("tiphys-exec", "tiphys.checkpoint.exec")
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")


@dataclass(frozen=True)
class PathMapping:
    """Maps declared paths of a container to paths on this machine."""

    root: Path
    mounts: Mapping[str, Path]
    """Folder of each mounted volume, by mount path."""
    paths: tuple[str, ...]
    """Every declared path, volumes included."""
    protected_text: str = ""
    """Text that is never rewritten: the URL of the store, which is a path on this machine already."""

    def host_path(self, path: str) -> Path:
        """Path on this machine of a declared path."""
        declared = PurePosixPath(path)
        for mount in sorted(self.mounts, key=len, reverse=True):
            if declared.is_relative_to(mount):
                return self.mounts[mount] / declared.relative_to(mount)
        return self.root / declared.relative_to("/")

    def rewrite_paths(self, text: str) -> str:
        """Replace every declared path in ``text``, longest first, as whole path components."""
        if not self.paths:
            return text
        pattern = _path_pattern(self.paths, self.protected_text)
        return pattern.sub(lambda match: str(self.host_path(match["path"])) if match["path"] else match[0], text)


def _path_pattern(paths: Collection[str], protected_text: str = "") -> re.Pattern[str]:
    choices = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    protected = f"{re.escape(protected_text)}|" if protected_text else ""
    return re.compile(rf"{protected}(?:(?<![\w./-])|(?<=file://))(?P<path>{choices})(?![\w.-])")


class Mount(NamedTuple):
    """One mount of a namespace; ``is_machine`` if it shows an entry of this machine beside a path of the step."""

    source: str
    target: str
    is_machine: bool = False


def plan_mounts(mapping: PathMapping, views: Sequence[str]) -> list[Mount]:
    """Mounts, in order, that make the declared paths the step's own and leave the rest to this machine.

    A path that does not exist cannot be mounted over. So the folder around each
    declared path (the nearest that exists) is a folder of the step, in which the
    machine's other entries are mounted. A volume needs that only if no folder
    exists at its path. ``views`` are the `folder_views`; the first target is ``/``.
    """
    mounts = [Mount(str(mapping.root) if "/" in views else "/", "/")]
    for view in views:
        if view != "/" and posixpath.dirname(view) not in views:
            mounts.append(Mount(str(mapping.root) + view, view))
        paths = sorted(map(str, Path(view).iterdir()))
        mounts += [Mount(path, path, True) for path in paths if not any(_is_below(own, path) for own in mapping.paths)]
    return mounts + [Mount(str(folder.resolve()), path) for path, folder in sorted(mapping.mounts.items())]


def folder_views(mapping: PathMapping) -> list[str]:
    """Folders of this machine that are rebuilt as folders of the step, outer ones first."""
    outermost = [path for path in mapping.paths if not any(_is_below(path, other, True) for other in mapping.paths)]
    covered = {path for path in mapping.mounts if _is_real_folder(path)}
    around = {path: [*map(str, PurePosixPath(path).parents)] for path in outermost}
    nearest = {next(filter(_is_real_folder, around[path])) for path in outermost if path not in covered}
    folders = {folder for path in outermost for folder in around[path] if Path(folder).is_dir()}
    return sorted(folder for folder in folders if any(_is_below(folder, view) for view in nearest))


def find_conflict(mapping: PathMapping, read: Collection[Path], written: Collection[Path]) -> tuple[str, str] | None:
    """Declared path that would hide a path that the step needs, and that path; None if no path does.

    A folder that the step writes, such as the store, may contain no declared path either.
    """
    for own in mapping.paths:
        for needed in (*read, *written):
            for path in {str(needed), os.path.realpath(needed)}:
                if _is_below(path, own) or (needed in written and _is_below(own, path)):
                    return own, path
    return None


def write_plan(mounts: Sequence[Mount], new_root: Path, plan: Path) -> None:
    """Write ``mounts`` for `mount_namespace`, which builds them below the folder ``new_root``."""
    fields = [os.fsencode(new_root)]
    for mount in mounts:
        kind = mount_namespace.MACHINE if mount.is_machine else mount_namespace.OWN
        fields += [kind, os.fsencode(mount.source), os.fsencode(mount.target)]
    new_root.mkdir(exist_ok=True)
    plan.write_bytes(b"\0".join(fields))


def namespace_refusal() -> str:
    """Why this machine gives a step no mount namespace; empty if it does."""
    return f"{NAMESPACE_VARIABLE}=off" if os.environ.get(NAMESPACE_VARIABLE) == "off" else _try_namespace()


@functools.cache
def _try_namespace() -> str:
    with tempfile.TemporaryDirectory(prefix="tiphys-namespace-") as name:
        folder = Path(name)
        mapping = PathMapping(folder / "root", {}, ("/tiphys-namespace/path",))
        (folder / "root").mkdir()
        write_plan(plan_mounts(mapping, folder_views(mapping)), folder / "namespace", folder / "plan")
        program = [sys.executable, "-I", "-S", str(mount_namespace.__file__), str(folder / "plan")]
        return subprocess.run(program, check=False, stderr=subprocess.PIPE, text=True).stderr.strip()


def _is_below(path: str, folder: str, strictly: bool = False) -> bool:
    return PurePosixPath(path).is_relative_to(folder) and not (strictly and path == folder)


def _is_real_folder(path: str) -> bool:
    return Path(path).is_dir() and os.path.realpath(path) == path


def declared_paths(template: Manifest) -> Iterator[tuple[str, str]]:
    """Yield a description and the path of every path that a template declares."""
    inputs, outputs = template.get("inputs") or {}, template.get("outputs") or {}
    for artifact in inputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"input artifact {artifact['name']}", normalize_path(artifact["path"])
    for artifact in outputs.get("artifacts") or []:
        if "path" in artifact:
            yield f"output artifact {artifact['name']}", normalize_path(artifact["path"])
    for parameter in outputs.get("parameters") or []:
        if "path" in (parameter.get("valueFrom") or {}):
            yield f"output parameter {parameter['name']}", normalize_path(parameter["valueFrom"]["path"])
    for mount in container_or_script(template).get("volumeMounts") or []:
        yield f"volume {mount['name']}", normalize_path(mount["mountPath"])
    for folder in _checkpoint_folders(container_or_script(template)):
        yield "--dir of tiphys-exec", normalize_path(folder)


def _checkpoint_folders(program: Manifest) -> Iterator[str]:
    """Yield each absolute ``--dir`` of a `tiphys-exec` in the command, or in a text of a shell."""
    variables = {variable["name"]: str(variable.get("value", "")) for variable in program.get("env") or []}
    arguments = [*program.get("command", []), *(program.get("args") or [])]
    for words in [arguments, *map(_split_words, [*arguments, program.get("source") or ""])]:
        for position, word in enumerate(words):
            if posixpath.basename(word) in _EXEC_PROGRAMS:
                options = list(takewhile(lambda option: option != "--", words[position + 1 :]))
                joined = [option.removeprefix("--dir=") for option in options if option.startswith("--dir=")]
                after = [value for option, value in pairwise(options) if option == "--dir"]
                for folder in joined + after:
                    value = _REFERENCE.sub(lambda match: variables.get(match[match.lastindex or 0], match[0]), folder)
                    if value.startswith("/"):
                        yield value


def _split_words(text: str) -> list[str]:
    if not any(program in text for program in _EXEC_PROGRAMS):
        return []
    try:
        return shlex.split(text)
    except ValueError:  # no text of a shell, or one with a here-document
        return [word.strip("\"'") for word in text.split()]


def container_or_script(template: Manifest) -> Manifest:
    """The container or script of a template; empty for other types."""
    program: Manifest = template.get("container") or template.get("script") or {}
    return program


def unmentioned_paths(template: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the declared paths that no text of the program names, nor a declared folder around them."""
    program = container_or_script(template)
    values = [str(variable.get("value", "")) for variable in program.get("env") or []]
    texts = [*program.get("command", []), *(program.get("args") or []), *values, program.get("source", "")]
    declared = dict.fromkeys(declared_paths(template))
    named = {path for _, path in declared if _path_pattern([path]).search("\0".join(texts))}
    yield from (found for found in declared if not any(_is_below(found[1], path) for path in named))


def normalize_path(path: str) -> str:
    """Return ``path`` without a trailing slash, double slashes and dots."""
    return "/" + posixpath.normpath(path).lstrip("/") if path.startswith("/") else path.rstrip("/")
