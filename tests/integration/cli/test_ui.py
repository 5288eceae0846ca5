"""``tiphys ui`` as a process: it prints its address, answers, and ends when it is asked to."""

import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from hera_pipelines.cli.commands.follow.ui import describe_reach

from .conftest import Finished, begin, invoke


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_store_until_it_is_ended(finished: Finished, tmp_path: Path, how: signal.Signals) -> None:
    with begin(["ui", finished.store, "--port", "0"], tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}runs/{finished.run}", timeout=120) as answer:
            page = answer.read().decode()
        process.send_signal(how)
        _, errors = process.communicate(timeout=120)
    assert f"<title>{finished.run} · Tiphys</title>" in page
    assert (process.returncode, "Ctrl-C ends the pages" in errors) == (0, True)


def test_what_cannot_be_served_is_refused(finished: Finished, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = invoke(["ui", finished.store, "--port", port], tmp_path)
    missing = invoke(["ui", tmp_path / "absent"], tmp_path)

    assert busy.code != 0
    assert str(port) in busy.error
    assert missing.code == 3
    assert "absent" in missing.error


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("lab", False)],
)
def test_beyond_this_machine_it_warns(host: str, is_local: bool) -> None:
    assert (describe_reach(host, "s3://ml-runs/tiphys") == "") == is_local
    assert is_local or f"everybody who reaches {host} can read s3://ml-runs/tiphys" in describe_reach(
        host, "s3://ml-runs/tiphys"
    )
