"""Compares the outputs of an attempt with its end record, which holds their hashes, from a listing.

Programs can replace an output by other bytes of the same size. What the store keeps
about the bytes then differs from the record, so the object is hashed again. After a
store was copied elsewhere it differs, too, and the hashes are the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tiphys.errors import ObjectMissingError
from tiphys.records import AttemptEnd, OutputObject, json_digest
from tiphys.store.base import ObjectInfo, Store
from tiphys.store.layout import RunLayout


def outputs_digest(rows: Iterable[tuple[str, int] | tuple[str, int, str]]) -> str:
    """SHA-256 of a listing of the outputs of an attempt, independent of its order.

    Each row holds the key relative to `RunLayout.outputs`, the size in bytes, and the version if the store keeps one.
    """
    return json_digest(sorted([field for field in row if field != ""] for row in rows))


def list_outputs(store: Store, end: AttemptEnd) -> dict[str, ObjectInfo]:
    """The listed outputs of the attempt of ``end``, by key."""
    return {info.key: info for info in store.list(RunLayout(end.run).outputs(end.step, end.attempt))}


def find_output_fault(end: AttemptEnd, listed: Mapping[str, ObjectInfo]) -> str | None:
    """The first fault of a finished result; None if its objects are complete.

    ``listed`` are the outputs of the attempt, by key.
    """
    own = RunLayout(end.run).outputs(end.step, end.attempt)
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

    Args:
        end: The end record.
        listed: The outputs of the attempt, by key.
        hash_object: Returns the SHA-256 of the object of a key in hex. Called for objects that were written again.
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
