"""Makes text safe to show: programs write parts of a run's records, and no terminal or browser may obey them.

A control character can move the cursor, set the title of a terminal, fill the
clipboard or turn the direction of reading, so that a person sees what is not
there. XML refuses most of them.
"""

import re

_CONTROL = re.compile(
    "["
    r"\x00-\x08\x0b-\x1f\x7f"  # C0 without newline and tab, and DEL
    r"\x80-\x9f"  # C1, whose 9b begins a sequence as ESC [ does
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of reading: Unicode's property Bidi_Control
    r"\u2028\u2029"  # separators of lines and paragraphs
    r"\ud800-\udfff\ufffe\uffff"  # no characters; where a locale is ASCII, Python writes U+DC9B as the byte 9b
    "]"
)
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\N{SYMBOL FOR DELETE}"}


def replace_control_characters(text: str) -> str:
    """Replace each control character but newline and tab by one visible character, such as ``␛``."""
    return _CONTROL.sub(lambda found: _PICTURES.get(ord(found[0]), "\N{REPLACEMENT CHARACTER}"), text)
