"""A real S3 server of one's own: moto, in a process that ends with the tests."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.servers import http

# Moto looks whether a key is free and takes it in two steps, between which another writer may win too.
# The process ends when its standard input closes, thus also when the tests are killed.
_SERVER = """
import sys
import threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

moto = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()

def app(environ, start_response):
    with one_at_a_time:
        return [b"".join(moto(environ, start_response))]

server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
sys.stdin.read()
"""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    # No test may meet a person's own settings, or the metadata service of a cloud machine.
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION")


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto; gives its URL."""
    command = [sys.executable, "-c", _SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout and process.stdin
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of an S3 server that lives as long as the tests."""
    with moto_server() as url:
        yield url


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an empty bucket, with the environment set so that the SDK finds it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    name = f"test-{uuid.uuid4().hex}"
    # Moto asks for no signature, and making a client takes longer than most tests.
    http.put(f"{s3_endpoint}/{name}", timeout=60).raise_for_status()
    return name


@pytest.fixture(autouse=True)
def own_aws_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that open nothing."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in _FOREIGN:
        monkeypatch.delenv(name, raising=False)
