"""Compares the outputs of an attempt with its end record, which holds their hashes, from a listing.

Programs can replace an output by other bytes of the same size. What the store keeps
about the bytes then differs from the record, so the object is hashed again. After a
store was copied elsewhere it differs, too, and the hashes are the same.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tiphys.errors import UNKEPT_OUTPUT, ObjectMissingError, UsageError
from tiphys.records import AttemptEnd, OutputObject, json_digest
from tiphys.store.base import LONGEST_KEY_BYTES, ObjectInfo, Store, is_unicode
from tiphys.store.layout import RunLayout


def outputs_digest(rows: Iterable[tuple[str, int] | tuple[str, int, str]]) -> str:
    """SHA-256 of a listing of the outputs of an attempt, independent of its order.

    Each row holds the key relative to `RunLayout.outputs`, the size in bytes, and the version if the store keeps one.
    """
    return json_digest(sorted([field for field in row if field != ""] for row in rows))


def list_outputs(store: Store, end: AttemptEnd) -> dict[str, ObjectInfo]:
    """The listed outputs of the attempt of ``end``, by key."""
    return {info.key: info for info in store.list(outputs_prefix(end))}


def outputs_prefix(end: AttemptEnd) -> str:
    """Prefix of the keys of the outputs of the attempt of ``end``, with a final slash."""
    return end.outputs_prefix or RunLayout(end.run).outputs(end.step, end.attempt)


def find_output_fault(end: AttemptEnd, listed: Mapping[str, ObjectInfo]) -> str | None:
    """The first fault of a finished result; None if its objects are complete.

    ``listed`` are the outputs of the attempt, by key.
    """
    own = outputs_prefix(end)
    for output in end.outputs:
        if not output.key.startswith(own):
            return f"its record names {output.key}, which this attempt did not write"
    for expected in (obj for output in end.outputs for obj in output.objects):
        info = listed.get(expected.key)
        if info is None:
            return f"{expected.key} is missing"
        if info.size != expected.size:
            return f"{expected.key} has {info.size} bytes, its record says {expected.size}"
        if _is_changed(expected, info):
            return f"{expected.key} was written again with other bytes after it was verified"
    return None


def is_checked_by_size(objects: Iterable[ObjectInfo | OutputObject]) -> bool:
    """Whether nothing but the size of one of these objects can be compared."""
    return any(not entry.version for entry in objects)


def find_changed_outputs(end: AttemptEnd, listed: Mapping[str, ObjectInfo]) -> list[ObjectInfo]:
    """Objects of the recorded size that were written again since their hashes were recorded."""
    expected = {obj.key: obj for output in end.outputs for obj in output.objects}
    same_size = (info for key, info in listed.items() if key in expected and info.size == expected[key].size)
    return [info for info in same_size if _is_changed(expected[info.key], info)]


def confirm_outputs(
    end: AttemptEnd, listed: Mapping[str, ObjectInfo], hash_object: Callable[[str], str]
) -> dict[str, ObjectInfo]:
    """``listed`` with the recorded version of each object that was written again with the recorded bytes.

    An object that is gone meanwhile is left out.

    ``hash_object`` returns the SHA-256 of the object of a key in hex; it is called for objects that were written again.
    """
    recorded, confirmed = {obj.key: obj for output in end.outputs for obj in output.objects}, dict(listed)
    for info in find_changed_outputs(end, listed):
        try:
            if hash_object(info.key) == recorded[info.key].sha256:
                confirmed[info.key] = info._replace(version=recorded[info.key].version)
        except ObjectMissingError:
            del confirmed[info.key]
    return confirmed


def list_confirmed_outputs(store: Store, end: AttemptEnd) -> dict[str, ObjectInfo]:
    """`list_outputs`, after `confirm_outputs` has read what was written again."""
    return confirm_outputs(end, list_outputs(store, end), partial(hash_object, store))


def hash_object(store: Store, key: str) -> str:
    """SHA-256 of an object in hex; reads all of it.

    Raises:
        ObjectMissingError: there is no such object.
    """
    sha256 = hashlib.sha256()
    for chunk in store.chunks(key):
        sha256.update(chunk)
    return sha256.hexdigest()


def _is_changed(expected: OutputObject, info: ObjectInfo) -> bool:
    return "" not in (expected.version, info.version) and expected.version != info.version


def list_output_files(path: Path, key: str, output: str, *, copies_links: bool = False) -> list[tuple[Path, str]]:
    """Each file of an output with the key to store it as; empty if there is nothing at ``path``.

    Object storage has files only: Argo drops links without a word, and reports a wrong name as an error of its own.

    ``key`` is that of the file, or the beginning of the keys of the files in the folder. With ``copies_links`` a link
    to a file of the same folder is stored as that file.

    Raises:
        UsageError: an entry is another link in a folder or no file, or its name is not valid in every store.
    """
    if not path.is_dir() or path.is_symlink():
        if path.exists() and not path.is_file():
            raise _unkept(output, path.name, "is a link to a folder, a socket or a device", "write files there")
        return [(path, key)] if path.exists() else []
    files = sorted(_walk(path, output, path.resolve() if copies_links else None))
    objects = [(file, f"{key}/{file.relative_to(path).as_posix()}") for file in files]
    for file, object_key in objects:
        name = str(file.relative_to(path))
        if not is_unicode(name):
            raise _unkept(output, repr(os.fsencode(name))[1:], "has a name that is not UTF-8", "rename the file")
        if (size := len(object_key.encode())) > LONGEST_KEY_BYTES:
            reason = f"has a key of {size:,} bytes, {size - LONGEST_KEY_BYTES:,} too many"
            raise _unkept(output, repr(name), reason, "shorten the name")
    return objects


def _walk(folder: Path, output: str, copied_below: Path | None) -> Iterator[Path]:
    """Files of a folder; a link to a file below ``copied_below`` is one, too."""
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                yield from _walk(Path(entry.path), output, copied_below)
            elif stat.S_ISREG(mode) or (copied_below and _leads_to_file(Path(entry.path), copied_below)):
                yield Path(entry.path)
            elif stat.S_ISLNK(mode):
                link = f"{entry.name} -> {Path(entry.path).readlink()}"
                raise _unkept(output, repr(link), "is a link", "write a copy, or pack the folder into a tar file")
            else:
                raise _unkept(output, repr(entry.name), "is a pipe, a socket or a device", "remove it at its end")


def _leads_to_file(link: Path, below: Path) -> bool:
    return link.is_file() and link.resolve().is_relative_to(below)


def _unkept(output: str, name: str, reason: str, remedy: str) -> UsageError:
    return UsageError(f"{output}: {name} {reason}, which {UNKEPT_OUTPUT}; let the program {remedy}")
