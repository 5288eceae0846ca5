"""Reads files with Argo's Workflows, and writes marks into them without a change of anything else.

The marks are inserted into the text, so that comments and layout stay. What the
text means is read again: a mark that reached another template, by way of an anchor
or a merge key, or that hid what such a one brings, is refused.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hera_pipelines.authoring.adoption.marks import inline_name
from hera_pipelines.authoring.adoption.shape import KINDS, check_shape
from hera_pipelines.authoring.adoption.translation import list_tasks
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import argo_text
from tiphys.service.yaml_documents import UNREADABLE_YAML

STANDARD_INPUT = Path("-")
_MAX_BYTES = 16 << 20
_MAX_LEVELS = 200
_MAX_VALUES = 2_000_000  # aliases in aliases can stand for any number
_MAX_INTEGER_BITS = 1024  # a larger one is no number of JSON
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
_ALIAS = re.compile(r"\s*:\s*(\*[^\s,\[\]{}]+)")


class _ArgoLoader(_Loader):  # type: ignore[misc, valid-type]
    """Names the line of a number that Python cannot print again."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        try:
            number: int = super().construct_yaml_int(node)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        if number.bit_length() > _MAX_INTEGER_BITS:
            problem = f"an integer of {number.bit_length()} bits; write it in quotes, as text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return number


_ArgoLoader.add_constructor("tag:yaml.org,2002:int", _ArgoLoader.construct_yaml_int)


class LocatedTemplate(NamedTuple):
    """A template, and where it stands in its file."""

    line: int
    manifest: Manifest
    node: yaml.Node


@dataclass(frozen=True)
class ArgoDocument:
    """One document of a file.

    Attributes:
        path: The file.
        text: All of the file.
        manifest: The document.
        templates: Its templates, by name or `marks.inline_name`.
    """

    path: Path
    text: str
    manifest: Manifest
    templates: Mapping[str, LocatedTemplate]

    @cached_property
    def lines(self) -> dict[str, int]:
        """Line of each template in the file, counted from 1."""
        return {name: template.line for name, template in self.templates.items()}

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
        arguments = spec.get("arguments") or {}
        if arguments.get("parameters"):
            spec["arguments"] = {**arguments, "parameters": [*map(_with_texts, arguments["parameters"])]}
        return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata, "spec": spec}


def _with_texts(parameter: Manifest) -> Manifest:
    """The workflow parameter with the texts that Argo makes of its value and choices, such as ``true`` and ``7``."""
    value, choices = parameter.get("value"), parameter.get("enum")
    texts = {} if value is None else {"value": argo_text(value)}
    return {**parameter, **texts, **({"enum": [*map(argo_text, choices)]} if choices else {})}


def read_argo_documents(path: Path) -> list[ArgoDocument]:
    """The Workflows, templates and schedules of a YAML file; its other documents are left out.

    Raises:
        UsageError: the file cannot be read, is no YAML, or has none.
    """
    text = _read_text(path)
    documents = _parse(path, text)
    found = [_build_document(path, text, document, node) for document, node in documents if _is_argo(document)]
    if not found:
        kinds = sorted({str(body["kind"]) for body, _ in documents if isinstance(body, dict) and body.get("kind")})
        raise UsageError(
            f"{path}: it has no Workflow, template or schedule of Argo, but {', '.join(kinds) or 'nothing'}"
        )
    return found


def read_yaml_documents(path: Path) -> list[Any]:
    """The documents of a YAML file, or of standard input for `STANDARD_INPUT`.

    Raises:
        UsageError: the file cannot be read, or is no YAML.
    """
    return [document for document, _ in _parse(path, _read_text(path))]


