"""What tells more about a file than its times: processes that have it open, and its content.

Only the processes of this machine are visible. For a folder that other machines
write to as well, give a marker.
"""

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tiphys.checkpoint.exec.detect import FolderWriters
from tiphys.checkpoint.exec.files import FileEntry, FolderListing
from tiphys.checkpoint.exec.layouts import POINTER_BYTES, base_name, may_be_pointer, read_pointer

_PROC = Path("/proc")
_PF_EXITING = 4
_JSON_BYTES = 16 << 20
_BEST_MODEL = re.compile(r'"best_model_checkpoint":\s*"([^"]+)"')


def find_writers(folder: Path, proc: Path = _PROC, pids: Collection[int] = ()) -> FolderWriters | None:
    """Return the files below ``folder`` that ``pids``, or all, have open for writing; None if that is unknown."""
    prefix = f"{os.path.realpath(folder)}/"
    parents = {}
    unreadable = set()
    writers: dict[str, str] = {}
    try:
        pids = pids or [int(process.name) for process in proc.iterdir() if process.name.isdecimal()]
    except OSError:
        return None
    for pid in pids:
        process, opened = proc / str(pid), list[str]()
        try:
            if pid == os.getpid() or _read_parent(process)[1] is None:
                continue  # without a look at its files: there may be thousands of zombies
            opened += _open_paths(process, prefix)
        except PermissionError:
            unreadable.add(pid)
        except (OSError, ValueError):
            continue  # the process has ended
        try:
            name, parent = _read_parent(process)
        except (OSError, ValueError):
            continue
        # Read last: a process that ends closes its files before it is gone.
        if parent is not None:
            parents[pid] = parent
        writers |= {path.removeprefix(prefix): f"process {pid} ({name})" for path in opened}
    processes = frozenset(pid for pid in parents if _is_descendant(pid, parents))
    # The processes of other users do not write to this folder, unless they are parts of the program.
    return None if processes & unreadable else FolderWriters(writers, processes)


def _read_parent(process: Path) -> tuple[str, int | None]:
    """Name and parent of a process; no parent if it has ended, or is about to."""
    name, _, fields = (process / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    state, parent, _, _, _, _, flags, *_ = fields.split()
    return name, None if state in "ZX" or int(flags) & _PF_EXITING else int(parent)


def _open_paths(process: Path, prefix: str) -> Iterator[str]:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(descriptor)  # noqa: PTH115  the text is needed, no path
            if path.startswith(prefix):
                flags = re.search(r"flags:\s*([0-7]+)", (process / "fdinfo" / descriptor.name).read_text())
                if flags and int(flags[1], 8) & os.O_ACCMODE:
                    yield path
    for line in (process / "maps").read_text(errors="replace").splitlines():
        if " rw-s " in line and prefix in line:
            yield line[line.index(prefix) :]


def _is_descendant(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def ends_as_written(path: Path) -> bool:
    """Return whether the content shows that the file was written to its end: only some formats tell."""
    try:
        with path.open("rb") as stream:
            start = stream.read(9)
            size = stream.seek(0, os.SEEK_END)
            if start.startswith(b"PK\x03\x04"):  # torch.save, NumPy's npz, Keras: the list of their parts comes last
                with zipfile.ZipFile(path) as archive:
                    return all(part.header_offset + part.compress_size < size for part in archive.infolist())
            if path.suffix == ".safetensors":
                header_bytes = int.from_bytes(start[:8], "little")
                stream.seek(8)
                header = json.loads(stream.read(min(header_bytes, _JSON_BYTES)))
                ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
                return size == 8 + header_bytes + max(ends, default=0)
            if path.suffix == ".json" and size <= _JSON_BYTES:
                stream.seek(0)
                json.loads(stream.read())
                return True
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, NotImplementedError):
        return False
    return False


class PointerReader:
    """Reads small files like ``latest`` again when they change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[FileEntry, str]] = {}

    def read(self, listing: FolderListing) -> dict[str, str]:
        """Return the path or number in each pointer of ``listing``; those without one are left out."""
        previous, self._read = self._read, {}
        for path, entry in listing.items():
            name = base_name(path)
            is_state = name == "trainer_state.json" and entry.size <= _JSON_BYTES
            if entry.kind == "file" and (is_state or (entry.size <= POINTER_BYTES and may_be_pointer(name))):
                known = previous.get(path)
                self._read[path] = known if known and known[0] == entry else (entry, self._find_name(path, is_state))
        return {path: name for path, (_, name) in self._read.items() if name}

    def _find_name(self, path: str, is_state: bool) -> str:
        try:
            text = (self._folder / path).read_text()
        except (OSError, UnicodeDecodeError):
            return ""
        if is_state:
            best = _BEST_MODEL.search(text)
            return base_name(best[1].rstrip("/")) if best else ""
        return read_pointer(text)
