"""The probe accepts stores that keep the promises and refuses those that do not.

| store | verdict |
|---|---|
| folder; moto | accepted (moto with a warning: it does not check SHA-256) |
| ignores the condition; on parts only; lets racers win | refused |
| changes what it refuses to change; stale, incomplete or unsorted listings | refused |
| clock off; wrong checksum stored; objects cannot be deleted | accepted with a warning |
"""

import base64
import hashlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.servers import http
from support.servers import s3_proxy as faults
from support.servers.s3_proxy import S3Proxy
from tiphys_controller.doctor import Finding, failed_checks, store_probe
from tiphys_controller.doctor.check import failed, passed, warning
from tiphys_controller.doctor.store_probe import WRITERS_PER_RACE, probe_store

from tiphys.errors import NotFoundError, ObjectExistsError, StoreError
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, ObjectInfo, S3Store

# Enough to catch the bad servers here; the default is for those that lose a race seldom.
RACES = 1


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


@pytest.fixture
def proxy(bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with faults.s3_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


class TestGoodStores:
    def test_a_folder_is_accepted_and_left_as_it_was(self, tmp_path: Path) -> None:
        DirectoryStore(tmp_path).create("control/runs/a/run.json", b"")

        findings = probe_store(str(tmp_path))

        assert not failed_checks(findings)
        assert [(f.check, f.state) for f in findings] == [
            ("create-only", "ok"),
            ("race", "ok"),
            ("read-after-write", "ok"),
            ("listing", "ok"),
            ("data", "ok"),
            ("clean-up", "ok"),
        ]
        assert [info.key for info in DirectoryStore(tmp_path).list("")] == ["control/runs/a/run.json"]

    def test_moto_is_accepted_with_the_warning_it_deserves(self, bucket: str) -> None:
        S3Store(bucket).create("p/control/runs/a", b"")

        findings = probe_store(f"s3://{bucket}/p", races=RACES)

        assert not failed_checks(findings)
        assert {f.check for f in findings if f.state == "warning"} == {"checksum"}
        assert "not verified by the server" in by_name(findings)["checksum"].sentence
        assert by_name(findings)["create-only-parts"].state == "ok"
        assert [info.key for info in S3Store(bucket).list("")] == ["p/control/runs/a"]

    def test_a_store_that_is_not_there_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            probe_store(str(tmp_path / "absent"))

        assert list(tmp_path.iterdir()) == []


class TestBadServers:
    def test_a_server_that_ignores_the_condition_is_refused(self, bucket: str, proxy: S3Proxy) -> None:
        proxy.behaviour = faults.ignores_conditions

        findings = probe_store(f"s3://{bucket}", races=RACES)

        assert failed_checks(findings)
        assert {f.check for f in findings if f.state == "failed"} == {"create-only", "race", "create-only-parts"}
        assert "ignores If-None-Match" in by_name(findings)["create-only"].sentence

    def test_a_server_that_lets_several_racers_win_is_refused_for_that_alone(self, bucket: str, proxy: S3Proxy) -> None:
        proxy.behaviour = faults.LetsRacersWin(WRITERS_PER_RACE)

        findings = probe_store(f"s3://{bucket}", races=RACES)

        assert failed_checks(findings)
        assert {f.check for f in findings if f.state == "failed"} == {"race"}
        assert "writers won" in by_name(findings)["race"].sentence

    def test_a_server_that_ignores_the_condition_of_uploads_in_parts_is_refused(
        self, bucket: str, proxy: S3Proxy
    ) -> None:
        def only_of_completions(request: faults.Request, forward: faults.Forward) -> faults.Reply:
            return forward(request.without("if-none-match") if faults.is_completion(request) else request)

        proxy.behaviour = only_of_completions

        findings = probe_store(f"s3://{bucket}", races=RACES)

        assert {f.check for f in findings if f.state == "failed"} == {"create-only-parts"}
        assert failed_checks(findings)

    def test_a_server_that_refuses_every_write_is_asked_once(self, bucket: str, proxy: S3Proxy) -> None:
        def read_only(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            bad = faults.refuses(403, "AccessDenied") if faults.is_write(request) else faults.honest
            return bad(request, forward)

        proxy.behaviour = read_only

        first, clean_up = probe_store(f"s3://{bucket}", races=RACES)

        assert (first.check, first.state, clean_up.state) == ("create-only", "failed", "ok")
        assert "credentials in use may not create" in first.sentence

    def test_a_server_that_checks_sha256_passes_the_checksum_probe(self, bucket: str, proxy: S3Proxy) -> None:
        def strict(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            declared = request.headers.get("x-amz-checksum-sha256")
            actual = base64.b64encode(hashlib.sha256(request.body).digest()).decode()
            good = declared in (None, actual)
            return forward(request) if good else faults.refuses(400, "BadDigest")(request, forward)

        proxy.behaviour = strict

        assert by_name(probe_store(f"s3://{bucket}", races=RACES))["checksum"].state == "ok"

    def test_an_error_that_is_no_verdict_on_the_checksum_is_not_taken_for_one(
        self, bucket: str, proxy: S3Proxy
    ) -> None:
        def forbids(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            bad = faults.refuses(403, "AccessDenied") if request.path.endswith("checksum") else faults.honest
            return bad(request, forward)

        proxy.behaviour = forbids

        assert by_name(probe_store(f"s3://{bucket}", races=RACES))["checksum"].state == "failed"

    @pytest.mark.parametrize(("minutes", "state"), [(0, "ok"), (-10, "warning"), (10, "warning")])
    def test_a_clock_that_is_off_is_a_warning(self, bucket: str, minutes: int, state: str) -> None:
        findings = probe_store(f"s3://{bucket}", races=RACES, now=lambda: utc_now() + timedelta(minutes=minutes))

        assert by_name(findings)["clock"].state == state
        assert not failed_checks(findings)


class Overwriting(DirectoryStore):
    """Says that the key is taken, and overwrites it."""

    def create(self, key: str, data: bytes) -> None:
        try:
            super().create(key, data)
        except ObjectExistsError:
            self.delete(key)
            super().create(key, data)
            raise


class KeepsNobodysBytes(DirectoryStore):
    """One racer wins, and yet other bytes are kept."""

    def read(self, key: str) -> bytes:
        return b"else" if "/race/" in key else super().read(key)


class StaleListing(DirectoryStore):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(()) if "/fresh/" in prefix else super().list(prefix)


class ListsDeleted(DirectoryStore):
    def delete(self, key: str) -> None:
        if "/fresh/" not in key:
            super().delete(key)


class FirstPageOnly(DirectoryStore):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return itertools.islice(super().list(prefix), 4)


class SortsByFolder(DirectoryStore):
    """As a server that walks a file system: ``a/1`` before ``a-b``."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(sorted(super().list(prefix), key=lambda info: info.key.split("/")))


class KeepsEverything(DirectoryStore):
    def delete(self, key: str) -> None:
        if "/list/" in key:
            raise StoreError("may not delete")
        super().delete(key)


class TestBadStores:
    @pytest.fixture(autouse=True)
    def opened(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def open_bad(url: str, **options: Any) -> DirectoryStore:
            return {c.__name__: c for c in DirectoryStore.__subclasses__()}[url](tmp_path)

        monkeypatch.setattr(store_probe, "open_store", open_bad)

    @pytest.mark.parametrize(
        ("kind", "check", "sentence"),
        [
            (Overwriting, "create-only", "changed the object all the same"),
            (KeepsNobodysBytes, "race", "in 20 of 20 races"),
            (StaleListing, "read-after-write", "not listed"),
            (ListsDeleted, "read-after-write", "a deleted object was still listed"),
            (FirstPageOnly, "listing", "10 objects were written, and 4 listed"),
            (SortsByFolder, "listing", "not in ascending order"),
        ],
    )
    def test_a_store_that_breaks_a_promise_is_refused(
        self, kind: type[DirectoryStore], check: str, sentence: str
    ) -> None:
        findings = probe_store(kind.__name__)

        assert by_name(findings)[check].state == "failed"
        assert sentence in by_name(findings)[check].sentence
        assert failed_checks(findings)

    def test_a_store_that_cannot_delete_is_accepted_with_the_keys_that_are_left(self) -> None:
        findings = probe_store(KeepsEverything.__name__)

        assert not failed_checks(findings)
        assert by_name(findings)["clean-up"].state == "warning"
        assert "are left below control/probe/" in by_name(findings)["clean-up"].sentence


def test_warnings_do_not_refuse_a_store_and_failures_do() -> None:
    good, doubtful, bad = passed("")._replace(check="a"), warning("", ""), failed("", "")._replace(check="c")

    assert failed_checks([good, doubtful]) == []
    assert failed_checks([good, doubtful, bad]) == ["c"]


def test_a_probe_writes_below_a_folder_of_its_own(bucket: str, proxy: S3Proxy) -> None:
    probe_store(f"s3://{bucket}/p", races=RACES)
    probe_store(f"s3://{bucket}/p", races=RACES)

    written = [r.path for r in proxy.requests if faults.is_write(r)]
    folders = {tuple(path.removeprefix(f"/{bucket}/p/").split("/")[:3]) for path in written}
    assert {(half, probe) for half, probe, _ in folders} == {("control", "probe"), ("data", "probe")}
    assert len({nonce for _, _, nonce in folders}) == 2
    assert http.get(f"{proxy.url}/{bucket}?list-type=2").text.count("<Key>") == 0
