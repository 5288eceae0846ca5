"""What the S3 store does when the network or the server does not do its part.

| what happens | what the caller sees |
|---|---|
| the reply to a write is lost | the write, and `claim` knows that it won |
| 409 on a race | the write |
| reading breaks off | the bytes, read on from there |
| bytes are damaged on the way | IntegrityError |
| 403, no bucket, no connection | StoreError that says what to do |
"""

import gc
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import boto3
import pytest
from support.servers import http
from support.servers import s3_proxy as faults
from support.servers.s3_proxy import S3Proxy, Times

from tiphys.errors import (
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    UsageError,
)
from tiphys.faults import InjectedFaultError
from tiphys.records import SubmissionEnd
from tiphys.store import S3Store, claim_record, open_store
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.buckets.s3 import S3Uploader

MIB = 1 << 20
SMALL_PARTS = S3Uploader(multipart_bytes=5 * MIB, part_bytes=5 * MIB)


@pytest.fixture
def proxy(bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with faults.s3_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


@pytest.fixture
def store(bucket: str, proxy: S3Proxy) -> S3Store:
    return S3Store(bucket, "p", uploader=SMALL_PARTS, sleep=lambda seconds: None)


@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(b"".join(bytes([n]) * MIB for n in range(12)))
    return path


def seal(status: str = "Succeeded") -> SubmissionEnd:
    return SubmissionEnd(run="digits", submission=1, status=status)


def open_uploads(bucket: str) -> list[object]:
    client = boto3.session.Session().client("s3")
    return client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


class TestWriting:
    def test_every_write_is_conditional_and_carries_its_sha256(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("a", b"hello")

        (request,) = proxy.requests
        assert request.headers["if-none-match"] == "*"
        assert request.headers["x-amz-checksum-sha256"] == "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ="
        assert request.body == b"hello"

    def test_a_claim_whose_reply_was_lost_is_known_to_be_ours(self, store: S3Store, proxy: S3Proxy) -> None:
        proxy.behaviour = Times(1, faults.is_write, faults.loses_reply)

        outcome = claim_record(store, "end.json", mine := seal())

        assert proxy.behaviour.happened == 1
        assert outcome == (mine, True)
        assert [r.method for r in proxy.requests] == ["PUT", "PUT", "GET"]

    def test_a_claim_held_by_another_writer_is_not_ours(self, store: S3Store) -> None:
        first = claim_record(store, "end.json", seal())
        second = claim_record(store, "end.json", seal())

        assert (first.is_ours, second.is_ours) == (True, False)
        assert second.record == first.record

    def test_a_request_that_was_lost_is_sent_again(self, store: S3Store, proxy: S3Proxy) -> None:
        proxy.behaviour = Times(2, faults.is_write, faults.drops_connection)

        store.create("a", b"1")

        assert proxy.behaviour.happened == 2
        assert store.read("a") == b"1"

    @pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
    def test_a_conflict_of_racing_writes_is_tried_again(self, store: S3Store, proxy: S3Proxy, code: str) -> None:
        proxy.behaviour = Times(3, faults.is_write, faults.refuses(409, code))

        store.create("a", b"1")

        assert proxy.behaviour.happened == 3
        assert store.read("a") == b"1"

    def test_a_conflict_without_end_is_given_up_after_growing_pauses(self, bucket: str, proxy: S3Proxy) -> None:
        pauses: list[float] = []
        store = S3Store(bucket, sleep=pauses.append)
        proxy.behaviour = faults.refuses(409, "ConditionalRequestConflict")

        with pytest.raises(StoreError, match="409 ConditionalRequestConflict: told to; try again later"):
            store.create("a", b"1")

        assert len(proxy.requests) == 5
        assert [round(pause / 0.1 / 2**turn) for turn, pause in enumerate(pauses)] == pytest.approx([1] * 4, abs=0.5)

    def test_a_server_that_is_busy_is_asked_again(self, store: S3Store, proxy: S3Proxy) -> None:
        proxy.behaviour = Times(1, faults.is_write, faults.refuses(503, "SlowDown"))

        store.create("a", b"1")

        assert proxy.behaviour.happened == 1


class TestWritingInParts:
    def test_a_large_file_becomes_one_object(self, store: S3Store, proxy: S3Proxy, bucket: str, big_file: Path) -> None:
        store.create_from_file("shard", big_file)

        parts = [r for r in proxy.requests if "partNumber=" in r.path]
        (completion,) = [r for r in proxy.requests if faults.is_completion(r)]
        assert sorted(len(r.body) for r in parts) == [2 * MIB, 5 * MIB, 5 * MIB]
        assert all("x-amz-checksum-sha256" in r.headers for r in parts)
        assert completion.headers["if-none-match"] == "*"
        assert b"".join(store.chunks("shard")) == big_file.read_bytes()
        assert open_uploads(bucket) == []

    def test_large_bytes_in_memory_travel_the_same_way(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("shard", data := b"x" * (5 * MIB + 1))

        assert [r.method for r in proxy.requests].count("POST") == 2
        assert b"".join(store.chunks("shard")) == data

    def test_a_taken_key_is_refused_and_leaves_no_parts(self, store: S3Store, bucket: str, big_file: Path) -> None:
        store.create("shard", b"first")

        with pytest.raises(ObjectExistsError, match="already has an object shard"):
            store.create_from_file("shard", big_file)

        assert store.read("shard") == b"first"
        assert open_uploads(bucket) == []

    def test_a_part_that_fails_leaves_no_parts(
        self, store: S3Store, proxy: S3Proxy, bucket: str, big_file: Path
    ) -> None:
        proxy.behaviour = Times(9, lambda r: "partNumber=2" in r.path, faults.refuses(400, "BadDigest"))

        with pytest.raises(StoreError, match=r"cannot create shard: .* answered 400 BadDigest"):
            store.create_from_file("shard", big_file)

        assert open_uploads(bucket) == []
        assert list(store.list("")) == []

    def test_a_failing_abort_does_not_hide_why(self, store: S3Store, proxy: S3Proxy, big_file: Path) -> None:
        def breaks(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            if request.method == "DELETE":
                return faults.refuses(403, "AccessDenied")(request, forward)
            if faults.is_completion(request):
                return faults.refuses(400, "InvalidPart")(request, forward)
            return forward(request)

        proxy.behaviour = breaks

        with pytest.raises(StoreError, match="InvalidPart"):
            store.create_from_file("shard", big_file)

    def test_an_upload_is_not_visible_before_its_completion(
        self, store: S3Store, bucket: str, big_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TIPHYS_FAILPOINTS", "store.before_publish=raise@1")

        with pytest.raises(InjectedFaultError):
            store.create_from_file("shard", big_file)

        assert list(store.list("")) == []
        assert open_uploads(bucket) == []

    def test_a_completion_that_was_applied_is_found_though_its_reply_was_lost(
        self, store: S3Store, proxy: S3Proxy, big_file: Path
    ) -> None:
        def forgets_upload(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            """The reply is lost, and the repeated request finds the upload gone, as on S3."""
            forward(request)
            return faults.refuses(404, "NoSuchUpload")(request, forward)

        proxy.behaviour = Times(1, faults.is_completion, forgets_upload)

        with pytest.raises(ObjectExistsError, match="an earlier request or another writer made it"):
            store.create_from_file("shard", big_file)

        assert b"".join(store.chunks("shard")) == big_file.read_bytes()

    def test_an_upload_removed_by_another_process_is_no_object(
        self, store: S3Store, proxy: S3Proxy, big_file: Path
    ) -> None:
        proxy.behaviour = Times(1, faults.is_completion, faults.refuses(404, "NoSuchUpload"))

        with pytest.raises(StoreError, match="NoSuchUpload"):
            store.create_from_file("shard", big_file)

    def test_an_upload_whose_fate_cannot_be_learned_is_an_error(
        self, store: S3Store, proxy: S3Proxy, big_file: Path
    ) -> None:
        def hides(request: faults.Request, forward: faults.Forward) -> faults.Reply | None:
            if faults.is_completion(request):
                return faults.refuses(404, "NoSuchUpload")(request, forward)
            return faults.refuses(403, "")(request, forward) if request.method == "HEAD" else forward(request)

        proxy.behaviour = hides

        with pytest.raises(StoreError, match="credentials in use may not create shard"):
            store.create_from_file("shard", big_file)

    def test_a_conflict_at_the_completion_sends_all_again(
        self, store: S3Store, proxy: S3Proxy, bucket: str, big_file: Path
    ) -> None:
        proxy.behaviour = Times(1, faults.is_completion, faults.refuses(409, "ConditionalRequestConflict"))

        store.create_from_file("shard", big_file)

        assert b"".join(store.chunks("shard")) == big_file.read_bytes()
        assert open_uploads(bucket) == []

    def test_a_file_that_shrinks_meanwhile_is_refused(self, store: S3Store, proxy: S3Proxy, big_file: Path) -> None:
        def shrinks(request: faults.Request, forward: faults.Forward) -> faults.Reply:
            big_file.write_bytes(b"")
            return forward(request)

        proxy.behaviour = Times(1, lambda r: r.path.endswith("?uploads"), shrinks)

        with pytest.raises(UsageError, match="changed while it was being stored"):
            store.create_from_file("shard", big_file)

        assert list(store.list("")) == []


class TestReading:
    def test_goes_on_where_the_connection_broke(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("a", data := bytes(range(256)) * 4)
        proxy.requests.clear()
        proxy.behaviour = Times(2, faults.is_read, faults.breaks_off(300))

        assert store.read("a") == data

        assert proxy.behaviour.happened == 2
        assert [r.headers.get("range") for r in proxy.requests] == [None, "bytes=300-", "bytes=600-"]

    def test_gives_up_when_it_gets_no_further(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("a", b"1234")
        proxy.requests.clear()
        proxy.behaviour = faults.breaks_off(0)

        with pytest.raises(StoreError, match=r"cannot read a: .* did not answer, or closed the connection"):
            store.read("a")

        assert len(proxy.requests) == 5

    def test_a_broken_read_does_not_mix_the_beginning_into_the_rest(self, store: S3Store, proxy: S3Proxy) -> None:
        def ignores_range(request: faults.Request, forward: faults.Forward) -> faults.Reply:
            reply = forward(request.without("range"))
            return reply if "range" in request.headers else reply._replace(sent_bytes=2)

        store.create("a", b"1234")
        proxy.behaviour = ignores_range

        with pytest.raises(StoreError, match="cannot resume a read of a at byte 2"):
            store.read("a")

    def test_notices_damaged_bytes(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("a", b"1234")
        proxy.behaviour = faults.damages

        with pytest.raises(IntegrityError, match="a is not what was stored"):
            store.read("a")

    def test_leaves_the_bytes_of_large_objects_to_the_hash_of_the_reader(self, store: S3Store, proxy: S3Proxy) -> None:
        store.create("a", b"1234")
        assert b"".join(store.chunks("a")) == b"1234"
        proxy.behaviour = faults.damages

        assert b"".join(store.chunks("a")) != b"1234"
        with pytest.raises(IntegrityError, match="a is not what was stored"):
            store.read("a")


class TestListing:
    def test_fetches_no_more_pages_than_are_read(self, bucket: str, proxy: S3Proxy) -> None:
        store = S3Store(bucket, page_size=2)
        for number in range(6):
            store.create(f"k/{number}", b"")
        proxy.requests.clear()

        rows = store.list("k/")
        assert [next(rows).key for _ in range(3)] == ["k/0", "k/1", "k/2"]

        assert len(proxy.requests) == 2

    def test_leaves_out_what_consoles_put_in_the_place_of_folders(self, bucket: str, s3_endpoint: str) -> None:
        for key in ("p/", "p/runs/", "p/runs//x", "p//y/z"):
            http.put(f"{s3_endpoint}/{bucket}/{key}").raise_for_status()
        store = S3Store(bucket, "p")
        store.create("runs/a/run.json", b"1")

        assert [info[:2] for info in store.list("")] == [("runs/a/run.json", 1)]
        assert list(store.prefixes("runs/")) == ["runs/a/"]
        assert list(store.prefixes("")) == ["runs/"]

    def test_a_page_that_says_that_it_failed_or_breaks_off_is_asked_for_again(
        self, bucket: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With status 200, since the server had begun to answer."""
        monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
        store = S3Store(bucket, page_size=2)
        for number in range(5):
            store.create(f"k/{number}", b"1")

        def half(request: faults.Request, forward: faults.Forward) -> faults.Reply:
            reply = forward(request)
            return reply._replace(body=reply.body[: len(reply.body) // 2])

        for bad in (half, faults.refuses(200, "InternalError")):
            proxy.behaviour = Times(2, faults.is_listing, bad)

            assert [info.key for info in store.list("k/")] == [f"k/{number}" for number in range(5)]
            assert proxy.behaviour.happened == 2

    def test_leaves_the_collection_of_garbage_as_it_was(self, store: S3Store) -> None:
        """A training may have switched it off, to choose its moments by itself."""
        store.create("a", b"1")
        gc.disable()
        try:
            assert [info.key for info in store.list("")] == ["a"]
            assert not gc.isenabled()
        finally:
            gc.enable()
        assert [info.key for info in store.list("")] == ["a"]
        assert gc.isenabled()

    def test_shows_the_store_alone(self, bucket: str) -> None:
        S3Store(bucket, "team").create("a", b"")
        S3Store(bucket, "team2").create("b", b"")
        S3Store(bucket).create("c", b"")

        assert [info.key for info in S3Store(bucket, "team").list("")] == ["a"]
        assert [info.key for info in S3Store(bucket).list("")] == ["c", "team/a", "team2/b"]


class TestErrors:
    def test_a_refusal_names_what_was_tried_and_the_permissions(self, store: S3Store, proxy: S3Proxy) -> None:
        proxy.behaviour = faults.refuses(403, "AccessDenied")

        with pytest.raises(StoreError, match=r"credentials in use may not create a \(AccessDenied\); they need s3:Get"):
            store.create("a", b"")
        with pytest.raises(StoreError, match="may not list runs/"):
            list(store.list("runs/"))
        with pytest.raises(StoreError, match="may not delete a"):
            store.delete("a")

    def test_an_object_is_missing_although_the_server_calls_that_forbidden(
        self, store: S3Store, proxy: S3Proxy
    ) -> None:
        """As AWS does where the right to list depends on the prefix."""
        store.create("there", b"1")
        refuse = faults.refuses(403, "AccessDenied")
        proxy.behaviour = lambda request, forward: (
            refuse(request, forward)
            if request.method == "GET" and "list-type" not in request.path
            else forward(request)
        )

        with pytest.raises(ObjectMissingError, match="has no object a"):
            store.read("a")
        with pytest.raises(ObjectMissingError, match="has no object the"):
            store.read("the")
        with pytest.raises(ForbiddenError, match="may not read there"):
            store.read("there")

    def test_an_expired_token_is_a_matter_of_credentials(self, store: S3Store, proxy: S3Proxy) -> None:
        proxy.behaviour = faults.refuses(400, "ExpiredToken")

        with pytest.raises(StoreError, match=r"credentials in use may not read a \(ExpiredToken\)"):
            store.read("a")

    def test_a_missing_bucket_is_no_missing_object(self, proxy: S3Proxy) -> None:
        store = S3Store("no-such-bucket")

        with pytest.raises(StoreError, match=f"cannot read a: {proxy.url} has no such bucket"):
            store.read("a")
        with pytest.raises(StoreError, match="has no such bucket"):
            list(store.list(""))

    def test_a_missing_bucket_is_not_found_where_one_must_exist(self, proxy: S3Proxy) -> None:
        with pytest.raises(NotFoundError, match=r"no store at s3://no-such-bucket/p: .* has no bucket no-such-bucket"):
            open_store("s3://no-such-bucket/p", must_exist=True)

    def test_a_server_that_is_not_there_is_named(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
            monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)

            with pytest.raises(StoreError, match=f"cannot read a: {url} did not answer"):
                S3Store("bucket").read("a")

    def test_missing_credentials_are_named(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

        with pytest.raises(StoreError, match="Unable to locate credentials; check the credentials and settings"):
            S3Store(bucket).read("a")

    def test_an_unknown_profile_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_PROFILE", "nobody")

        with pytest.raises(StoreError, match="nobody"):
            S3Store("bucket")

    def test_an_endpoint_that_is_no_url_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")

        with pytest.raises(UsageError, match="check AWS_ENDPOINT_URL_S3"):
            S3Store("bucket")

    def test_a_missing_object_is_missing_at_the_first_piece(self, store: S3Store) -> None:
        chunks = store.chunks("a")

        with pytest.raises(ObjectMissingError, match="has no object a"):
            next(chunks)


class TestKeys:
    def test_in_the_bucket_carry_the_prefix(self, bucket: str) -> None:
        store = S3Store(bucket, "team/tiphys")

        assert store.url == f"s3://{bucket}/team/tiphys"
        assert store.artifact_key("runs/a") == "team/tiphys/runs/a"
        assert store.from_artifact_key("team/tiphys/runs/a") == "runs/a"
        assert store.from_artifact_key("team/tiphysx/runs/a") is None
        assert store.from_artifact_key("team/tiphys/") is None

    def test_an_object_is_found_again_through_the_url_of_the_store(self, store: S3Store) -> None:
        store.create("a", b"1")

        again = open_store(store.url, must_exist=True)

        assert again.url == store.url
        assert again.read("a") == b"1"

    def test_without_a_prefix_are_the_same(self, bucket: str) -> None:
        store = S3Store(bucket)

        assert store.url == f"s3://{bucket}"
        assert store.artifact_key("runs/a") == store.from_artifact_key("runs/a") == "runs/a"

    def test_keys_are_bounded_with_their_prefix(self, bucket: str) -> None:
        with pytest.raises(UsageError, match="1025 bytes; storage takes at most 1024"):
            S3Store(bucket, "p").create("x" * 1023, b"")


def test_a_store_leaves_no_connection_open_once_it_is_gone(bucket: str) -> None:
    S3Store(bucket).create("a", b"")

    gc.collect()  # an unclosed socket is a warning, and a warning is an error


def test_unfinished_uploads_are_found_by_their_age_and_removed(bucket: str, s3_endpoint: str) -> None:
    store = S3Store(bucket, "p")
    for key in ("p/old", "elsewhere/old"):
        store.client.create_multipart_upload(Bucket=bucket, Key=key)
    # This server says that every upload began in 2010.
    assert list(find_abandoned_uploads(store, timedelta(days=100 * 365))) == []
    [found] = find_abandoned_uploads(store, timedelta(days=1))
    assert found.name == "p/old"
    found.remove()
    found.remove()
    assert [upload["Key"] for upload in store.client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [
        "elsewhere/old"
    ]
