"""Store in a container of Azure Blob Storage.

The store uses the official libraries, which the extra ``azure`` installs. The
request that makes an object carries ``If-None-Match: *``, so that only the first
writer of a key succeeds. A large object is sent as blocks, and the conditional
request commits their list. All writers of a key share its uncommitted blocks, so
each upload names its blocks by a nonce: none commits the bytes of another. The
service drops blocks that nobody committed after a week.
Source: Azure, "Specifying conditional headers for Blob service operations" and "Put Block List".
"""

import base64
import contextlib
import copy
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiphys.errors import (
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    TiphysError,
    UsageError,
    install_command,
)
from tiphys.faults import failpoint
from tiphys.records.base import MAX_RECORD_BYTES
from tiphys.store.base import ObjectInfo, UploadSource, check_read_size
from tiphys.store.buckets.bucket_store import BucketStore
from tiphys.threads import map_parallel

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError, HttpResponseError
    from azure.storage.blob import BlobBlock, BlobClient, BlobServiceClient

CONNECTION_STRING_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
ENDPOINT_VARIABLE = "AZURE_STORAGE_SERVICE_ENDPOINT"
"""Both are those of the Azure CLI."""
_EXTRA_MISSING = (
    "az:// needs the libraries azure-storage-blob and azure-identity, which are not installed here; install tiphys "
    f"with its extra: {install_command('azure')}"
)
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"(?=.{3,63}$)[a-z0-9]+(-[a-z0-9]+)*")
_MOST_BLOCKS = 50_000
_PARALLEL_BLOCKS = 4
_MAX_TRIES = 5
# A shared access signature is a credential.
_SECRETS = re.compile(r"(sig=)[^&\s:'\")]+")
_MAX_REASON = 500
_CREDENTIALS = (
    "give this process an identity of Azure: workload identity on AKS, the managed identity of the machine, or "
    f"`az login`; {CONNECTION_STRING_VARIABLE} is for emulators and shared access signatures"
)
_PERMISSIONS = "they need the role Storage Blob Data Contributor of the container"
# Other codes with status 401 or 403 mean that the credentials themselves are wrong or too old.
_FORBIDDEN = ("Authorization", "InsufficientAccountPermissions")
_EXISTS = ("BlobAlreadyExists", "ConditionNotMet")


