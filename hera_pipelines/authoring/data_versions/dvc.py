"""Reads the hash of an output from ``dvc.lock``, or from a ``.dvc`` file, without DVC.

Both are YAML of a documented form (https://dvc.org/doc/user-guide/project-structure).
Every scalar is read as text, because DVC writes hashes that YAML 1.1 may take for
numbers. What is in the working folder is not looked at: `dvc status` compares it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from hera_pipelines.compile.settings import Dvc
from tiphys.errors import NotFoundError, UsageError, unknown_name_message, yaml_error_message
from tiphys.records import DataVersion

_MAX_BYTES = 4 << 20
"""Some 40,000 outputs, which take ten seconds to parse."""
_SCHEMA = "2.0"
_HASHES = ("md5", "etag", "checksum")
"""Names under which DVC stores a hash; the last two are those of data on S3 and HDFS."""
_DIGEST = {"md5": re.compile(r"[0-9a-f]{32}(\.dir)?")}
_ANY_DIGEST = re.compile(r"[!-z|~]{1,256}")
"""Without braces, which Argo would replace."""
_ALGORITHM = re.compile(r"[a-z0-9-]{1,32}")
_DVC_SUFFIX = ".dvc"
_MAX_DEPTH = 100
_BaseLoader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""The parser in C where PyYAML has it. Deep nesting would crash that one, so `_check_depth` comes first."""


class _TextLoader(_BaseLoader):  # type: ignore[misc,valid-type]
    """Reads scalars as text, and refuses a key that occurs twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {str(twice)[:80]!r} occurs twice", node.start_mark
            )
        return mapping


class _Output(NamedTuple):
    owner: str
    """``stage 'prepare'``, for messages."""
    entry: Mapping[str, Any]

    @property
    def path(self) -> str:
        return str(PurePosixPath(str(self.entry["path"])))


def read_version(source: Dvc) -> DataVersion:
    """Read the hash that DVC recorded for ``source``.

    Raises:
        NotFoundError: the file does not exist, or has no such output.
        UsageError: the file cannot be read, or is not of the form that DVC writes.
    """
    if PurePosixPath(source.path).suffix == _DVC_SUFFIX:
        file = Path(source.path)
        return _build_version(file, source.path.removesuffix(_DVC_SUFFIX), _only_output(file))
    file = Path(source.lock)
    document = _read_document(file, "`dvc repro` writes it, or give Dvc(…, lock=…)")
    if (schema := document.get("schema")) != _SCHEMA:
        raise UsageError(
            f"{file}: its schema is {_shorten(schema) if schema else 'missing'}, and {_SCHEMA} is supported; "
            "`dvc repro` of DVC 2 or later writes that"
        )
    path = str(PurePosixPath(source.path))
    return _build_version(file, path, _find_output(file, document, path))


def _find_output(file: Path, document: Mapping[str, Any], path: str) -> _Output:
    outputs = list(_list_outputs(file, document, "outs"))
    found = [output for output in outputs if output.path == path]
    if len(found) > 1:
        owners = " and ".join(output.owner for output in found[:3])
        raise UsageError(
            f"{file}: {path!r} is an output of {owners}, in different folders; give one of them another path in "
            "dvc.yaml, so that it is clear which is meant"
        )
    if found:
        return found[0]
    message = unknown_name_message(str(file), "output", path, [output.path for output in outputs])
    if any(output.path == path for output in _list_outputs(file, document, "deps")):
        message = (
            f"{file}: {path!r} is no output there, only an input; name the file by which DVC tracks it, such as "
            f"Dvc('{path}{_DVC_SUFFIX}')"
        )
    raise NotFoundError(message)


def _list_outputs(file: Path, document: Mapping[str, Any], kind: str) -> Iterator[_Output]:
    stages = document.get("stages") or {}
    if not isinstance(stages, dict):
        raise UsageError(f"{file}: its stages are no mapping; {_RESTORE}")
    for name, stage in stages.items():
        owner = f"stage {_shorten(name)}"
        if not isinstance(stage, dict):
            raise UsageError(f"{file}: {owner} is no mapping; {_RESTORE}")
        yield from _entries(file, owner, stage.get(kind) or [])


def _only_output(file: Path) -> _Output:
    document = _read_document(file, "`dvc add` writes it")
    outputs = list(_entries(file, "the file", document.get("outs") or []))
    if len(outputs) != 1:
        raise UsageError(f"{file}: it has {len(outputs)} outputs, and `dvc add` writes one; {_RESTORE}")
    return outputs[0]


def _entries(file: Path, owner: str, entries: Any) -> Iterator[_Output]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
        raise UsageError(f"{file}: {owner} has outputs without a path; {_RESTORE}")
    for entry in entries:
        yield _Output(owner, entry)


def _build_version(file: Path, name: str, output: _Output) -> DataVersion:
    entry = output.entry
    algorithm = str(entry.get("hash") or next((known for known in _HASHES if known in entry), ""))
    digest = entry.get(algorithm) if algorithm else None
    if digest is None:
        raise UsageError(
            f"{file}: {name!r} has no hash there, because DVC has not recorded its content; run `dvc commit`, or "
            "`dvc repro`"
        )
    if not _ALGORITHM.fullmatch(algorithm):
        raise UsageError(f"{file}: the hash of {name!r} is called {_shorten(algorithm)}; {_RESTORE}")
    if not isinstance(digest, str) or not _DIGEST.get(algorithm, _ANY_DIGEST).fullmatch(digest):
        raise UsageError(f"{file}: the {_shorten(algorithm)} of {name!r} is {_shorten(digest)}; {_RESTORE}")
    return DataVersion(
        name=name,
        algorithm=algorithm,
        digest=digest,
        size_bytes=_read_count(file, name, entry, "size"),
        files=_read_count(file, name, entry, "nfiles"),
    )


def _read_count(file: Path, name: str, entry: Mapping[str, Any], field: str) -> int | None:
    text = entry.get(field)
    if text is None:
        return None
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise UsageError(f"{file}: the {field} of {name!r} is {_shorten(text)}; {_RESTORE}")
    return int(text)


def _read_document(file: Path, remedy: str) -> Mapping[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"{file} does not exist in {Path.cwd()}; {remedy}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}; {remedy}") from error
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{file} is larger than {_MAX_BYTES >> 20} MiB, so it is not what DVC writes; {remedy}")
    try:
        _check_depth(file, content)
        document = yaml.load(content, _TextLoader)  # noqa: S506  makes text, lists and mappings only
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{yaml_error_message(str(file), error)}; {_RESTORE}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{file} is no mapping; {_RESTORE}")
    return document


def _check_depth(file: Path, content: bytes) -> None:
    depth = 0
    for event in yaml.parse(content, _BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise UsageError(f"{file}: its parts are nested more than {_MAX_DEPTH} deep; {_RESTORE}")


def _shorten(value: Any) -> str:
    return repr(value if len(str(value)) <= 80 else f"{str(value)[:80]}…")


_RESTORE = "restore it from Git, or have DVC write it again"
