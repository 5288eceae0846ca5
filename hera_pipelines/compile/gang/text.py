"""A manifest as the text of a resource template, whatever its values turn out to hold.

Argo puts values into the text of a manifest before anybody parses it: a quote
or a line break in a parameter would end the string that it stands in, and what
follows would be read as part of the manifest. So each value goes through
``toJson``, without its quotes, and all strings are JSON's. An expression is also
what Argo's linter does not stumble over.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from hera_pipelines.compile import names
from tiphys.errors import UsageError
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.placeholders import TAG

_NAME = re.compile(r"[A-Za-z_]\w*")
# Our own names of things, in which nothing needs to be escaped; as plain tags they can be read.
_HARMLESS = frozenset(
    {
        "workflow.uid",
        *(
            f"inputs.parameters.{names.answer(name)}"
            for name in ("attempt", "gang", "members", "outputs", "resume-from", "run-id", *MEMORY_OUTPUTS.values())
        ),
    }
)


class Inside:
    """A place where the text of a parameter goes as it is: the inside of a JSON list, or a number.

    In a list, what may be empty stands alone, or ``first``: then the comma after it is written with it.
    """

    def __init__(self, parameter: str, *, first: bool = False) -> None:
        self.mark = f"\x00{parameter}\x00"
        self.first = first
        value = f"inputs.parameters['{parameter}']"
        with_comma = f"{{{{={value} == '' ? '' : {value} + ','}}}}"
        self.tag = with_comma if first else f"{{{{inputs.parameters.{parameter}}}}}"


def manifest_text(manifest: Manifest, paths: Mapping[str, str]) -> str:
    """``manifest`` as JSON that Argo can fill in. ``paths`` says where declared files lie, by their plain tags.

    Raises:
        UsageError: it uses a value that cannot be filled in.
    """
    insides: dict[str, str] = {}

    def written(part: Any) -> Any:
        match part:
            case Inside():
                insides[json.dumps(part.mark) + ("," if part.first else "")] = part.tag
                return part.mark
            case str():
                return TAG.sub(lambda tag: _safe(tag[1], paths), part)
            case dict():
                return {name: written(value) for name, value in part.items()}
            case list():
                return [written(value) for value in part]
        return part

    text = json.dumps(written(manifest), indent=2, ensure_ascii=False)
    for mark, tag in insides.items():
        text = text.replace(mark, tag)
    return f"{text}\n"


def _safe(tag: str, paths: Mapping[str, str]) -> str:
    """What stands for ``{{tag}}`` inside a JSON string."""
    tag = tag.strip()
    if tag in _HARMLESS:
        return f"{{{{{tag}}}}}"
    if tag in paths:
        return paths[tag]
    expression = tag[1:].strip() if tag.startswith("=") else _as_expression(tag)
    return f"{{{{=toJson(string({expression}))[1:-1]}}}}"


def _as_expression(tag: str) -> str:
    """The variable of a plain tag, in expr-lang: ``inputs.parameters.learning-rate`` is no subtraction there."""
    first, *rest = tag.split(".")
    if not rest or rest == ["parameters"] or not _NAME.fullmatch(first):
        raise UsageError(f"{{{{{tag}}}}} cannot be handed to several pods; name one parameter, or drop it")
    return first + "".join(f".{part}" if _NAME.fullmatch(part) else f"['{part}']" for part in rest)
