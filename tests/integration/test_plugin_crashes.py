"""The service is killed at every boundary between two writes, and the call repeated: one effect.

The oracle is a run that was never interrupted: in the end both have stored
objects under the same keys, with the same content but for nonces, times and
lease ids, and no GPU is held.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes.argo_agent import Agent
from support.processes.forking import ForkingProcess
from support.processes.plugin import FORKED_MODULES, TOKEN, Service
from support.servers import http
from support.stories.plugin import Flow, World, commit, fit, gpus, world
from tiphys_plugin import load_queues

from tiphys.records import SubmissionClaim, SubmissionKind
from tiphys.store import RunLayout, claim_record

QUEUES = "queues: [{name: research, gpus: {A100: 8}}]"
FIT = fit(gpu=gpus(8), share=True)

DIFFERS = ("nonce", "written_at", "lease", "cluster", "seal")
"""A local cluster is named after its folder, and each test has its own; a seal is made of all the others."""

HELD = re.compile(rb"<td>[0-9a-z. ]+<td>8\b")
"""How long an attempt held its 8 GPUs, in the page of a submission."""

DIGEST = re.compile(r"-[0-9a-f]{64}$")
"""Of the listed outputs with their versions, in the name of a marker."""

# A point after a record is passed only by the call that wrote it, so each list is passed in one go.
CHAINS = [
    (
        "admit",
        (
            "admit.after_submission_claim",
            "admit.after_bind",
            "admit.after_run_record",
            "ledger.before_commit",
            "ledger.after_commit",
            "admit.after_lease",
            "admit.before_claim",
            "admit.after_claim",
        ),
    ),
    ("conclude failure", ("conclude.before_failure", "end.before_record", "end.after_record")),
    ("conclude failure", ("conclude.after_failure",)),
    ("admit next", ("ledger.after_commit", "admit.after_claim")),
    ("conclude", ("conclude.before_end", "end.before_record", "end.after_record", "conclude.after_projection")),
    ("conclude", ("conclude.after_end",)),
    ("finalize", ("finalize.after_seal",)),
    ("adopt", ("adopt.before_record", "adopt.after_record", "adopt.after_projection")),
]

Call = Callable[[str, dict[str, Any]], dict[str, Any]]


def life_of_a_run(flow: Flow, call: Call) -> None:
    """Preempted once, resumed, finished, sealed; then adopted by the next submission."""
    store = flow.world.store
    admitted = call("admit", flow.document(flow.body("admit", "fit", 0)))
    assert answer(admitted, "attempt") == "1"
    commit(store, "digits-abc12/fit", attempt=1, step=100)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    failed = flow.document(flow.body("conclude", "fit", 0, status="Failed", exit_code="75"))
    assert call("conclude failure", failed)["phase"] == "Error"
    again = call("admit next", flow.document(flow.body("admit", "fit", 1)))
    assert (answer(again, "attempt"), answer(again, "resume-from")) == ("2", "1-100")
    store.create(f"{answer(again, 'outputs')}/artifacts/model", b"weights")
    flow.pod("fit", 2, retry=1, phase="Succeeded", exit_code=0)
    succeeded = flow.document(flow.body("conclude", "fit", 1, status="Succeeded", exit_code="0"))
    assert call("conclude", succeeded)["phase"] == "Succeeded"
    call("finalize", flow.document({"op": "finalize", "node": "onExit", "status": "Succeeded", "failures": "null"}))
    later = resumed(flow.world)
    adopted = call("adopt", later.document(later.body("admit", "fit", 0)))
    assert answer(adopted, "run") == "false"
    document = later.document(later.body("conclude", "fit", 0, status="Skipped", exit_code="-1"))
    assert call("conclude adopted", document)["phase"] == "Succeeded"


def resumed(here: World) -> Flow:
    wanted = SubmissionClaim(
        run="digits-abc12", submission=2, kind=SubmissionKind.RESUME, workflow_name="digits-abc12-2", namespace="ml"
    )
    claim_record(here.store, RunLayout("digits-abc12").submission(2), wanted)
    flow = here.submit(FIT, name="digits-abc12-2", uid="uid-2")
    flow.run, flow.submission = "digits-abc12", "2"
    return flow


def answer(node: dict[str, Any], name: str) -> str:
    return next(p["value"] for p in node["outputs"]["parameters"] if p["name"] == name)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Any]:
    here = start(tmp_path_factory.mktemp("reference"))

    def call(_: str, document: dict[str, Any]) -> dict[str, Any]:
        return here.core.execute_document(document).to_json()["node"]

    life_of_a_run(here.submit(FIT), call)
    here.core.close()
    return stored(here)


@pytest.fixture(scope="module")
def forking() -> Iterator[ForkingProcess]:
    with ForkingProcess(*FORKED_MODULES) as process:
        yield process


@pytest.mark.heavy
@pytest.mark.parametrize(("operation", "points"), CHAINS, ids=[f"{name}: {points[-1]}" for name, points in CHAINS])
def test_killed_service_repeats_the_call_with_one_effect(tmp_path, operation, points, uninterrupted, forking):
    here = start(tmp_path)
    log = tmp_path / "faults.log"
    crashes = iter(points)

    def call(name: str, document: dict[str, Any]) -> dict[str, Any]:
        if name == operation:
            for point in crashes:
                crash(forking, tmp_path, point, log, document)
        agent.url = agent.url or running.__enter__().url
        return agent.run(document)

    running, agent = Service(tmp_path, queues=tmp_path / "queues.yaml", forking=forking), Agent("", TOKEN)
    try:
        life_of_a_run(here.submit(FIT), call)
    finally:
        running.__exit__(None, None, None)
    assert log.read_text().splitlines() == [f"{point}=crash" for point in points]
    assert stored(here) == uninterrupted
    assert here.ledger.snapshot().leases == ()


def crash(forking: ForkingProcess, root: Path, point: str, log: Path, document: dict[str, Any]) -> None:
    """Have the service die at ``point`` while it answers ``document``."""
    with Service(root, f"{point}=crash", log, root / "queues.yaml", forking) as service:
        with pytest.raises(httpx.TransportError):
            http.post(
                f"{service.url}/api/v1/template.execute",
                json=document,
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=120,
            )
        assert service.killed()


def start(root: Path) -> World:
    (root / "queues.yaml").write_text(QUEUES)
    return world(root, load_queues(root / "queues.yaml"))


def stored(here: World) -> dict[str, Any]:
    """What the plugin wrote, by key, without what must differ between two runs.

    Events are told for people, and one may be lost in a crash; nothing decides by them.
    """
    found: dict[str, Any] = {}
    for key in (info.key for prefix in ("control/runs/", "control/memo/") for info in here.store.list(prefix)):
        data = here.store.read(key)
        if key.endswith(".json") and "/events/" not in key:
            record = json.loads(data)
            if record.get("last_checkpoint"):
                record["last_checkpoint"].pop("at")  # each test commits a checkpoint of its own
            for output in record.get("outputs", ()):
                for entry in output["objects"]:
                    entry.pop("version")  # the store's: each test writes its outputs itself
            found[key] = {field: value for field, value in record.items() if field not in DIFFERS}
        elif key.endswith(".html"):
            found[key] = HELD.sub(b"<td>held<td>8", data)
        elif "/done/" in key:
            found[DIGEST.sub("", key)] = data
        elif "/events/" not in key:
            found[key] = data
    return found


def test_service_answers_and_stops_cleanly_when_asked_to(tmp_path):
    here = start(tmp_path)
    flow = here.submit(FIT)
    with Service(tmp_path, queues=tmp_path / "queues.yaml") as service:
        agent = Agent(service.url, TOKEN)
        assert agent.run(flow.document(flow.body("admit", "fit", 0)))["phase"] == "Succeeded"
        code, logged = service.terminate()
    assert code == 0
    assert [json.loads(line)["event"] for line in logged.splitlines()] == ["service.stopping"]
    assert TOKEN not in logged
