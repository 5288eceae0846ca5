"""Emulators of Google Cloud Storage and Azure Blob Storage, each in a process that ends with the tests.

`make emulators` installs them below ``build/emulators``; tests that want one that is absent are skipped.
"""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.servers import http
from support.servers.reserved_port import reserved_port

FOLDER = Path(__file__).parents[3] / "build" / "emulators"
GCS_EMULATOR = FOLDER / "fake-gcs-server"
AZURE_EMULATOR = FOLDER / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"
# The key of every Azurite; Microsoft publishes it.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_REQUIRED = "TIPHYS_EMULATORS"
"""``required``: a missing emulator is a failure, as `make test-stores` wants it."""
_START_SECONDS = 120
# Ends the emulator when its standard input closes, thus also when the tests are killed.
_UNTIL_INPUT_CLOSES = '"$@" </dev/null >/dev/null 2>&1 & cat; kill $!; wait'
_FOREIGN = ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "API_ENDPOINT_OVERRIDE")


@pytest.fixture(autouse=True)
def own_cloud_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may meet a person's own settings, or the metadata service of a cloud machine."""
    for name in (*_FOREIGN, *(name for name in os.environ if name.startswith("AZURE_"))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nonexistent")


@contextmanager
def run_emulator(program: Path, command: Sequence[str]) -> Iterator[str]:
    """Run an emulator whose ``command`` names the port ``{port}``; gives its URL."""
    if not program.exists():
        message = f"{program.name} is not installed: `make emulators` needs Go and npm"
        pytest.fail(message) if os.environ.get(_REQUIRED) == "required" else pytest.skip(message)
    # Without the reservation another server could have the port before the emulator listens, and answer in its place.
    with reserved_port() as port:
        words = [word.format(port=port) for word in command]
        shell = ["sh", "-c", _UNTIL_INPUT_CLOSES, "sh", *words]
        with subprocess.Popen(shell, stdin=subprocess.PIPE) as process:
            assert process.stdin
            try:
                assert _answers(f"http://127.0.0.1:{port}"), f"{program.name} did not start"
                yield f"http://127.0.0.1:{port}"
            finally:
                process.stdin.close()


def _answers(url: str) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            http.get(url, timeout=10)
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return True
    return False


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[str]:
    """URL of an emulator of Google Cloud Storage that lives as long as the tests."""
    options = ("-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", "{port}")
    with run_emulator(GCS_EMULATOR, [str(GCS_EMULATOR), *options]) as url:
        yield url


@pytest.fixture(scope="session")
def azure_endpoint() -> Iterator[str]:
    """URL of an emulator of Azure Blob Storage that lives as long as the tests."""
    options = ("--blobHost", "127.0.0.1", "--blobPort", "{port}", "--inMemoryPersistence", "--skipApiVersionCheck")
    node = shutil.which("node") or "node"
    with run_emulator(AZURE_EMULATOR, [node, str(AZURE_EMULATOR), *options, "--disableTelemetry"]) as url:
        yield url


@pytest.fixture
def gcs_bucket(gcs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an empty bucket, with the environment set so that the library finds it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_endpoint)
    name = f"test-{uuid.uuid4().hex}"
    http.post(f"{gcs_endpoint}/storage/v1/b", json={"name": name}, timeout=60).raise_for_status()
    return name


def connection_string(endpoint: str, account: str = ACCOUNT) -> str:
    return f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={_KEY};BlobEndpoint={endpoint}/{account}"


@pytest.fixture
def azure_container(azure_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an empty container of `ACCOUNT`, with the environment set so that the library finds it."""
    from azure.storage.blob import BlobServiceClient

    text = connection_string(azure_endpoint)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    name = f"test-{uuid.uuid4().hex}"
    with BlobServiceClient.from_connection_string(text) as service:
        service.create_container(name).close()
    return name
