"""The templates of a workflow, with the workflow's defaults merged in."""

import json
from dataclasses import dataclass
from functools import cached_property

from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.pipeline import template as find_template


@dataclass(frozen=True)
class Definitions:
    """What the workflow defines."""

    manifest: Manifest

    @property
    def workflow(self) -> str:
        """Name of the Workflow object."""
        return str(self.manifest["metadata"]["name"])

    def template(self, name: str) -> Manifest:
        """The template called ``name``, its defaults merged in; `UsageError` if there is none."""
        found = find_template(self.manifest, name)
        defaults = self.manifest["spec"].get("templateDefaults") or {}
        return merge(_applicable(defaults, found), found)

    @cached_property
    def uses_results(self) -> bool:
        """Whether anything refers to what a program printed."""
        return ".outputs.result" in json.dumps(self.manifest)


def merge(defaults: Manifest, own: Manifest) -> Manifest:
    """``own`` over ``defaults``; maps are merged, lists and texts replaced."""
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = merge(defaults[key], own[key])
    return merged


def _applicable(defaults: Manifest, own: Manifest) -> Manifest:
    """Defaults of another template type do not turn a template into it."""
    return {key: value for key, value in defaults.items() if key not in ("container", "script") or key in own}
