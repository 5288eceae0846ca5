"""A compiled Workflow as text that people read and diff."""

from typing import Any

import yaml

from tiphys.protocol.pipeline import Manifest

_FIRST = (
    *("apiVersion", "kind", "name", "generateName", "namespace", "metadata", "spec"),
    *("schedules", "timezone", "concurrencyPolicy", "entrypoint", "onExit", "parallelism"),
    *("template", "templateRef", "depends", "when", "withItems", "withParam", "arguments", "continueOn"),
    *("value", "from", "path", "labels", "annotations", "inputs", "outputs", "retryStrategy"),
    *("op", "run", "submission", "uid", "node", "step", "item", "image", "command", "args"),
)
_LAST = ("templates", "workflowSpec", "steps", "dag", "plugin", "container", "script", "source")


class _Dumper(yaml.SafeDumper):
    """Our own class, because Hera changes the representers of PyYAML's."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  anchors help no reader
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if value in ("y", "Y", "n", "N") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_workflow_yaml(manifest: Manifest) -> str:
    """``manifest`` as YAML: identity first, templates last, the same text for the same document."""
    return yaml.dump(_ordered(manifest), Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def _ordered(part: Any) -> Any:
    if isinstance(part, dict):
        return {field: _ordered(part[field]) for field in sorted(part, key=_rank)}
    if isinstance(part, list):
        return [_ordered(value) for value in part]
    return part


def _rank(field: str) -> tuple[int, str]:
    if field in _FIRST:
        return _FIRST.index(field), ""
    if field in _LAST:
        return len(_FIRST) + 1 + _LAST.index(field), ""
    return len(_FIRST), field
