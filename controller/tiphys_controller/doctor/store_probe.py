"""Probe of a store: checks the guarantees that all of Tiphys depends on.

Some servers ignore the condition of a write, and some let several writers of a
race win. Neither a setting nor a single write shows this. The probe therefore
performs the operations, on keys that it removes afterwards. Stores in a bucket
get additional checks: uploads in parts, checksums, clock skew (S3), and folders
that are objects (Azure).
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from threading import Barrier
from typing import NamedTuple

from tiphys.errors import ForbiddenError, ObjectExistsError, TiphysError
from tiphys.records import utc_now
from tiphys.store.base import Store
from tiphys.store.buckets.azure import AzureStore
from tiphys.store.buckets.bucket_store import BucketStore
from tiphys.store.buckets.gcs import GcsStore
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.layout import CONTROL, DATA, StoreHalf, probe_folder
from tiphys.store.open import open_store
from tiphys_controller.doctor.check import Finding, check, failed, passed, warning


def read_reply_headers(store: S3Store) -> Mapping[str, str]:
    """Headers of the server's reply to a small listing, such as ``date`` and ``server``; names in lower case."""
    with store.translate_errors("list"):
        reply = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store.artifact_key("clock"), MaxKeys=1)
    return reply["ResponseMetadata"]["HTTPHeaders"]


def measure_clock_skew_seconds(store: S3Store, now: Callable[[], datetime]) -> float:
    """Absolute difference between this machine's clock and the server's, in whole seconds as HTTP reports them."""
    return abs((parsedate_to_datetime(read_reply_headers(store)["date"]) - now()).total_seconds())


WRITERS_PER_RACE = 8
RACES = 20
# Small, so that a few objects fill several pages.
_PAGE_SIZE = 4
_WARN_SKEW_SECONDS = 60.0
_REMEDY = "use another store, or repair this one"
# In bytewise order of the whole key; a server that sorts by folder or by locale returns another order.
_ORDERED = ("A/1", "a-b", "a.b/1", "a/1", "a/2", "a/b/1", "a0", "b", "é/1", "日本/1")


ProbeCheck = tuple[str, Callable[[], Finding]]


def probe_store(
    store_url: str,
    halves: Sequence[StoreHalf] = (CONTROL, DATA),
    *,
    races: int = RACES,
    now: Callable[[], datetime] = utc_now,
) -> list[Finding]:
    """Check a store with writes below ``probe/`` in its halves, which are removed afterwards.

    Args:
        store_url: As for `open_store`.
        halves: Halves that the credentials in use must be able to write. All checks run in the first.
        races: Number of races of several writers for one key. Faulty servers
            fail within the first few.
        now: The clock to compare with the server's.

    Raises:
        UsageError: the URL is not valid.
        NotFoundError: the folder or bucket is missing.
        StoreError: storage is unavailable.
    """
    store = open_store(store_url, must_exist=True)
    nonce = secrets.token_hex(8)
    folders = {half: probe_folder(half, nonce) for half in halves}
    first, *others = halves
    checks = list_probe_checks(store, folders[first], races=races, now=now)
    checks += [(half.rstrip("/"), partial(_read_after_write, store, f"{folders[half]}fresh/")) for half in others]
    findings: list[Finding] = []
    try:
        findings.extend(_run_checks(checks))
    finally:
        findings.extend(_remove_probe_objects(store, folders.values()))
    return findings


def list_probe_checks(
    store: Store, folder: str, *, races: int = RACES, now: Callable[[], datetime] = utc_now
) -> list[ProbeCheck]:
    """The checks of a store, which write below ``folder``; each raises `TiphysError` if it gets no answer."""
    paged = store.with_page_size(_PAGE_SIZE) if isinstance(store, BucketStore) else store
    return [
        ("create-only", partial(_create_only, store, f"{folder}once")),
        ("race", partial(_check_races, store, f"{folder}race/", races)),
        ("read-after-write", partial(_read_after_write, store, f"{folder}fresh/")),
        ("listing", partial(_listing, paged, f"{folder}list/")),
        *_bucket_checks(store, folder, now),
    ]


def _bucket_checks(store: Store, folder: str, now: Callable[[], datetime]) -> list[ProbeCheck]:
    if not isinstance(store, BucketStore):
        return []
    checks: list[ProbeCheck] = [
        ("create-only-parts", partial(_create_only, store.with_multipart_uploads(), f"{folder}parts")),
        ("checksum", partial(_checksum, store, f"{folder}checksum")),
    ]
    if isinstance(store, S3Store):
        checks.append(("clock", partial(_clock, store, now)))
    if isinstance(store, AzureStore):
        checks.append(("flat-namespace", partial(_flat_namespace, store)))
    return checks