def _parse(path: Path, text: str) -> list[tuple[Any, yaml.Node]]:
    """Each document and its node. No two parts of a document are one object, whatever anchors it has."""
    try:
        _check_levels(text)
        loader, parsed = _ArgoLoader(text), []
        while loader.check_node():
            node = loader.get_node()
            _count_values(node, {})
            parsed.append((_unshare(loader.construct_document(node)), node))
        return parsed
    except RecursionError:
        raise UsageError(f"{path}: its parts are nested too deeply") from None
    except UNREADABLE_YAML as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{min(mark.line, text.count(chr(10))) + 1}" if mark else str(path)  # libyaml ends a line more
        problem = getattr(error, "problem", None) or error
        if "duplicate anchor" in str(getattr(error, "context", "")):  # YAML allows it, libyaml does not
            raise UsageError(f"{place}: this anchor is defined twice; give the second another name") from error
        raise UsageError(f"{place}: this is not YAML: {problem}") from error


def _check_levels(text: str) -> None:
    """Libyaml builds nodes on the stack of the process, and would end it."""
    level = 0
    for event in yaml.parse(text, Loader=_Loader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > _MAX_LEVELS:
            raise RecursionError


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Values below ``node`` with every alias written out; ``counts`` has those of the nodes before, 0 while it counts.

    Raises:
        MarkedYAMLError: there are too many, or a part contains itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = 0
        parts = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in node.value for child in pair]
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in parts)
    count = counts[id(node)]
    if not 0 < count <= _MAX_VALUES:
        problem = f"its aliases stand for {count} values" if count else "an anchor contains its own alias"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return count


def _unshare(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _unshare(value) for key, value in part.items()}
    return [_unshare(value) for value in part] if isinstance(part, list) else part


def _read_text(path: Path) -> str:
    try:
        if path == STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _is_argo(document: Any) -> bool:
    """Whether a document is one that can be adopted."""
    is_kind = isinstance(document, dict) and isinstance(kind := document.get("kind"), str) and kind in KINDS
    return is_kind and str(document.get("apiVersion", "")).startswith("argoproj.io/")


def _build_document(path: Path, text: str, document: Manifest, node: yaml.Node) -> ArgoDocument:
    try:
        check_shape(document)
    except UsageError as error:
        raise UsageError(f"{path}:{node.start_mark.line + 1}: {error}") from error
    return ArgoDocument(path, text, document, dict(_locate_templates(document, node)))


def _locate_templates(document: Manifest, node: yaml.Node) -> Iterator[tuple[str, LocatedTemplate]]:
    spec, spec_node = document["spec"], _child(node, "spec")
    if "workflowSpec" in spec and document["kind"] == "CronWorkflow":
        spec, spec_node = spec["workflowSpec"], _child(spec_node, "workflowSpec")
    for template, template_node in zip(
        spec.get("templates") or [], _items(_child(spec_node, "templates")), strict=True
    ):
        name = template["name"]
        yield name, LocatedTemplate(template_node.start_mark.line + 1, template, template_node)
        for task, task_node in zip(list_tasks(template), _tasks(template_node), strict=True):
            inline = _child(task_node, "inline")
            if task.get("inline") and inline:
                line = task_node.start_mark.line + 1
                yield inline_name(name, task["name"]), LocatedTemplate(line, task["inline"], inline)


def _tasks(template: yaml.Node) -> list[yaml.Node]:
    steps = _items(_child(template, "steps"))
    groups = [group.value if isinstance(group, yaml.SequenceNode) else [group] for group in steps]
    return _items(_child(_child(template, "dag"), "tasks")) or [task for group in groups for task in group]


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a mapping; PyYAML has put those of merge keys before its own, which win."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in reversed(pairs) if key.value == name), None)


def write_marks(documents: Iterable[ArgoDocument], marks: Iterable[Mapping[str, Mapping[str, str]]]) -> str:
    """The text of the file of ``documents`` with the annotations of each template of each of them, by its name.

    Raises:
        UsageError: the text would then mean something else, because templates share a part.
    """
    marked = list(zip(documents, marks, strict=True))
    path, text = marked[0][0].path, marked[0][0].text
    edits = [
        _insert_annotations(text, document.templates[name], added)
        for document, wanted in marked
        for name, added in wanted.items()
    ]
    pieces, position = [], 0
    for start, end, written in sorted(edits):
        pieces += [text[position:start], written]
        position = end
    marked_text = "".join([*pieces, text[position:]])
    if edits:
        _check_meaning(path, marked_text, marked)
    return marked_text


