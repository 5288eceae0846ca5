"""Which templates of a Workflow something still leads to."""

from collections.abc import Iterable, Iterator
from typing import Any

from tiphys.protocol.pipeline import Manifest
from tiphys_controller.references import has_tags


def reachable(manifest: Manifest, roots: Iterable[str]) -> set[str]:
    """Names of the templates that ``roots`` lead to, themselves included.

    All of them, if a name is made at run time.
    """
    by_name = {candidate["name"]: candidate for candidate in manifest["spec"].get("templates", [])}
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if has_tags(name):
            return set(by_name)
        if name in by_name and name not in found:
            found.add(name)
            left.extend(template_names(by_name[name]))
    return found


def roots_of(spec: Manifest) -> Iterator[str]:
    """Templates that the Workflow itself names: entry point, exit handler and hooks."""
    yield from template_names({name: value for name, value in spec.items() if name != "templates"})
    if entrypoint := spec.get("entrypoint"):
        yield entrypoint


def template_names(part: Any) -> Iterator[str]:
    """Templates that a part of a manifest names."""
    if isinstance(part, dict):
        for field, value in part.items():
            if field in ("template", "onExit") and isinstance(value, str):
                yield value
            else:
                yield from template_names(value)
    elif isinstance(part, list):
        for value in part:
            yield from template_names(value)


def declares(part: Any, field: str) -> bool:
    """Whether a field of this name occurs anywhere in a part of a manifest."""
    if isinstance(part, dict):
        return field in part or any(declares(value, field) for value in part.values())
    return isinstance(part, list) and any(declares(value, field) for value in part)