def _create_only(store: Store, key: str) -> Finding:
    store.create(key, b"first")
    with contextlib.suppress(ObjectExistsError):
        store.create(key, b"second")
        condition = "ifGenerationMatch" if isinstance(store, GcsStore) else "If-None-Match"
        return failed(f"a second write of the same key was accepted: the server ignores {condition}", _REMEDY)
    if store.read(key) != b"first":
        return failed("a second write of the same key was refused, and changed the object all the same", _REMEDY)
    return passed("a second write of the same key is refused and changes nothing")


def _check_races(store: Store, folder: str, count: int) -> Finding:
    with ThreadPoolExecutor(WRITERS_PER_RACE) as pool:
        races = [_run_race(store, f"{folder}{number:02d}", pool) for number in range(count)]
    if unfair := [race for race in races if not race.is_fair]:
        most = max(len(race.winners) for race in unfair)
        sentence = f"in {len(unfair)} of {count} races of {WRITERS_PER_RACE} writers, up to {most} writers won"
        return failed(sentence, _REMEDY)
    return passed(f"one of {WRITERS_PER_RACE} writers won each of {count} races, and its bytes stayed")


def _read_after_write(store: Store, folder: str) -> Finding:
    for number in range(WRITERS_PER_RACE):
        key = f"{folder}{number}"
        store.create(key, data := str(number).encode())
        if store.read(key) != data or [info.key for info in store.list(key)] != [key]:
            return failed("a new object was not listed, or was read with other bytes", _REMEDY)
        store.delete(key)
        if list(store.list(key)):
            return failed("a deleted object was still listed", _REMEDY)
    return passed("reads and listings show a write or a deletion at once")


def _listing(store: Store, folder: str) -> Finding:
    expected = [folder + name for name in _ORDERED]
    for key in reversed(expected):
        store.create(key, b"")
    listed = [info.key for info in store.list(folder)]
    if sorted(listed) != sorted(expected):
        return failed(f"{len(expected)} objects were written, and {len(listed)} listed", _REMEDY)
    if listed != expected:
        return failed("listings are not in ascending order of the whole key, bytewise", _REMEDY)
    return passed("listings are complete, and in bytewise order of the whole key")


def _checksum(store: BucketStore, key: str) -> Finding:
    if store.is_checksum_verified(key):
        return passed("the server refuses bytes that do not match the checksum sent with them")
    return warning("not verified by the server: bytes damaged on the way are stored, and noticed only when read", "")


def _flat_namespace(store: AzureStore) -> Finding:
    try:
        has_hierarchy = store.has_hierarchy()
    except ForbiddenError as error:
        return warning(f"whether the account has a hierarchical namespace could not be read: {error}", "")
    if has_hierarchy:
        return failed(
            "the account has a hierarchical namespace, whose folders are listed as objects and stay after a deletion",
            "use an account without one",
        )
    return passed("the account has no hierarchical namespace")


def _clock(store: S3Store, now: Callable[[], datetime]) -> Finding:
    skew = measure_clock_skew_seconds(store, now)
    if skew > _WARN_SKEW_SECONDS:
        return warning(
            f"this machine's clock is {skew:,.0f} s off the server's; S3 refuses requests from 900 s on",
            "set up time synchronisation on this machine",
        )
    return passed(f"the clocks of this machine and of the server agree within {_WARN_SKEW_SECONDS:.0f} s")


class _Race(NamedTuple):
    winners: list[bytes]
    stored: bytes

    @property
    def is_fair(self) -> bool:
        # There is no winner if the winner's reply was lost: its repeated request was refused.
        return len(self.winners) <= 1 and self.stored in (self.winners or [self.stored])


def _run_race(store: Store, key: str, pool: ThreadPoolExecutor) -> _Race:
    start = Barrier(WRITERS_PER_RACE)

    def write(data: bytes) -> bool:
        start.wait()
        try:
            store.create(key, data)
        except ObjectExistsError:
            return False
        return True

    writers = [f"writer {number}".encode() for number in range(WRITERS_PER_RACE)]
    results = list(pool.map(write, writers))
    return _Race([data for data, has_won in zip(writers, results, strict=True) if has_won], store.read(key))


def _run_checks(checks: Iterable[ProbeCheck]) -> Iterator[Finding]:
    for name, probe in checks:
        try:
            yield probe()._replace(check=name)
        except TiphysError as error:
            # Further checks would fail in the same way, after the same retries.
            yield failed(str(error), _REMEDY)._replace(check=name)
            return


@check("clean-up")
def _remove_probe_objects(store: Store, folders: Iterable[str]) -> Iterator[Finding]:
    for folder in folders:
        try:
            for info in list(store.list(folder)):
                store.delete(info.key)
        except TiphysError as error:
            yield warning(f"objects of this probe are left below {folder}: {error}", "delete them")
            return
    yield passed("all objects of this probe are removed")
