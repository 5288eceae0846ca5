"""Reads files with Argo's Workflows, and writes marks into them without a change of anything else.

The marks are inserted as lines of text, so that comments and layout stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hera_pipelines.authoring.adoption.marks import inline_name
from hera_pipelines.authoring.adoption.shape import KINDS, check_shape
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.service.yaml_documents import UNREADABLE_YAML

_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class ArgoDocument:
    """One document of a file.

    Attributes:
        path: The file.
        manifest: The document.
        lines: Line of each template in the file, by its name or `marks.inline_name`, counted from 1.
        anchors: Where the marks of a template go, by the same: the line before which, and the lines that come before
            the first mark, indented; None where the template is written on one line.
    """

    path: Path
    manifest: Manifest
    lines: Mapping[str, int]
    anchors: Mapping[str, tuple[int, tuple[str, ...], int] | None]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def name(self) -> str:
        """Name of the object, or the beginning of a generated one."""
        metadata = self.manifest.get("metadata") or {}
        return str(metadata.get("name") or metadata.get("generateName") or self.path.stem)

    @property
    def workflow_spec(self) -> Manifest:
        """The ``spec`` of the Workflow that it describes."""
        spec: Manifest = self.manifest.get("spec") or {}
        return (spec.get("workflowSpec") or {}) if self.kind == "CronWorkflow" else spec

    def as_workflow(self) -> Manifest:
        """The Workflow that it describes."""
        metadata = {**(self.manifest.get("metadata") or {})}
        inherited = (self.manifest.get("spec") or {}).get("workflowMetadata") or {}
        for field in ("labels", "annotations"):
            if inherited.get(field):
                metadata[field] = {**(metadata.get(field) or {}), **inherited[field]}
        spec = {field: value for field, value in self.workflow_spec.items() if field != "workflowMetadata"}
        return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata, "spec": spec}


def read_argo_documents(path: Path) -> list[ArgoDocument]:
    """The Workflows, templates and schedules of a YAML file; its other documents are left out.

    Raises:
        UsageError: the file cannot be read, is no YAML, or has none.
    """
    documents, nodes = read_yaml_documents(path), list(yaml.compose_all(_read_text(path), Loader=yaml.SafeLoader))
    found = [
        _build_document(path, document, node)
        for document, node in zip(documents, nodes, strict=True)
        if isinstance(document, dict) and document.get("kind") in KINDS and _is_argo(document)
    ]
    if not found:
        kinds = sorted({str(one["kind"]) for one in documents if isinstance(one, dict) and one.get("kind")})
        raise UsageError(
            f"{path}: it has no Workflow, template or schedule of Argo, but {', '.join(kinds) or 'nothing'}"
        )
    return found


def read_yaml_documents(path: Path) -> list[Any]:
    """The documents of a YAML file.

    Raises:
        UsageError: the file cannot be read, or is no YAML.
    """
    try:
        return list(yaml.safe_load_all(_read_text(path)))
    except RecursionError:
        raise UsageError(f"{path}: its parts are nested too deeply") from None
    except UNREADABLE_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{place}: this is not YAML: {getattr(error, 'problem', None) or error}") from error


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _is_argo(document: Mapping[str, Any]) -> bool:
    return str(document.get("apiVersion", "")).startswith("argoproj.io/")


def _build_document(path: Path, document: Manifest, node: yaml.Node) -> ArgoDocument:
    try:
        check_shape(document)
    except UsageError as error:
        raise UsageError(f"{path}:{node.start_mark.line + 1}: {error}") from error
    spec = _child(node, "spec")
    templates = _child(spec, "templates") or _child(_child(spec, "workflowSpec"), "templates")
    lines: dict[str, int] = {}
    anchors: dict[str, tuple[int, tuple[str, ...], int] | None] = {}
    for template in _items(templates):
        name = _text(_child(template, "name"))
        lines[name] = template.start_mark.line + 1
        anchors[name] = _find_anchor(template)
        for task in _tasks(template):
            if inline := _child(task, "inline"):
                key = inline_name(name, _text(_child(task, "name")))
                lines[key] = task.start_mark.line + 1
                anchors[key] = _find_anchor(inline)
    return ArgoDocument(path, document, lines, anchors)


def _tasks(template: yaml.Node) -> Iterator[yaml.Node]:
    yield from _items(_child(_child(template, "dag"), "tasks"))
    for group in _items(_child(template, "steps")):
        yield from _items(group) if isinstance(group, yaml.SequenceNode) else [group]


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _text(node: yaml.Node | None) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def _find_anchor(template: yaml.Node) -> tuple[int, tuple[str, ...], int] | None:
    """Line before which marks go, what must come before them, and their indentation."""
    if not isinstance(template, yaml.MappingNode) or template.flow_style:
        return None
    column = template.start_mark.column
    metadata, name = _child(template, "metadata"), _child(template, "name")
    if metadata is None:
        # A template that is an item of a list begins behind the dash, so its first line cannot be moved down.
        line = name.end_mark.line + 1 if name else template.start_mark.line
        return line, (f"{' ' * column}metadata:", f"{' ' * (column + 2)}annotations:"), column + 4
    if not isinstance(metadata, yaml.MappingNode) or metadata.flow_style or not metadata.value:
        return None
    inner = metadata.start_mark.column
    annotations = _child(metadata, "annotations")
    if annotations is None:
        return metadata.start_mark.line, (f"{' ' * inner}annotations:",), inner + 2
    if not isinstance(annotations, yaml.MappingNode) or annotations.flow_style or not annotations.value:
        return None
    return annotations.start_mark.line, (), annotations.start_mark.column


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value == key:
                child: yaml.Node = value
                return child
    return None


def write_marks(documents: Iterable[ArgoDocument], marks: Iterable[Mapping[str, Mapping[str, str]]]) -> str:
    """The text of their file with the annotations of each template, by its name.

    Args:
        documents: All documents of one file.
        marks: For each document, annotations by the name of a template.

    Raises:
        UsageError: a template is written on one line, where no lines can be added.
    """
    inserted: list[tuple[int, list[str]]] = []
    path = None
    for document, wanted in zip(documents, marks, strict=True):
        path = document.path
        for name, annotations in wanted.items():
            anchor = document.anchors[name]
            if anchor is None:
                raise UsageError(
                    f"{document.path}:{document.lines[name]}: template {name!r}, or its metadata, is in the short form "
                    "{…}, where no annotation can be added; write it on several lines"
                )
            line, before, column = anchor
            added = [f"{' ' * column}{key}: {_quote(value)}" for key, value in annotations.items()]
            inserted.append((line, [*before, *added]))
    assert path is not None
    text = _read_text(path).splitlines()
    for line, added in sorted(inserted, reverse=True):
        text[line:line] = added
    return "\n".join(text) + "\n"


def _quote(value: str) -> str:
    return value if value.isalpha() else f"'{value}'"