class AzureStore(BucketStore):
    """A store below a prefix in a container of Azure Blob Storage.

    Credentials are those of ``DefaultAzureCredential``: workload identity, a
    managed identity, or ``az login``. ``AZURE_STORAGE_CONNECTION_STRING`` takes
    their place, for an emulator or a shared access signature.
    ``AZURE_STORAGE_SERVICE_ENDPOINT`` names another endpoint than that of Azure's public cloud.

    Args:
        block_bytes: Objects of more than this size are sent as blocks of this size. Blocks under way are in memory.
        page_size: Keys per page of a listing, at most 5,000.
        retries: How often a request is repeated.

    Raises:
        UsageError: a name, the prefix or the connection string is not valid, or the extra ``azure`` is not installed.
    """

    def __init__(
        self,
        account: str,
        container: str,
        prefix: str = "",
        *,
        block_bytes: int = 16 << 20,
        page_size: int = 1000,
        retries: int = 4,
        namespace: str = "",
    ) -> None:
        for kind, name, pattern in (("account", account, _ACCOUNT), ("container", container, _CONTAINER)):
            if not pattern.fullmatch(name):
                raise UsageError(f"no {kind} can have the name {name!r}; use az://account/container/prefix")
        super().__init__(f"az://{account}/{container}", prefix, page_size, namespace)
        self._block_bytes = block_bytes
        self._single_bytes = block_bytes
        self._container = _make_service(self.url, account, retries).get_container_client(container)
        self._endpoint = self._container.primary_hostname

    def with_multipart_uploads(self) -> "AzureStore":
        other = copy.copy(self)
        other._single_bytes = -1
        return other

    def check_bucket(self) -> None:
        if not self._has_container():
            raise NotFoundError(
                f"there is no store at {self.url}: {self._endpoint} has no container "
                f"{self._container.container_name}; check the name, or create it"
            )

    def has_hierarchy(self) -> bool:
        """Whether its account has a hierarchical namespace (Data Lake Storage), whose folders are objects, too."""
        with self._translate_errors("read the settings of its account"):
            return bool(self._container.get_account_information().get("is_hns_enabled"))

    def is_checksum_verified(self, key: str) -> bool:
        from azure.core.exceptions import HttpResponseError

        wrong = base64.b64encode(_md5(b"other")).decode()
        with self._translate_errors("create", key):
            try:
                self._blob(key).upload_blob(b"bytes", overwrite=True, headers={"Content-MD5": wrong})
            except HttpResponseError as error:
                if error.status_code != 400:
                    raise
                return True
        return False

    def read(self, key: str) -> bytes:
        from azure.core.exceptions import HttpResponseError

        blob = self._blob(key)
        with self._translate_errors("read", key):
            try:
                body = blob.download_blob(offset=0, length=MAX_RECORD_BYTES + 1, max_concurrency=1)
            except HttpResponseError as error:
                if _error_code(error) != "InvalidRange":
                    raise
                return b""  # without bytes it has no range of bytes
            data = body.readall()
            if len(data) > MAX_RECORD_BYTES:
                check_read_size(self, key, blob.get_blob_properties().size)
        stored_md5 = body.properties.content_settings.content_md5  # of an object that one request made
        if stored_md5 and _md5(data) != stored_md5:
            raise IntegrityError(f"{self.url}: {key} is not what was stored: its MD5 differs; read it again")
        return data

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        from azure.core import MatchConditions

        blob = self._blob(key)
        with self._translate_errors("read", key):
            found = blob.get_blob_properties()
        for offset in range(0, found.size, size_bytes):
            with self._translate_errors("read", key):
                # The same object for all chunks. The caller verifies its own hash.
                chunk = blob.download_blob(
                    offset=offset,
                    length=min(size_bytes, found.size - offset),
                    etag=found.etag,
                    match_condition=MatchConditions.IfNotModified,
                    max_concurrency=1,
                )
                yield chunk.readall()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._translate_errors("list", prefix):
            for blob in self._container.list_blobs(
                name_starts_with=self._prefix + prefix, results_per_page=self._page_size
            ):
                if (key := self.from_artifact_key(blob.name)) is not None:
                    yield ObjectInfo(key, blob.size, (blob.etag or "").strip('"'))

    def prefixes(self, prefix: str) -> Iterator[str]:
        from azure.storage.blob import BlobPrefix

        with self._translate_errors("list", prefix):
            for row in self._container.walk_blobs(
                name_starts_with=self._prefix + prefix, delimiter="/", results_per_page=self._page_size
            ):
                if isinstance(row, BlobPrefix) and (key := self.from_artifact_key(row.name[:-1])) is not None:
                    yield f"{key}/"

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissingError), self._translate_errors("delete", key):
            self._blob(key).delete_blob(delete_snapshots="include")

    def _create(self, key: str, source: UploadSource) -> None:
        blob = self._blob(key)
        with self._translate_errors("create", key):
            if source.size > self._single_bytes:
                self._create_from_blocks(blob, source)
            else:
                failpoint("store.before_publish")
                data = bytes(source.read(0, source.size))
                blob.upload_blob(data, overwrite=False, validate_content=True, max_concurrency=1)
        failpoint("store.after_publish")

    def _create_from_blocks(self, blob: "BlobClient", source: UploadSource) -> None:
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        for left in reversed(range(_MAX_TRIES)):
            blocks = self._send_blocks(blob, source)
            failpoint("store.before_publish")
            try:
                blob.commit_block_list([*blocks], match_condition=MatchConditions.IfMissing, validate_content=True)
            except HttpResponseError as error:
                # Another writer of the key committed, which dropped these blocks.
                if _error_code(error) != "InvalidBlockList" or not left:
                    raise
                if blob.exists():
                    raise ObjectExistsError(
                        f"{self.url} already has an object {blob.blob_name}; another writer made it"
                    ) from error
            else:
                return

    def _send_blocks(self, blob: "BlobClient", source: UploadSource) -> "Sequence[BlobBlock]":
        from azure.storage.blob import BlobBlock

        size, nonce = max(self._block_bytes, -(-source.size // _MOST_BLOCKS)), secrets.token_hex(8)

        def send(index: int, offset: int) -> "BlobBlock":
            name = f"{nonce}-{index:05}"  # all names of the blocks of a blob must be of one length
            data = bytes(source.read(offset, min(size, source.size - offset)))
            blob.stage_block(name, data, length=len(data), validate_content=True)
            return BlobBlock(name)

        return map_parallel(send, range(0, source.size, size), _PARALLEL_BLOCKS)

    def _blob(self, key: str) -> "BlobClient":
        return self._container.get_blob_client(self.artifact_key(key))

    def _has_container(self) -> bool:
        try:
            next(self.with_page_size(1).list(""), None)
        except SettingsError as error:
            if _error_code(error.__cause__) != "ContainerNotFound":
                raise
            return False
        return True

    @contextlib.contextmanager
    def _translate_errors(self, action: str, key: str = "") -> Iterator[None]:
        from azure.core.exceptions import AzureError

        try:
            yield
        except AzureError as error:
            raise self._translate(error, f"{action} {key}".strip(), key) from error

    def _translate(self, error: "AzureError", action: str, key: str) -> TiphysError:
        from azure.core.exceptions import ClientAuthenticationError, HttpResponseError

        reason = _describe(error)
        if isinstance(error, ClientAuthenticationError) and not _error_code(error):  # of azure-identity
            return SettingsError(f"{self.url}: cannot {action}: {reason}; {_CREDENTIALS}")
        if isinstance(error, HttpResponseError) and error.response is not None:
            return self._translate_reply(error, action, key)
        return StoreError(
            f"{self.url}: cannot {action}: {self._endpoint} did not answer, or closed the connection ({reason}); "
            f"check the name of the account, the network and {ENDPOINT_VARIABLE}, then try again"
        )

    def _translate_reply(self, error: "HttpResponseError", action: str, key: str) -> TiphysError:
        status, code = error.status_code or 0, _error_code(error)
        if code in _EXISTS and action.startswith("create "):
            return ObjectExistsError(f"{self.url} already has an object {key}; objects are never overwritten")
        if code == "BlobNotFound":
            return ObjectMissingError(f"{self.url} has no object {key}")
        if code == "ContainerNotFound":
            return SettingsError(
                f"{self.url}: cannot {action}: {self._endpoint} has no such container; check the name, or create it"
            )
        if code == "BlobImmutableDueToPolicy":
            return SettingsError(
                f"{self.url}: cannot {action}: an immutability policy or a legal hold of the container keeps it; "
                "Tiphys deletes old checkpoints and finished records, so use a container without one"
            )
        if status in (401, 403):
            kind = ForbiddenError if code.startswith(_FORBIDDEN) else SettingsError
            return kind(f"{self.url}: the credentials in use may not {action} ({code or status}); {_PERMISSIONS}")
        return StoreError(
            f"{self.url}: cannot {action}: {self._endpoint} answered {status} {code}: {_describe(error)}; "
            "try again later"
        )


def _make_service(url: str, account: str, retries: int) -> "BlobServiceClient":
    try:
        from azure.identity import DefaultAzureCredential
        from azure.storage.blob import BlobServiceClient, ExponentialRetry
    except ImportError as error:
        raise UsageError(_EXTRA_MISSING) from error
    options: dict[str, Any] = {
        # Waits of 0, 2, 4 and 8 seconds, each with jitter.
        "retry_policy": ExponentialRetry(
            initial_backoff=0, increment_base=2, retry_total=retries, random_jitter_range=1
        ),
        "connection_timeout": 5,
        # Limits one wait for bytes, not a whole block or object.
        "read_timeout": 30,
        "user_agent": "tiphys",
    }
    text = os.environ.get(CONNECTION_STRING_VARIABLE, "")
    variable = CONNECTION_STRING_VARIABLE if text else ENDPOINT_VARIABLE
    try:
        if text:
            service = BlobServiceClient.from_connection_string(text, **options)
        else:
            endpoint = os.environ.get(ENDPOINT_VARIABLE) or f"https://{account}.blob.core.windows.net"
            service = BlobServiceClient(endpoint, credential=DefaultAzureCredential(), **options)
    except ValueError as error:
        raise UsageError(f"{url}: {variable} cannot be used: {error}") from None
    if service.account_name not in (None, account):
        raise UsageError(
            f"{url}: {variable} is that of account {service.account_name}, and the URL names account {account}; "
            "correct one of them"
        )
    return service


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _error_code(error: BaseException | None) -> str:
    return str(getattr(getattr(error, "error_code", None), "value", getattr(error, "error_code", None)) or "")


def _describe(error: "AzureError") -> str:
    """The first line of the reason, without the signature of a URL, which is a credential."""
    lines = str(error.message or error).strip().splitlines() or [""]
    return _SECRETS.sub(r"\1…", lines[0])[:_MAX_REASON]
