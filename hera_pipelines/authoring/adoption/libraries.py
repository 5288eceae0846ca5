"""Copies the templates of a library into the Workflow that takes them by ``templateRef``, where both are in one file.

Each then is a template like any other: it can become a step, and the local engine runs it. A library of
another file is an object of a cluster, which only Argo reads.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hera_pipelines.authoring.adoption.translation import free_name, list_tasks
from tiphys.protocol.compiled_workflow import Manifest


class LibraryTemplate(NamedTuple):
    """A template of a WorkflowTemplate or ClusterWorkflowTemplate, by names."""

    kind: str
    library: str
    template: str


def copy_library_templates(
    spec: Manifest, library_templates: Mapping[LibraryTemplate, Manifest]
) -> tuple[Manifest, dict[str, LibraryTemplate]]:
    """``spec`` of a Workflow with copies of the library templates that it uses, and the original of each copy by name.

    ``spec`` is not changed; references to other libraries stay.
    """
    spec = copy.deepcopy(spec)
    templates = spec.get("templates") or []
    names = {template["name"] for template in templates}
    copies: dict[LibraryTemplate, str] = {}
    waiting: list[tuple[Manifest, LibraryTemplate | None]] = [(part, None) for part in (spec, *templates)]
    while waiting:
        part, origin = waiting.pop(0)
        for call in _calls(part):
            called = _called_template(call, origin)
            if called is None or called not in library_templates:
                continue
            if called not in copies:
                copies[called] = free_name(called.template, names)
                names.add(copies[called])
                templates.append({**copy.deepcopy(library_templates[called]), "name": copies[called]})
                waiting.append((templates[-1], called))
            call.pop("templateRef", None)
            call["template"] = copies[called]
    return spec, {name: called for called, name in copies.items()}


def _calls(part: Manifest) -> Iterator[Manifest]:
    """The parts of a Workflow or template that name a template: its tasks, and their hooks and its own."""
    for user in (part, *list_tasks(part)):
        yield from (user, *(user.get("hooks") or {}).values())


def _called_template(call: Manifest, origin: LibraryTemplate | None) -> LibraryTemplate | None:
    """What ``call`` names; a name without a library is one of the library that the call is in."""
    if reference := call.get("templateRef"):
        kind = "ClusterWorkflowTemplate" if reference.get("clusterScope") else "WorkflowTemplate"
        return LibraryTemplate(kind, reference.get("name", ""), reference.get("template", ""))
    return origin._replace(template=call.get("template", "")) if origin else None
