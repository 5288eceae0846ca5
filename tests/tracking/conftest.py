"""A real MLflow server on SQLite and loopback, one for each worker of pytest."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from support.servers.reserved_port import reserved_port

PATIENCE_SECONDS = 300.0


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a running server."""
    pytest.importorskip("mlflow.server", reason="MLflow is not installed here: make test-mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    with reserved_port() as port:
        uri = f"http://127.0.0.1:{port}"
        with (folder / "server.log").open("ab") as log:
            server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
                    *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"),
                    *("--default-artifact-root", str(folder / "artifacts")),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            assert _await_answer(server, uri), (folder / "server.log").read_text()
            yield uri
        finally:
            _end(server)


@pytest.fixture(autouse=True)
def no_settings_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person set for MLflow does not change the tests, nor one test the next."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def _await_answer(server: subprocess.Popen[bytes], uri: str) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{uri}/version", timeout=10) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server with the workers that it has started."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
