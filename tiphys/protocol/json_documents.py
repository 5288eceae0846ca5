"""Parses JSON that other parties wrote, within bounds of depth and of the number of values.

Python's parser ends at the recursion limit of the process, and two bytes of nested lists cost it a hundred. The parser
of pydantic is as fast and ends at 200 levels. It refuses numbers of more than 4,300 digits, and lone surrogates, which
cannot be encoded again. Commas and brackets are counted before it runs, which costs a millisecond for a megabyte.
"""

import re
from typing import Any

from pydantic_core import from_json

from tiphys.errors import UsageError

MAX_VALUES = 200_000
"""Largest number of values in one document; they cost some 100 bytes each. A Workflow of 1.5 MB has about 60,000."""
CUT_DEPTH = 150
"""Level from which `cut_deep_values` cuts. The parser's own limit is 200."""
CUT = "tiphys.dev/nested-too-deeply"
"""Text in the place of a value that was cut."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)  # `\Z`: a document may be cut off


def parse_json(document: bytes | str, what: str = "the body", max_values: int | None = MAX_VALUES) -> Any:
    """Parse a document; ``what`` names it in messages. ``max_values`` bounds the number of its values; None: any.

    Raises:
        UsageError: it is not JSON, is nested too deeply, or has too many values.
    """
    data = document.encode(errors="surrogatepass") if isinstance(document, str) else document
    if max_values is not None and sum(map(data.count, (b",", b"[", b"{"))) > max_values:
        raise UsageError(f"{what} is JSON of more than {max_values} values, which is not read; send less at once")
    try:
        return from_json(data)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise UsageError(f"{what} is not JSON that can be read: it is nested too deeply") from error
        raise UsageError(f"{what} is not JSON: {error}") from error


def cut_deep_values(document: bytes) -> bytes:
    """The document with `CUT` in the place of each list and object that lies deeper than `CUT_DEPTH`; linear."""
    kept, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(document):
        match token[0][:1]:
            case b"[" | b"{":
                depth += 1
                if depth == CUT_DEPTH:
                    kept.append(document[begin : token.start()] + f'"{CUT}"'.encode())
            case b"]" | b"}":
                depth -= 1
                if depth == CUT_DEPTH - 1:
                    begin = token.end()
    return b"".join(kept) + document[begin:] if depth == 0 else document
