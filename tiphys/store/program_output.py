"""The output of a training program as the program stored it, which outlives its pod and Argo's archive.

An object cannot be appended to, so the output is stored in chunks, and the last
chunk grows by versions: a version holds all of the chunk so far, and once it is
stored the one before is deleted. Readers take the highest version of each chunk.
Keys are ``data/runs/<run>/output/<step>/<attempt>/<chunk>-<version>.log``.
"""

import re
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.store.base import Store
from tiphys.store.layout import RunLayout

GAP_LINE = "… a part of the output was not kept …\n"
_KEY = re.compile(r"/(\d{9})-(\d{9})\.log$")


class OutputChunk(NamedTuple):
    """The newest version of a chunk."""

    number: int
    key: str
    size_bytes: int


def chunk_key(layout: RunLayout, step: str, attempt: int, chunk: int, version: int) -> str:
    """Key of a version of a chunk; versions of a chunk sort in the order of their numbers."""
    return f"{layout.program_output(step, attempt)}{chunk:09}-{version:09}.log"


def list_output_chunks(store: Store, layout: RunLayout, step: str, attempt: int) -> list[OutputChunk]:
    """The chunks of an attempt in their order; empty if its program stored none."""
    newest: dict[int, OutputChunk] = {}
    for info in store.list(layout.program_output(step, attempt)):
        if match := _KEY.search(info.key):
            newest[int(match[1])] = OutputChunk(int(match[1]), info.key, info.size)
    return list(newest.values())


def read_program_output(
    store: Store,
    layout: RunLayout,
    step: str,
    attempt: int,
    *,
    last_lines: int | None = None,
    last_bytes: int | None = None,
) -> list[str]:
    """The end of an attempt's stored output: its lines, each with its line break.

    Without ``last_lines`` all are returned. After ``last_bytes`` no older chunk is read.
    """
    parts: list[bytes] = []
    following: int | None = None
    lines, total_bytes = 0, 0
    for chunk in reversed(list_output_chunks(store, layout, step, attempt)):
        is_enough = last_bytes is not None and total_bytes >= last_bytes
        if is_enough or (last_lines is not None and lines > last_lines):
            break
        if following is not None and chunk.number != following - 1:
            parts.append(GAP_LINE.encode())
        following = chunk.number
        parts.append(_read(store, chunk.key))
        total_bytes += chunk.size_bytes
        lines += parts[-1].count(b"\n")
    # Decoded as a whole: a line that is longer than a chunk is cut anywhere, also within a character.
    found = b"".join(reversed(parts)).decode(errors="replace").splitlines(keepends=True)
    return found if last_lines is None else found[max(0, len(found) - last_lines) :]


def _read(store: Store, key: str) -> bytes:
    try:
        return store.read(key)
    except NotFoundError:  # a newer version was stored since the listing
        prefix = key.rpartition("-")[0]
        newest = [info.key for info in store.list(f"{prefix}-")]
        return store.read(newest[-1]) if newest else b""
