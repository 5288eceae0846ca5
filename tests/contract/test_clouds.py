"""What the stores on Google Cloud Storage and on Azure do when the network or the server does not do its part.

| what happens | what the caller sees |
|---|---|
| the reply to a write is lost | the write, and `claim` knows that it won |
| reading breaks off | the bytes |
| bytes are damaged on the way | IntegrityError |
| 403, no bucket, no credentials, no connection | an error that says what to do, without a secret |
| many writers of one key, in parts | one wins, and its bytes are kept |
| a server that ignores the condition | the probe refuses it |
"""

import gc
import json
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobServiceClient
from support.builders.lineage import LINEAGE, RUN, ref
from support.servers import s3_proxy as faults
from support.servers.emulators import ACCOUNT, connection_string
from support.servers.s3_proxy import Reply, Request, S3Proxy, Times
from support.stories.sessions import admitted, open_session, state_at, train
from tiphys_controller.doctor import failed_checks
from tiphys_controller.doctor.store_probe import probe_store

from tiphys import checkpoint
from tiphys.errors import (
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    UsageError,
)
from tiphys.faults import InjectedFaultError
from tiphys.lineage.select import list_commits
from tiphys.records import SubmissionEnd
from tiphys.store import AzureStore, GcsStore, LineageLayout, claim_record, open_store
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.buckets.bucket_store import BucketStore

MIB = 1 << 20
WRITERS = 6


@dataclass
class Cloud:
    """One of the two, behind a proxy."""

    name: str
    bucket: str
    proxy: S3Proxy
    direct: str
    """Connection string of Azure's emulator itself."""

    def store(self, prefix: str = "p", bucket: str = "") -> BucketStore:
        """A store that gives up soon."""
        if self.name == "gcs":
            return GcsStore(bucket or self.bucket, prefix, retry_seconds=3)
        return AzureStore(ACCOUNT, bucket or self.bucket, prefix, retries=2, block_bytes=MIB)

    def url(self, prefix: str = "p", bucket: str = "") -> str:
        root = "gs://" if self.name == "gcs" else f"az://{ACCOUNT}/"
        return f"{root}{bucket or self.bucket}/{prefix}"

    def refuses(self, status: int, code: str, message: str = "told to") -> faults.Behaviour:
        """Answer with an error of the cloud."""
        if self.name == "gcs":
            body = json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": code}]}}).encode()
            reply = Reply(status, {"content-type": "application/json"}, body)
        else:
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            reply = Reply(status, {"content-type": "application/xml", "x-ms-error-code": code}, body)
        return lambda request, forward: reply

    def refuses_deletion(self) -> faults.Behaviour:
        """Answer as a bucket with a retention policy."""
        if self.name == "gcs":
            kept = "Object 'b/a' is subject to bucket's retention policy or object retention and cannot be deleted"
            return self.refuses(403, "retentionPolicyNotMet", kept)
        return self.refuses(409, "BlobImmutableDueToPolicy")

    def is_condition(self, request: Request) -> bool:
        """Whether the request makes an object if none is there."""
        return "ifGenerationMatch=0" in request.path or request.headers.get("if-none-match") == "*"

    def ignores_condition(self, request: Request, forward: faults.Forward) -> Reply:
        if self.name == "gcs":
            return forward(request._replace(path=request.path.replace("ifGenerationMatch=0", "x=0")))
        if self.is_condition(request):  # which is signed, so the object goes away in its place
            key = unquote(urlsplit(request.path).path).split("/", 3)[3]
            with BlobServiceClient.from_connection_string(self.direct) as service, suppress(ResourceNotFoundError):
                service.get_blob_client(self.bucket, key).delete_blob()
        return forward(request)


