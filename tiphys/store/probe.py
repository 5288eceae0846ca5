"""May this storage be trusted with runs? Every promise Tiphys makes rests on its answers.

Some servers that speak S3 ignore ``If-None-Match``, and some let several
writers of a race win. No setting shows it and no single write does; so it is
tried out, on keys that are removed again.

Questions that `tiphys.store.probe` asks of S3 alone.
"""

import base64
import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from threading import Barrier
from typing import NamedTuple

from botocore.exceptions import ClientError

from tiphys.errors import ObjectExistsError, TiphysError
from tiphys.records import utc_now
from tiphys.store.base import Store
from tiphys.store.open import open_store
from tiphys.store.s3 import S3Store, Upload


def in_parts(store: S3Store) -> S3Store:
    """The same store, sending everything in parts.

    Servers that make a PUT conditional may still ignore the condition of a
    completion, and large shards of a checkpoint rest on it.
    """
    return store.varied(upload=Upload(multipart_bytes=1))


def checksum_is_verified(store: S3Store, key: str) -> bool:
    """Whether the server refuses bytes that do not match the SHA-256 sent with them."""
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    with store.explained("create", key):
        try:
            store.client.put_object(
                Bucket=store.bucket, Key=store.artifact_key(key), Body=b"bytes", ChecksumSHA256=wrong
            )
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 400:
                raise
            return True
    return False


def clock_skew_seconds(store: S3Store, now: Callable[[], datetime]) -> float:
    """How far this machine's clock is off the server's, either way. HTTP tells whole seconds."""
    with store.explained("list"):
        reply = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store.artifact_key("clock"), MaxKeys=1)
    date = parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
    return abs((date - now()).total_seconds())


RACERS = 8
RACES = 20
PROBE_FOLDER = ".tiphys-probe/"
# So small that a few objects make several pages.
_PAGE_SIZE = 4
_WARN_SKEW_SECONDS = 60.0
# In bytewise order of the whole key; a server that sorts folder by folder, or by locale, gets it wrong.
_ORDERED = ("A/1", "a-b", "a.b/1", "a/1", "a/2", "a/b/1", "a0", "b", "é/1", "日本/1")


class Finding(NamedTuple):
    """The outcome of one check. ``ok`` is None for a warning that does not stop anybody."""

    name: str
    ok: bool | None
    sentence: str


class Answer(NamedTuple):
    """A finding whose name the caller knows."""

    ok: bool | None
    sentence: str


Check = tuple[str, Callable[[], Answer]]


def probe(store_url: str, *, races: int = RACES, now: Callable[[], datetime] = utc_now) -> list[Finding]:
    """Examine a store by writing below ``.tiphys-probe/`` and removing it again.

    Args:
        store_url: As for `open_store`.
        races: How often several writers race for one key. Bad servers were
            caught within the first few.
        now: The clock to compare with the server's.

    Raises:
        UsageError: no store can have this URL.
        NotFoundError: there is no such folder or bucket.
        StoreError: storage is out of reach.
    """
    store = open_store(store_url, must_exist=True)
    folder = f"{PROBE_FOLDER}{secrets.token_hex(8)}/"
    checks = [*_checks(store, folder, races), *_s3_checks(store, folder, now)]
    findings: list[Finding] = []
    try:
        findings.extend(_run(checks))
    finally:
        findings.append(_clean(store, folder))
    return findings


def verdict(findings: Iterable[Finding]) -> bool:
    """Whether the store may hold runs: nothing failed. Warnings do not count."""
    return all(finding.ok is not False for finding in findings)


def _checks(store: Store, folder: str, races: int) -> list[Check]:
    paged = store.varied(page_size=_PAGE_SIZE) if isinstance(store, S3Store) else store
    return [
        ("create-only", partial(_create_only, store, f"{folder}once")),
        ("race", partial(_races, store, f"{folder}race/", races)),
        ("read-after-write", partial(_read_after_write, store, f"{folder}fresh/")),
        ("listing", partial(_listing, paged, f"{folder}list/")),
    ]


