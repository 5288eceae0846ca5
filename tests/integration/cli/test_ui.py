"""``tiphys ui`` as a process: it prints its address, answers, and ends when it is asked to."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest
from support.servers import http
from support.stories import small_pipeline
from support.stories.pages import form_fields

from hera_pipelines.cli.look.ui import describe_reach

from .conftest import Finished, begin, invoke
from .test_detach import started


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_ui_serves_the_store_until_a_signal_ends_it(
    finished: Finished, tmp_path: Path, how: signal.Signals
) -> None:
    with begin(["ui", finished.store, "--port", "0"], tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}runs/{finished.run}", timeout=120) as answer:
            page = answer.read().decode()
        process.send_signal(how)
        _, errors = process.communicate(timeout=120)
    assert f"<title>{finished.run} · Tiphys</title>" in page
    assert (process.returncode, "Ctrl-C ends the pages" in errors) == (0, True)


@pytest.mark.parametrize("options", [(), ("--allow-host", "runs.example.org")])
def test_pages_on_all_addresses_answer_to_allowed_names_alone(
    finished: Finished, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with begin(["ui", finished.store, "--host", "0.0.0.0", "--port", "0", *options], tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
        answers = {
            name: http.get(url, headers={"Host": name}, timeout=120).status_code
            for name in ("evil.example", "runs.example.org", "localhost", "0.0.0.0:8321")
        }
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert answers == {
        "evil.example": 400,
        "runs.example.org": 200 if options else 400,
        "localhost": 200,
        "0.0.0.0:8321": 200,
    }
    assert ("allow another name with --allow-host NAME" in errors) == (not options)


def test_a_taken_port_and_a_missing_store_are_refused(finished: Finished, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = invoke(["ui", finished.store, "--port", port], tmp_path)
    missing = invoke(["ui", tmp_path / "absent"], tmp_path)

    assert busy.code != 0
    assert str(port) in busy.error
    assert missing.code == 3
    assert "absent" in missing.error


@pytest.mark.heavy
def test_a_run_is_stopped_resumed_and_forked_from_its_page(tmp_path: Path) -> None:
    code = started(tmp_path)
    with begin(["ui", "--port", "0", "--actions"], tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        token = next(line for line in process.stderr if "token" in line).rpartition(" ")[2].strip()
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url, headers={"Origin": url.rstrip("/")}, timeout=120) as client:
            assert client.post("sign-in", data={"token": token}).status_code == 303

            def confirm(action: str, query: str = "") -> str:
                plan = client.get(f"runs/r/{action}{query}")
                answer = client.post(f"runs/r/{action}", data=form_fields(plan.text))
                assert answer.status_code == 303, answer.text
                return answer.headers["Location"]

            assert confirm("stop") == "/runs/r"
            assert invoke(["attach", "r"], tmp_path).code == 130
            small_pipeline.let_go(code)
            assert confirm("resume") == "/runs/r"
            resumed = invoke(["attach", "r"], tmp_path)
            assert confirm("fork", "?name=longer&parameter.steps=25") == "/runs/longer"
            forked = invoke(["attach", "longer"], tmp_path)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)

    assert (process.returncode, resumed.code, forked.code) == (0, 0, 0)
    events = invoke(["events", "r"], tmp_path).out
    for action in ("stop", "resume", "fork"):
        assert f"{action} requested on a web page by holder of the token, from 127.0.0.1" in events
    assert "steps=25" in invoke(["get", "longer"], tmp_path).out


def test_a_token_of_the_environment_is_not_printed_and_a_short_one_is_refused(
    finished: Finished, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "hera_pipelines.cli", "ui", str(finished.store), "--port", "0", "--actions"]
    answer = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, "TIPHYS_UI_TOKEN": "short"}, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "the token of the pages has 5 characters" in answer.stderr
    assert invoke(["ui", finished.store, "--trusted-proxy", "10.0.0.7"], tmp_path).code == 2


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("lab", False)],
)
def test_the_ui_warns_beyond_this_machine(host: str, is_local: bool) -> None:
    assert (describe_reach(host, "s3://ml-runs/tiphys") == "") == is_local
    assert is_local or f"everybody who reaches {host} can read s3://ml-runs/tiphys" in describe_reach(
        host, "s3://ml-runs/tiphys"
    )