def _insert_annotations(text: str, template: LocatedTemplate, added: Mapping[str, str]) -> tuple[int, int, str]:
    """Beginning and end of what changes in ``text``, and what comes in its place."""
    metadata = _marked_metadata(template.manifest, added)
    owner = template.node
    for field, content in (("metadata", metadata), ("annotations", metadata["annotations"])):
        own = [pair for pair in _own_pairs(owner) if pair[0].value == field]
        if not own:  # it is written here with what a merge key brings
            return _insert_fields(text, owner, {field: content})
        key, value = own[-1]
        if alias := _ALIAS.match(text, key.end_mark.index):
            return (*alias.span(1), _flow(content))
        start, end = value.start_mark.index, value.end_mark.index
        if not isinstance(value, yaml.MappingNode) or not value.value:
            return start, end, " " * (start == end) + _flow(content)
        owner = value
    return _insert_fields(text, owner, added)


def _marked_metadata(template: Manifest, added: Mapping[str, str]) -> Manifest:
    metadata = template.get("metadata") or {}
    return {**metadata, "annotations": {**(metadata.get("annotations") or {}), **added}}


def _flow(content: Mapping[str, Any]) -> str:
    """The short form, which is JSON."""
    return json.dumps(content, ensure_ascii=False, default=str)


def _own_pairs(mapping: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping without those that a merge key brought."""
    inside = range(mapping.start_mark.index, mapping.end_mark.index)
    return [pair for pair in mapping.value if pair[0].start_mark.index in inside]


def _insert_fields(text: str, owner: yaml.Node, fields: Mapping[str, Any]) -> tuple[int, int, str]:
    start, own = owner.start_mark.index, _own_pairs(owner)
    if isinstance(owner, yaml.CollectionNode) and owner.flow_style:
        start = text.index("{", start) + 1
        return start, start, f"{_flow(fields)[1:-1]}, "
    newline = "\r\n" if text[: text.find("\n") + 1].endswith("\r\n") else "\n"
    first = min((key.start_mark for key, _ in own), key=lambda mark: mark.index, default=owner.start_mark)
    indent = " " * first.column
    block = yaml.safe_dump(dict(fields), allow_unicode=True, sort_keys=False, width=_MAX_BYTES)
    lines = block.removesuffix("\n").split("\n")
    for key, value in own:
        if key.value == "name" and "metadata" in fields:  # the name of a template comes first
            last = max(key.end_mark.index, value.end_mark.index)
            end = text.find("\n", last)
            end = len(text) if end < 0 else end - (text[end - 1] == "\r")
            return end, end, "".join(f"{newline}{indent}{line}" for line in lines)
    return first.index, first.index, "".join(f"{line}{newline}{indent}" for line in lines)


def _check_meaning(
    path: Path, marked_text: str, marked: Iterable[tuple[ArgoDocument, Mapping[str, Mapping[str, str]]]]
) -> None:
    """Compare what a file meant with what it means now, without what was added."""
    try:
        bodies = ((body, node) for body, node in _parse(path, marked_text) if _is_argo(body))
        parsed = [(body, dict(_locate_templates(body, node))) for body, node in bodies]
    except (UsageError, ValueError):  # no YAML any more, or other templates
        parsed = []
    for index, (document, wanted) in enumerate(marked):
        manifest, found = parsed[index] if parsed else ({}, {})
        for name in wanted.keys() & found.keys():
            before, after = document.templates[name].manifest, found[name].manifest
            if after.get("metadata") == _marked_metadata(before, wanted[name]):
                del after["metadata"]
                after |= {field: value for field, value in before.items() if field == "metadata"}
        if manifest == document.manifest:
            continue
        for name, template in document.templates.items():
            if name not in found or found[name].manifest != template.manifest:
                raise UsageError(
                    f"{path}:{template.line}: template {name!r}: marks would change more than annotations, because it "
                    "shares a part with others by an anchor or a merge key; write that part out"
                )
