"""Parses YAML that other parties wrote: whatever cannot be read is a `UsageError` with a sentence."""

from typing import Any

import yaml

from tiphys.errors import UsageError, yaml_error_message

UNREADABLE_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)
"""What PyYAML raises beside its own errors comes from Python's numbers, times and stack: a number of 5,000 digits, a
month of 99, ``!!timestamp x``, a list in lists."""


def parse_yaml(text: str | bytes, source: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The one document of ``text``; ``source`` names it in messages. Raises `UsageError`."""
    try:
        return yaml.load(text, loader)  # noqa: S506  a SafeLoader
    except UNREADABLE_YAML as error:
        raise UsageError(yaml_error_message(source, error)) from error
