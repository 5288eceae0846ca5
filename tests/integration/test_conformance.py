"""`tiphys conformance` with real processes, on a folder and on an S3 server, good and bad.

| server | what is found |
|---|---|
| sound, or loses replies | held |
| ignores conditions, lists late | the claims of processes are broken |
| a person interrupts | a report of what was tried by then, and nothing is left |
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.servers import http
from support.servers import s3_proxy as faults
from support.servers.s3_proxy import S3Proxy

from hera_pipelines.cli import main
from hera_pipelines.conformance import store_promises
from hera_pipelines.conformance.store_promises import StorePromises
from hera_pipelines.demo.processes import PromiseBrokenError
from tiphys.store import S3Store

PATIENCE_SECONDS = 900
PAGE = Path(__file__).parents[2] / "docs/conformance.md"


@pytest.fixture
def proxy(bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with faults.s3_proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        monkeypatch.setattr(store_promises, "CLAIMS", 3)
        monkeypatch.setattr(store_promises, "WRITERS", 2)
        yield proxy


def lists_nothing(request: faults.Request, forward: faults.Forward) -> faults.Reply:
    reply = forward(request)
    if not faults.is_listing(request):
        return reply
    return reply._replace(body=re.sub(rb"<Contents>.*?</Contents>", b"", reply.body, flags=re.DOTALL))


def promises_of(bucket: str) -> StorePromises:
    store = S3Store(bucket, "trial")
    return StorePromises(store, store, random.Random(3), time.monotonic() + PATIENCE_SECONDS)


def test_claims_of_processes_are_won_once_also_if_replies_are_lost(bucket: str, proxy: S3Proxy) -> None:
    lost = faults.Times(2, faults.is_write, faults.loses_reply)
    proxy.behaviour = lost
    assert "each of 3 claims was won by one of 2 processes" in promises_of(bucket).claims().sentence
    assert lost.happened == 2


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (faults.ignores_conditions, "2 of 2 processes believe that they won the claim"),
        (lists_nothing, "was written, and a listing did not show it"),
    ],
)
def test_claims_of_processes_find_a_server_that_breaks_them(
    bucket: str, proxy: S3Proxy, behaviour: faults.Behaviour, sentence: str
) -> None:
    proxy.behaviour = behaviour
    with pytest.raises(PromiseBrokenError, match=sentence):
        promises_of(bucket).claims()


def test_a_writer_that_is_asked_nothing_makes_no_store(tmp_path: Path) -> None:
    """As one that an interrupt has left between its start and the first claim."""
    command = [sys.executable, "-m", "hera_pipelines.conformance.writer", str(tmp_path / "store"), "writer-0"]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=PATIENCE_SECONDS)
    assert list(tmp_path.iterdir()) == []


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hera_pipelines.cli", "conformance", "--store", str(folder / "store"), *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environ)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("claims", signal.SIGINT),
        ("killed-commit", signal.SIGTERM),
        pytest.param("claims", signal.SIGTERM, marks=pytest.mark.heavy),
        pytest.param("killed-commit", signal.SIGINT, marks=pytest.mark.heavy),
    ],
)
def test_an_interrupt_leaves_a_report_and_nothing_in_the_store(tmp_path: Path, moment: str, number: int) -> None:
    (tmp_path / "store/control/runs").mkdir(parents=True)
    report = tmp_path / "reports/report.json"
    report.parent.mkdir()
    with begin(tmp_path, "--output", str(report)) as process:
        assert process.stderr
        assert next(line for line in process.stderr if line.startswith(f"{moment}:"))
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 130, rest
    assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert [path.name for path in (tmp_path / "store/control").iterdir()] == ["runs"]
    found = {promise["name"]: promise for promise in json.loads(report.read_text())["promises"]}
    assert found["create-only"]["result"] == "held"
    assert (found[moment]["result"], found[moment]["evidence"]) == ("not tried", "interrupted")
    assert found["damage"]["result"] == "not tried"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--queue", "research"], 2, "add --cluster"),
        (["--minutes", "soon"], 2, "should be a valid number"),
    ],
)
def test_a_wrong_call_tries_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    (tmp_path / "store").mkdir()
    assert main(["conformance", "--store", str(tmp_path / "store"), *arguments]) == code
    assert sentence in capsys.readouterr().err
    assert list((tmp_path / "store").iterdir()) == []


def test_a_store_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    assert main(["conformance", "--store", str(tmp_path / "store")]) == 3
    assert list(tmp_path.iterdir()) == []


Begun = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def tried(tmp_path: Path) -> Begun:
    """Runs the whole command; gives its exit code, and what its report says of each promise."""

    def run(store: str, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = main(["conformance", "--store", store, "--seed", "5", "--output", str(tmp_path / "out"), *arguments])
        [document] = (tmp_path / "out").glob("*.json")
        [page] = (tmp_path / "out").glob("*.html")
        assert "Conformance of" in page.read_text()
        return code, {promise["name"]: promise for promise in json.loads(document.read_text())["promises"]}

    return run


@pytest.mark.heavy
def test_a_folder_holds_everything_as_the_page_prints_it_and_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    [line] = re.findall(r"^\$ tiphys (conformance --store \./store .*)$", page, re.MULTILINE)
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 0
    shown, printed = (re.findall(r"^ok +(\S+)", text, re.MULTILINE) for text in (capsys.readouterr().out, page))
    assert shown == printed
    [report] = map(json.loads, (path.read_text() for path in (tmp_path / "report").glob("*.json")))
    found = {promise["name"]: promise["evidence"] for promise in report["promises"]}
    assert (report["result"], report["seed"]) == ("held", 5)
    assert "killed 4 times" in found["killed-commit"]
    assert "was quarantined" in found["damage"]
    assert list((tmp_path / "store").rglob("*")) == []


@pytest.mark.heavy
def test_an_s3_server_holds_everything_and_is_left_as_it_was(bucket: str, s3_endpoint: str, tried: Begun) -> None:
    S3Store(bucket, "p").create("control/runs/a", b"")
    code, found = tried(f"s3://{bucket}/p")
    assert code == 0, found
    assert found.pop("checksum")["result"] == "held, with a warning"
    assert {promise["result"] for promise in found.values()} == {"held"}
    assert {"clock", "create-only-parts", "claims", "fence", "pins", "killed-commit", "damage"} <= set(found)
    assert http.get(f"{s3_endpoint}/{bucket}?list-type=2").text.count("<Key>") == 1
    assert "<Upload>" not in http.get(f"{s3_endpoint}/{bucket}?uploads").text


@pytest.mark.heavy
def test_a_training_that_ends_otherwise_breaks_the_promise(
    tmp_path: Path, tried: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.setattr("hera_pipelines.conformance.program.train_undisturbed", lambda seed: "another")
    code, found = tried(str(tmp_path / "store"))
    assert code == 1
    assert "its result is not that of an undisturbed one" in found["killed-commit"]["evidence"]
    assert found["damage"]["result"] == "not tried"


@pytest.mark.heavy
def test_a_cluster_that_is_not_there_is_not_tried_and_has_an_exit_code(tmp_path: Path, tried: Begun) -> None:
    (tmp_path / "store").mkdir()
    code, found = tried(str(tmp_path / "store"), "--cluster", "--kubeconfig", str(tmp_path / "none"))
    assert code == 6
    assert "cannot connect to a Kubernetes cluster" in found["quota"]["evidence"]
    assert {found[name]["result"] for name in ("submission", "deleted-pod", "quota")} == {"not tried"}


@pytest.mark.heavy
def test_a_time_that_is_too_short_leaves_promises_untried(
    tmp_path: Path, tried: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    # A training that does not end in time, however fast the machine is: it waits in its first save.
    waits = {f"checkpoint.before_copy=hang:3600;{place}": at for place, at in store_promises._DEATHS.items()}
    monkeypatch.setattr(store_promises, "_DEATHS", waits)
    code, found = tried(str(tmp_path / "store"), "--minutes", "0.1")
    assert code == 6
    assert "--minutes" in found["damage"]["remedy"] + found["killed-commit"]["remedy"]
    assert list((tmp_path / "store").rglob("*")) == []