def _s3_checks(store: Store, folder: str, now: Callable[[], datetime]) -> list[Check]:
    if not isinstance(store, S3Store):
        return []
    return [
        ("create-only-parts", partial(_create_only, in_parts(store), f"{folder}parts")),
        ("checksum", partial(_checksum, store, f"{folder}checksum")),
        ("clock", partial(_clock, store, now)),
    ]


def _create_only(store: Store, key: str) -> Answer:
    store.create(key, b"first")
    with contextlib.suppress(ObjectExistsError):
        store.create(key, b"second")
        return Answer(False, "a second write of the same key was accepted: the server ignores If-None-Match")
    if store.read(key) != b"first":
        return Answer(False, "a second write of the same key was refused, and changed the object all the same")
    return Answer(True, "a second write of the same key is refused and changes nothing")


def _races(store: Store, folder: str, count: int) -> Answer:
    with ThreadPoolExecutor(RACERS) as pool:
        races = [_race(store, f"{folder}{number:02d}", pool) for number in range(count)]
    if unfair := [race for race in races if not race.fair]:
        most = max(len(race.winners) for race in unfair)
        return Answer(
            False, f"in {len(unfair)} of {count} races of {RACERS} writers, up to {most} were told that they had won"
        )
    return Answer(True, f"one of {RACERS} writers won each of {count} races, and its bytes stayed")


def _read_after_write(store: Store, folder: str) -> Answer:
    for number in range(RACERS):
        key = f"{folder}{number}"
        store.create(key, data := str(number).encode())
        if store.read(key) != data or [info.key for info in store.list(key)] != [key]:
            return Answer(False, "an object just written was not listed, or not read as it was written")
        store.delete(key)
        if list(store.list(key)):
            return Answer(False, "an object just deleted was still listed")
    return Answer(True, "reads and listings show a write or a deletion at once")


def _listing(store: Store, folder: str) -> Answer:
    wanted = [folder + name for name in _ORDERED]
    for key in reversed(wanted):
        store.create(key, b"")
    listed = [info.key for info in store.list(folder)]
    if sorted(listed) != sorted(wanted):
        return Answer(False, f"{len(wanted)} objects were written, and {len(listed)} listed")
    if listed != wanted:
        return Answer(False, "listings are not in ascending order of the whole key, bytewise")
    return Answer(True, "listings are complete, and in bytewise order of the whole key")


def _checksum(store: S3Store, key: str) -> Answer:
    if checksum_is_verified(store, key):
        return Answer(True, "the server refuses bytes that do not match the SHA-256 sent with them")
    return Answer(None, "not verified by the server: bytes damaged on the way are stored, and noticed only when read")


def _clock(store: S3Store, now: Callable[[], datetime]) -> Answer:
    skew = clock_skew_seconds(store, now)
    if skew > _WARN_SKEW_SECONDS:
        return Answer(
            None, f"this machine's clock is {skew:,.0f} s off the server's; S3 refuses requests from 900 s on"
        )
    return Answer(True, f"the clocks of this machine and of the server agree within {_WARN_SKEW_SECONDS:.0f} s")


class _Race(NamedTuple):
    winners: list[bytes]
    kept: bytes

    @property
    def fair(self) -> bool:
        # None where the winner's reply was lost: then its own repetition was refused.
        return len(self.winners) <= 1 and self.kept in (self.winners or [self.kept])


def _race(store: Store, key: str, pool: ThreadPoolExecutor) -> _Race:
    start = Barrier(RACERS)

    def write(data: bytes) -> bool:
        start.wait()
        try:
            store.create(key, data)
        except ObjectExistsError:
            return False
        return True

    racers = [f"racer {number}".encode() for number in range(RACERS)]
    won = list(pool.map(write, racers))
    return _Race([data for data, one in zip(racers, won, strict=True) if one], store.read(key))


def _run(checks: Iterable[Check]) -> Iterator[Finding]:
    for name, check in checks:
        try:
            yield Finding(name, *check())
        except TiphysError as error:
            # The next check would meet the same wall, after the same retries.
            yield Finding(name, False, str(error))
            return


def _clean(store: Store, folder: str) -> Finding:
    try:
        for info in list(store.list(folder)):
            store.delete(info.key)
    except TiphysError as error:
        return Finding("clean-up", None, f"what this probe wrote is still below {folder}: {error}")
    return Finding("clean-up", True, "everything this probe wrote is removed")
