"""Probe of a store: checks the guarantees that all of Tiphys depends on.

Some servers ignore the condition of a write, and some let several writers of a
race win. Neither a setting nor a single write shows this. The probe therefore
performs the operations, on keys that it removes afterwards. Stores in a bucket
get additional checks: uploads in parts, checksums, clock skew (S3), and folders
that are objects (Azure).
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def measure_clock_skew_seconds(store: S3Store, now: Callable[[], datetime]) -> float:
    """Absolute difference between this machine's clock and the server's, in whole seconds as HTTP reports them."""
    with store.translate_errors("list"):
        reply = store.client.list_objects_v2(Bucket=store.bucket, Prefix=store.artifact_key("clock"), MaxKeys=1)
    date = parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
    return abs((date - now()).total_seconds())


WRITERS_PER_RACE = 8
RACES = 20
# Small, so that a few objects fill several pages.
_PAGE_SIZE = 4
_WARN_SKEW_SECONDS = 60.0
# In bytewise order of the whole key; a server that sorts by folder or by locale returns another order.
_ORDERED = ("A/1", "a-b", "a.b/1", "a/1", "a/2", "a/b/1", "a0", "b", "é/1", "日本/1")


class ProbeFinding(NamedTuple):
    """The outcome of one check. ``ok`` is None for a warning."""

    name: str
    ok: bool | None
    sentence: str


class CheckResult(NamedTuple):
    """A finding without the name of its check."""

    ok: bool | None
    sentence: str


ProbeCheck = tuple[str, Callable[[], CheckResult]]


def probe_store(
    store_url: str,
    halves: Sequence[StoreHalf] = (CONTROL, DATA),
    *,
    races: int = RACES,
    now: Callable[[], datetime] = utc_now,
) -> list[ProbeFinding]:
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
    checks = [*_store_checks(store, folders[first], races), *_bucket_checks(store, folders[first], now)]
    checks += [(half.rstrip("/"), partial(_read_after_write, store, f"{folders[half]}fresh/")) for half in others]
    findings: list[ProbeFinding] = []
    try:
        findings.extend(_run_checks(checks))
    finally:
        findings.append(_remove_probe_objects(store, folders.values()))
    return findings


def is_store_usable(findings: Iterable[ProbeFinding]) -> bool:
    """Whether the store may hold runs: no check failed. Warnings do not count."""
    return all(finding.ok is not False for finding in findings)


def _store_checks(store: Store, folder: str, races: int) -> list[ProbeCheck]:
    paged = store.with_page_size(_PAGE_SIZE) if isinstance(store, BucketStore) else store
    return [
        ("create-only", partial(_create_only, store, f"{folder}once")),
        ("race", partial(_check_races, store, f"{folder}race/", races)),
        ("read-after-write", partial(_read_after_write, store, f"{folder}fresh/")),
        ("listing", partial(_listing, paged, f"{folder}list/")),
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


def _create_only(store: Store, key: str) -> CheckResult:
    store.create(key, b"first")
    with contextlib.suppress(ObjectExistsError):
        store.create(key, b"second")
        condition = "ifGenerationMatch" if isinstance(store, GcsStore) else "If-None-Match"
        return CheckResult(False, f"a second write of the same key was accepted: the server ignores {condition}")
    if store.read(key) != b"first":
        return CheckResult(False, "a second write of the same key was refused, and changed the object all the same")
    return CheckResult(True, "a second write of the same key is refused and changes nothing")


def _check_races(store: Store, folder: str, count: int) -> CheckResult:
    with ThreadPoolExecutor(WRITERS_PER_RACE) as pool:
        races = [_run_race(store, f"{folder}{number:02d}", pool) for number in range(count)]
    if unfair := [race for race in races if not race.is_fair]:
        most = max(len(race.winners) for race in unfair)
        return CheckResult(
            False, f"in {len(unfair)} of {count} races of {WRITERS_PER_RACE} writers, up to {most} writers won"
        )
    return CheckResult(True, f"one of {WRITERS_PER_RACE} writers won each of {count} races, and its bytes stayed")


def _read_after_write(store: Store, folder: str) -> CheckResult:
    for number in range(WRITERS_PER_RACE):
        key = f"{folder}{number}"
        store.create(key, data := str(number).encode())
        if store.read(key) != data or [info.key for info in store.list(key)] != [key]:
            return CheckResult(False, "a new object was not listed, or was read with other bytes")
        store.delete(key)
        if list(store.list(key)):
            return CheckResult(False, "a deleted object was still listed")
    return CheckResult(True, "reads and listings show a write or a deletion at once")


def _listing(store: Store, folder: str) -> CheckResult:
    expected = [folder + name for name in _ORDERED]
    for key in reversed(expected):
        store.create(key, b"")
    listed = [info.key for info in store.list(folder)]
    if sorted(listed) != sorted(expected):
        return CheckResult(False, f"{len(expected)} objects were written, and {len(listed)} listed")
    if listed != expected:
        return CheckResult(False, "listings are not in ascending order of the whole key, bytewise")
    return CheckResult(True, "listings are complete, and in bytewise order of the whole key")


def _checksum(store: BucketStore, key: str) -> CheckResult:
    if store.is_checksum_verified(key):
        return CheckResult(True, "the server refuses bytes that do not match the checksum sent with them")
    return CheckResult(
        None, "not verified by the server: bytes damaged on the way are stored, and noticed only when read"
    )


def _flat_namespace(store: AzureStore) -> CheckResult:
    try:
        has_hierarchy = store.has_hierarchy()
    except ForbiddenError as error:
        return CheckResult(None, f"whether the account has a hierarchical namespace could not be read: {error}")
    if has_hierarchy:
        return CheckResult(
            False,
            "the account has a hierarchical namespace, whose folders are listed as objects and stay after a deletion: "
            "use an account without one",
        )
    return CheckResult(True, "the account has no hierarchical namespace")


def _clock(store: S3Store, now: Callable[[], datetime]) -> CheckResult:
    skew = measure_clock_skew_seconds(store, now)
    if skew > _WARN_SKEW_SECONDS:
        return CheckResult(
            None, f"this machine's clock is {skew:,.0f} s off the server's; S3 refuses requests from 900 s on"
        )
    return CheckResult(True, f"the clocks of this machine and of the server agree within {_WARN_SKEW_SECONDS:.0f} s")


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


def _run_checks(checks: Iterable[ProbeCheck]) -> Iterator[ProbeFinding]:
    for name, check in checks:
        try:
            yield ProbeFinding(name, *check())
        except TiphysError as error:
            # Further checks would fail in the same way, after the same retries.
            yield ProbeFinding(name, False, str(error))
            return


def _remove_probe_objects(store: Store, folders: Iterable[str]) -> ProbeFinding:
    for folder in folders:
        try:
            for info in list(store.list(folder)):
                store.delete(info.key)
        except TiphysError as error:
            return ProbeFinding("clean-up", None, f"objects of this probe are left below {folder}: {error}")
    return ProbeFinding("clean-up", True, "all objects of this probe are removed")
