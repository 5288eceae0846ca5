"""Reads files with Argo's Workflows, and writes marks into them without a change of anything else.

The marks are inserted into the text, so that comments and layout stay. What the
text means is read again: a mark that reached another template, by way of an anchor
or a merge key, or that hid what such a one brings, is refused.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hera_pipelines.authoring.adoption.libraries import LibraryTemplate, copy_library_templates
from hera_pipelines.authoring.adoption.marks import inline_name
from hera_pipelines.authoring.adoption.shape import KINDS, check_shape
from hera_pipelines.authoring.adoption.translation import list_tasks
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import argo_text
from tiphys.service.yaml_documents import UNREADABLE_YAML

STANDARD_INPUT = Path("-")
LIBRARY_KINDS = ("WorkflowTemplate", "ClusterWorkflowTemplate")
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
        templates: Its templates, by name or `marks.inline_name`, and those that it takes from libraries of the file.
        library_templates: The templates of all libraries of the file.
    """

    path: Path
    text: str
    manifest: Manifest
    templates: Mapping[str, LocatedTemplate]
    library_templates: Mapping[LibraryTemplate, Manifest]

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
        return _workflow_spec(self.manifest)

    def as_workflow(self) -> Manifest:
        """The Workflow that it describes, with what it takes from libraries of the file."""
        metadata = {**(self.manifest.get("metadata") or {})}
        inherited = (self.manifest.get("spec") or {}).get("workflowMetadata") or {}
        for field in ("labels", "annotations"):
            if inherited.get(field):
                metadata[field] = {**(metadata.get(field) or {}), **inherited[field]}
        spec, _ = copy_library_templates(self.workflow_spec, self.library_templates)
        spec.pop("workflowMetadata", None)
        arguments = spec.get("arguments") or {}
        if arguments.get("parameters"):
            spec["arguments"] = {**arguments, "parameters": [*map(_with_texts, arguments["parameters"])]}
        return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata, "spec": spec}


def _workflow_spec(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest.get("spec") or {}
    return (spec.get("workflowSpec") or {}) if manifest["kind"] == "CronWorkflow" else spec


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
    parsed = _parse(path, text)
    found = list(_find_argo(parsed))
    if not found:
        kinds = sorted({str(body["kind"]) for body, _ in parsed if isinstance(body, dict) and body.get("kind")})
        raise UsageError(
            f"{path}: it has no Workflow, template or schedule of Argo, but {', '.join(kinds) or 'nothing'}"
        )
    for document, node in found:
        try:
            check_shape(document)
        except UsageError as error:
            raise UsageError(f"{path}:{node.start_mark.line + 1}: {error}") from error
    located, library_templates = _locate_all(found)
    return [
        ArgoDocument(path, text, document, templates, library_templates)
        for (document, _), templates in zip(found, located, strict=True)
    ]


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
        MarkedYAMLError: there are too many, a part contains itself, or a key is there twice, which Argo refuses too.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = 0
        parts = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in node.value for child in pair]
        known = set[str]()
        for key in parts[::2] if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in known:
                problem = f"the key {key.value!r} is there twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            known.add(str(key.value))
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


def _find_argo(parsed: Iterable[tuple[Any, yaml.Node]]) -> Iterator[tuple[Manifest, yaml.Node]]:
    """The documents that can be adopted, also those in a List, as kubectl prints several objects."""
    for document, node in parsed:
        kind = document.get("kind") if isinstance(document, dict) else None
        if isinstance(kind, str) and kind.endswith("List") and isinstance(document.get("items"), list):
            yield from _find_argo(zip(document["items"], _items(_child(node, "items")), strict=True))
        elif isinstance(kind, str) and kind in KINDS and str(document.get("apiVersion")).startswith("argoproj.io/"):
            yield _without_nulls(document), node


def _without_nulls(part: Any) -> Any:
    """``part`` as Kubernetes reads it: a field without a value is not there. The items of a fan-out are values."""
    if isinstance(part, dict):
        fields = {name: value for name, value in part.items() if value is not None}
        return {name: value if name == "withItems" else _without_nulls(value) for name, value in fields.items()}
    return [_without_nulls(value) for value in part] if isinstance(part, list) else part


def _locate_all(
    found: Sequence[tuple[Manifest, yaml.Node]],
) -> tuple[list[dict[str, LocatedTemplate]], dict[LibraryTemplate, Manifest]]:
    """The templates that each document of a file has or takes from another, by name, and those of all libraries."""
    own = [dict(_locate_templates(document, node)) for document, node in found]
    libraries = {
        LibraryTemplate(document["kind"], (document.get("metadata") or {}).get("name", ""), name): template
        for (document, _), templates in zip(found, own, strict=True)
        if document["kind"] in LIBRARY_KINDS
        for name, template in templates.items()
    }
    manifests = {called: template.manifest for called, template in libraries.items()}
    taken = (copy_library_templates(_workflow_spec(document), manifests)[1] for document, _ in found)
    located = [
        {**templates, **{name: libraries[called] for name, called in copies.items()}}
        for templates, copies in zip(own, taken, strict=True)
    ]
    return located, manifests


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
    edits = {  # several Workflows may mark one template of a library
        _insert_annotations(text, document.templates[name], added)
        for document, wanted in marked
        for name, added in wanted.items()
    }
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
    path: Path, marked_text: str, marked: Sequence[tuple[ArgoDocument, Mapping[str, Mapping[str, str]]]]
) -> None:
    """Compare what a file meant with what it means now, without what was added."""
    try:
        parsed = list(_find_argo(_parse(path, marked_text)))
        located = _locate_all(parsed)[0]
    except (UsageError, ValueError):  # no YAML any more, or other templates
        parsed, located = [], []
    for (document, wanted), found in zip(marked, located, strict=False):
        for name in wanted.keys() & found.keys():
            before, after = document.templates[name].manifest, found[name].manifest
            if after.get("metadata") == _marked_metadata(before, wanted[name]):
                del after["metadata"]
                after |= {field: value for field, value in before.items() if field == "metadata"}
    for index, (document, _) in enumerate(marked):
        found = located[index] if located else {}
        if parsed and parsed[index][0] == document.manifest:
            continue
        for name, template in document.templates.items():
            if name not in found or found[name].manifest != template.manifest:
                raise UsageError(
                    f"{path}:{template.line}: template {name!r}: marks would change more than annotations, because it "
                    "shares a part with others by an anchor or a merge key; write that part out"
                )
