"""The templates of the pictures, in an environment that no text can break out of."""

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

_NOT_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_MESSAGE = 46


@cache
def template(name: str) -> "Template":
    """The template ``name`` of this package."""
    # Imported where a picture is drawn: every command that tells a size comes by here.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hera_pipelines.draw", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters["shorten"] = _shorten
    return environment.get_template(name)


def _printable(value: object) -> object:
    """Text without the characters that XML cannot hold even escaped."""
    return _NOT_XML.sub("\ufffd", value) if type(value) is str else value


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1].rstrip() + "…"
