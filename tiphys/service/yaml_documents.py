"""Parses YAML that other parties wrote: whatever cannot be read is a `UsageError` with a sentence."""

from collections.abc import Sequence
from typing import Any

import yaml

from tiphys.errors import UsageError, yaml_error_message

UNREADABLE_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)
"""What PyYAML raises beside its own errors comes from Python's numbers, times and stack: a number of 5,000 digits, a
month of 99, ``!!timestamp x``, a list in lists."""


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML forbids it, and PyYAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in known:
                    problem = f"the key {key.value!r} is there twice; keep one of them"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                known.add((key.tag, key.value))
        return node


def find_yaml_line(text: str, path: Sequence[int | str]) -> int:
    """The line, from 1, of the value at ``path`` in ``text``, or of the nearest value around it."""
    node = yaml.compose(text, yaml.SafeLoader)
    line = node.start_mark.line if node is not None else 0
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
            continue
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next((pair for pair in pairs if pair[0].value == str(part)), None)
        if found is None:
            break
        line, node = found[0].start_mark.line, found[1]
    return int(line) + 1


def parse_yaml(text: str | bytes, source: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The one document of ``text``; ``source`` names it in messages. Raises `UsageError`."""
    try:
        return yaml.load(text, loader)  # noqa: S506  a SafeLoader
    except UNREADABLE_YAML as error:
        raise UsageError(yaml_error_message(source, error)) from error