@pytest.fixture(params=["gcs", "azure"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    bucket = request.getfixturevalue("gcs_bucket" if request.param == "gcs" else "azure_container")
    with faults.s3_proxy(endpoint) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(proxy.url))
        yield Cloud(request.param, bucket, proxy, connection_string(endpoint))
    gc.collect()  # a connection that was left open is a failure of this test, not of a later one


@pytest.fixture
def store(cloud: Cloud) -> BucketStore:
    return cloud.store()


@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(b"".join(bytes([n]) * MIB for n in range(20)))
    return path


def seal(status: str = "Succeeded") -> SubmissionEnd:
    return SubmissionEnd(run="digits", submission=1, status=status)


def keys(store: BucketStore) -> list[str]:
    return [info.key for info in store.list("")]


class TestWriting:
    def test_every_write_is_conditional(self, cloud: Cloud, store: BucketStore) -> None:
        store.create("a", b"hello")

        (request,) = cloud.proxy.requests
        assert cloud.is_condition(request)

    def test_a_claim_whose_reply_was_lost_is_known_to_be_ours(self, cloud: Cloud, store: BucketStore) -> None:
        cloud.proxy.behaviour = once = Times(1, cloud.is_condition, faults.loses_reply)

        outcome = claim_record(store, "end.json", mine := seal())

        assert once.happened == 1
        assert outcome == (mine, True)

    def test_a_claim_that_another_holds_is_not_ours(self, store: BucketStore) -> None:
        first = claim_record(store, "end.json", seal())
        second = claim_record(store, "end.json", seal())

        assert (first.is_ours, second.is_ours) == (True, False)
        assert second.record == first.record

    def test_a_request_that_was_lost_or_refused_for_now_is_sent_again(self, cloud: Cloud, store: BucketStore) -> None:
        for key, bad in (("a", faults.drops_connection), ("b", cloud.refuses(503, "ServerBusy"))):
            cloud.proxy.behaviour = once = Times(1, cloud.is_condition, bad)

            store.create(key, b"1")

            assert once.happened == 1
            assert store.read(key) == b"1"

    def test_a_server_that_refuses_for_good_is_given_up(self, cloud: Cloud, store: BucketStore) -> None:
        cloud.proxy.behaviour = cloud.refuses(503, "ServerBusy")

        with pytest.raises(StoreError, match=r"cannot create a: .* answered 503.*try again later"):
            store.create("a", b"1")

        assert 2 <= len(cloud.proxy.requests) <= 20

    def test_a_large_file_is_committed_once_and_only_as_a_whole(
        self, cloud: Cloud, store: BucketStore, big_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("TIPHYS_FAILPOINTS", "store.before_publish=raise@1")
            with pytest.raises(InjectedFaultError):
                store.create_from_file("shard", big_file)
        assert keys(store) == []
        assert len(cloud.proxy.requests) > 1

        store.create_from_file("shard", big_file)

        assert b"".join(store.chunks("shard")) == big_file.read_bytes()
        with pytest.raises(ObjectExistsError, match="already has an object shard"):
            store.create_from_file("shard", big_file)

    def test_a_single_writer_in_parts_wins_and_its_bytes_are_kept(self, store: BucketStore) -> None:
        def write(writer: int) -> bytes | None:
            data = bytes([writer]) * (2 * MIB + writer)
            try:
                store.with_multipart_uploads().create("shard", data)
            except ObjectExistsError:
                return None
            return data

        with ThreadPoolExecutor(WRITERS) as pool:
            winners = [data for data in pool.map(write, range(WRITERS)) if data]

        assert len(winners) == 1
        assert b"".join(store.chunks("shard")) == winners[0]

    def test_a_file_that_shrinks_meanwhile_is_refused(self, cloud: Cloud, store: BucketStore, big_file: Path) -> None:
        def shrinks(request: Request, forward: faults.Forward) -> Reply:
            big_file.write_bytes(b"")
            return forward(request)

        cloud.proxy.behaviour = Times(1, lambda request: True, shrinks)

        with pytest.raises(UsageError, match="changed while it was being stored"):
            store.create_from_file("shard", big_file)

        assert keys(store) == []

    def test_bytes_that_were_damaged_on_their_way_are_no_object(self, cloud: Cloud, store: BucketStore) -> None:
        def damages(request: Request, forward: faults.Forward) -> Reply:
            assert b"hello" in request.body
            return forward(request._replace(body=request.body.replace(b"hello", b"jello")))

        cloud.proxy.behaviour = once = Times(1, cloud.is_condition, damages)

        with pytest.raises(StoreError, match=r"cannot create a: .* answered 400"):
            store.create("a", b"hello")

        assert once.happened == 1
        assert keys(store) == []

    def test_an_unfinished_upload_is_left_to_the_service(self, store: BucketStore) -> None:
        """Both drop it after a week, and show it in no listing."""
        assert list(find_abandoned_uploads(store, timedelta(0))) == []


class TestReading:
    def test_goes_on_where_the_connection_broke(self, cloud: Cloud, store: BucketStore) -> None:
        data = bytes(range(256)) * 4096
        store.create("a", data)
        for read in (lambda: store.read("a"), lambda: b"".join(store.chunks("a", 1 << 19))):
            cloud.proxy.behaviour = once = Times(
                1, lambda r: r.method == "GET" and "range" in {*r.headers, "range"}, faults.breaks_off(100_000)
            )

            assert read() == data
            assert once.happened == 1

    def test_notices_damaged_bytes(self, cloud: Cloud, store: BucketStore) -> None:
        store.create("a", b"1234")

        def damages(request: Request, forward: faults.Forward) -> Reply:
            reply = forward(request)
            return reply._replace(body=bytes([reply.body[0] ^ 1]) + reply.body[1:])

        cloud.proxy.behaviour = damages

        with pytest.raises(IntegrityError, match="a is not what was stored"):
            store.read("a")

    def test_refuses_what_is_too_large_for_a_record(self, store: BucketStore) -> None:
        store.create("a", b"x" * (5 * MIB))

        with pytest.raises(IntegrityError, match=r"a has 5,242,880 bytes, and no record has more than 4,194,304"):
            store.read("a")

    def test_gives_no_mixture_of_an_object_and_its_successor(self, store: BucketStore) -> None:
        store.create("a", b"1" * 100)
        chunks = store.chunks("a", 50)
        assert next(chunks) == b"1" * 50
        store.delete("a")
        store.create("a", b"2" * 100)

        with pytest.raises((ObjectMissingError, StoreError), match=r"has no object a|cannot read a"):
            next(chunks)

    def test_a_missing_object_is_missing_at_the_first_piece(self, store: BucketStore) -> None:
        with pytest.raises(ObjectMissingError, match="has no object a"):
            next(store.chunks("a"))


class TestErrors:
    def test_a_refusal_names_what_was_tried_and_the_permissions(self, cloud: Cloud, store: BucketStore) -> None:
        cloud.proxy.behaviour = cloud.refuses(403, "AuthorizationPermissionMismatch", "not in household-retention")
        needed = "storage.objects.get" if cloud.name == "gcs" else "Storage Blob Data Contributor"

        calls: dict[str, Callable[[], object]] = {
            "create a": lambda: store.create("a", b""),
            "read a": lambda: store.read("a"),
            "list runs/": lambda: list(store.list("runs/")),
            "delete a": lambda: store.delete("a"),
        }
        for action, call in calls.items():
            with pytest.raises(ForbiddenError, match=rf"credentials in use may not {action} .*{needed}"):
                call()

    def test_wrong_credentials_are_a_matter_of_settings(self, cloud: Cloud, store: BucketStore) -> None:
        cloud.proxy.behaviour = cloud.refuses(401, "InvalidAuthenticationInfo")

        with pytest.raises(SettingsError, match=r"credentials in use may not delete a|credentials cannot be") as caught:
            store.delete("a")

        assert not isinstance(caught.value, ForbiddenError)

    def test_an_object_under_a_retention_policy_is_named_when_its_deletion_fails(
        self, cloud: Cloud, store: BucketStore
    ) -> None:
        store.create("a", b"1")
        cloud.proxy.behaviour = cloud.refuses_deletion()

        with pytest.raises(SettingsError, match=r"cannot delete a: .* policy .* keeps it; Tiphys deletes"):
            store.delete("a")

    def test_a_missing_bucket_is_no_missing_object(self, cloud: Cloud) -> None:
        store = cloud.store(bucket="no-such-bucket")

        calls: list[Callable[[], object]] = [
            lambda: store.read("a"),
            lambda: next(store.chunks("a")),
            lambda: store.create("a", b""),
            lambda: store.with_multipart_uploads().create("a", b"1"),
            lambda: store.delete("a"),
            lambda: list(store.list("")),
            lambda: list(store.prefixes("")),
        ]
        for call in calls:
            with pytest.raises(SettingsError, match=r"has no such (bucket|container); check the name, or create it"):
                call()
        with pytest.raises(NotFoundError, match=r"there is no store at .*no-such-bucket"):
            open_store(cloud.url(bucket="no-such-bucket"), must_exist=True)

    def test_a_server_that_is_not_there_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))

            for store in (GcsStore("bucket", retry_seconds=1), AzureStore(ACCOUNT, "container", retries=0)):
                with pytest.raises(StoreError, match=r"cannot read a: .*127.0.0.1:\d+.* did not answer"):
                    store.read("a")

    def test_the_address_of_an_upload_and_a_signature_are_no_part_of_a_message(
        self, cloud: Cloud, store: BucketStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever has one of them may write."""
        if cloud.name == "azure":
            signed = f"BlobEndpoint={cloud.proxy.url}/{ACCOUNT};SharedAccessSignature=sv=2024-01-01&sig=hunter2"
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", signed)
            store = cloud.store()
        for bad in (faults.drops_connection, cloud.refuses(400, "Invalid", "told to")):
            cloud.proxy.behaviour = Times(99, lambda r: "upload_id=" in r.path or "sig=" in r.path, bad)

            with pytest.raises(StoreError, match="cannot create a") as caught:
                store.with_multipart_uploads().create("a", b"1234")

            assert cloud.proxy.behaviour.happened
            [*_, last] = cloud.proxy.requests
            secret = last.path.partition("upload_id=" if cloud.name == "gcs" else "sig=")[2].partition("&")[0]
            assert secret
            assert secret not in str(caught.value)


class TestTraining:
    def test_a_program_finds_its_checkpoints_by_the_environment_alone(self, cloud: Cloud, store: BucketStore) -> None:
        environ = {
            "TIPHYS_STORE": cloud.url(),
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": "fit",
            "TIPHYS_ATTEMPT": "1",
            "TIPHYS_LINEAGE": LINEAGE,
            "TIPHYS_SAVE_EVERY": "2 steps",
        }
        admitted(store, 1)
        with checkpoint.session(environ=environ) as session:
            session.restore(default=state_at(0))
            session.step(2, state_at(2))
        admitted(store, 2, ref(1, 2))

        with checkpoint.session(environ={**environ, "TIPHYS_ATTEMPT": "2", "TIPHYS_RESUME_FROM": "1-2"}) as session:
            restored = session.restore(default=state_at(0))

        assert restored["step"] == 2

    def test_every_reply_lost_once_is_still_one_commit(self, cloud: Cloud, store: BucketStore) -> None:
        cloud.proxy.behaviour = lost = Times(3, cloud.is_condition, faults.loses_reply)
        session = open_session(store)

        assert session.save(1, state_at(1)).wait() == ref(1, 1)

        assert (lost.happened, session.failed_saves) == (3, 0)
        assert open_session(store, 2, resume_from=ref(1, 1)).restore()["step"] == 1

    def test_retention_leaves_what_it_should(self, store: BucketStore) -> None:
        train(store, 5, keep_last=2)

        assert list_commits(store, LINEAGE) == [ref(1, 5), ref(1, 4)]
        layout = LineageLayout(LINEAGE)
        assert {layout.parse_shard(info.key) for info in store.list(layout.all_shards)} == {ref(1, 5), ref(1, 4)}

    def test_a_retention_policy_of_the_bucket_keeps_checkpoints_and_the_training_goes_on(
        self, cloud: Cloud, store: BucketStore
    ) -> None:
        policy = cloud.refuses_deletion()
        cloud.proxy.behaviour = kept = Times(99, lambda request: request.method == "DELETE", policy)

        train(store, 4, keep_last=2)

        assert kept.happened
        assert list_commits(store, LINEAGE) == [ref(1, 4), ref(1, 3), ref(1, 2), ref(1, 1)]


class TestProbe:
    def test_the_emulator_keeps_all_promises(self, cloud: Cloud, store: BucketStore) -> None:
        store.create("control/runs/a", b"")

        findings = probe_store(cloud.url())

        assert not failed_checks(findings)
        assert {finding.state for finding in findings} == {"ok"}
        assert {"create-only", "race", "create-only-parts", "checksum"} <= {finding.check for finding in findings}
        assert keys(store) == ["control/runs/a"]

    def test_a_server_that_ignores_the_condition_is_refused(self, cloud: Cloud) -> None:
        cloud.proxy.behaviour = cloud.ignores_condition

        findings = probe_store(cloud.url(), races=2)

        refused = {finding.check: finding.sentence for finding in findings if finding.state == "failed"}
        assert refused.keys() == {"create-only", "race", "create-only-parts"}
        assert ("ifGenerationMatch" if cloud.name == "gcs" else "If-None-Match") in refused["create-only"]

    def test_an_account_whose_folders_are_objects_is_refused(
        self, azure_container: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(AzureStore, "has_hierarchy", lambda self: True)

        findings = probe_store(f"az://{ACCOUNT}/{azure_container}", races=1)

        [refused] = [finding for finding in findings if finding.state == "failed"]
        assert refused.check == "flat-namespace"
        assert "use an account without one" in refused.remedy


class TestOpening:
    @pytest.mark.parametrize("url", ["gs://bucket/p", "az://account/container/p"])
    def test_missing_credentials_are_named(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("azure.storage.blob.ExponentialRetry.sleep", lambda *_: None)  # 14 s of waits
        with pytest.raises(SettingsError, match=r"cannot .*credentials.*workload identity"):
            open_store(url)

    @pytest.mark.parametrize(
        ("url", "module", "extra"),
        [("gs://b-b/p", "google.cloud.storage", "gcs"), ("az://acc/con", "azure.identity", "azure")],
    )
    def test_a_missing_extra_is_named(self, url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, module, None)

        with pytest.raises(UsageError, match=rf"pip install 'tiphys-VERSION-py3-none-any.whl\[{extra}\]'"):
            open_store(url)

    def test_the_connection_string_of_another_account_is_refused_without_its_key(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string("http://127.0.0.1:1", "wrong1"))
        with pytest.raises(UsageError, match="is that of account wrong1, and the URL names account right1"):
            AzureStore("right1", "container")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "hunter2")
        with pytest.raises(UsageError, match="AZURE_STORAGE_CONNECTION_STRING cannot be used") as caught:
            AzureStore("right1", "container")
        assert "hunter2" not in str(caught.value)

    def test_the_endpoint_of_another_account_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", "https://wrong1.blob.core.chinacloudapi.cn")

        with pytest.raises(UsageError, match="is that of account wrong1, and the URL names account right1"):
            AzureStore("right1", "container")

    def test_an_identity_that_gets_no_token_is_a_matter_of_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from azure.core.credentials import AccessToken
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import DefaultAzureCredential

        def refuses(self: DefaultAzureCredential, *scopes: str, **options: object) -> AccessToken:
            raise ClientAuthenticationError("no identity is assigned\nto this pod")

        monkeypatch.setattr(DefaultAzureCredential, "get_token", refuses)
        monkeypatch.setattr(DefaultAzureCredential, "get_token_info", refuses)

        with pytest.raises(
            SettingsError, match=r"cannot read a: no identity is assigned; give this process an identity"
        ):
            AzureStore("right1", "container", retries=0).read("a")

    def test_a_token_is_not_sent_without_tls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", "http://127.0.0.1:1")

        with pytest.raises(UsageError, match=r"AZURE_STORAGE_SERVICE_ENDPOINT cannot be used: .*HTTPS"):
            AzureStore("right1", "container")

    def test_a_store_is_found_again_through_its_url(self, cloud: Cloud, store: BucketStore) -> None:
        store.create("a", b"1")

        again = open_store(store.url, must_exist=True, namespace="ml")

        assert (again.url, again.namespace, again.read("a")) == (cloud.url(), "ml", b"1")

    def test_a_store_leaves_no_connection_open_once_it_is_gone(self, cloud: Cloud) -> None:
        cloud.store().create("a", b"")

        gc.collect()  # an unclosed socket is a warning, and a warning is an error
