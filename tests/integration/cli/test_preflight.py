"""``tiphys preflight``, and ``tiphys run --cluster`` that begins with it, against an API server and stores.

| asked | answered |
|---|---|
| a pipeline on a cluster that is fit | exit 0, each check with its result |
| something will go wrong | exit 1, with what to do; `run --cluster` submits nothing |
| no kubeconfig | the checks that need no cluster, and one line |
| no right to read, or to ask about rights | not checked, exit 0 |
| a store or an API server that hangs | not checked, after the time limit |
| `run --cluster --no-preflight` | submitted as it is |
"""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.builders import ledger
from support.builders.hostile_text import HOSTILE, MARK
from support.builders.preflights import write_save
from support.servers.kube_server import KubeServer, Request, write_kubeconfig
from support.stories import small_pipeline
from support.stories.installed_cluster import install

from tiphys.kube import KubeApi
from tiphys.kube.resources import CONFIG_MAPS, GPU_LEDGERS, PERSISTENT_VOLUME_CLAIMS, SECRETS, SERVICE_ACCOUNTS
from tiphys.records import RunRecord
from tiphys.store import DirectoryStore, claim_run

from .conftest import Answer, Command, invoke

TRAINING = """
from hera.workflows import models
from hera_pipelines import Checkpoints, Pipeline, Train

token = models.EnvVar(name="TOKEN", value_from={{"secret_key_ref": {{"name": "hub", "key": "token"}}}})
volume = models.Volume(name="data", persistent_volume_claim={{"claim_name": "corpus"}})
mount = models.VolumeMount(name="data", mount_path="/data")
fit = Train(
    name="fit", image="{image}", command=["fit"], gpus={gpus}, queue="research",
    checkpoints=Checkpoints(), env=[token], volumes=[volume], volume_mounts=[mount],
)
with Pipeline("digits") as pipeline:
    fit({call})
"""


@pytest.fixture
def api(server: KubeServer, tmp_path: Path) -> KubeApi:
    """A cluster whose services keep the runs in the folder ``store``, with queues and what `TRAINING` names."""
    api = install(server, str(tmp_path / "store"))
    body = {"metadata": {"name": "default"}, "spec": ledger.spec(ledger.queues(research={"*": 8}))}
    api.create(GPU_LEDGERS, "tiphys", body)
    api.create(SECRETS, "ml", {"metadata": {"name": "hub"}, "data": {"token": "c2VjcmV0"}})
    claim = {"metadata": {"name": "corpus"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    api.create(PERSISTENT_VOLUME_CLAIMS, "ml", claim)
    return api


@pytest.fixture
def kubeconfig(server: KubeServer, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path, server.url)


def write_training(folder: Path, image: str = f"fit@sha256:{'a' * 64}", gpus: int = 1, call: str = "") -> Path:
    file = folder / "digits.py"
    file.write_text(TRAINING.format(image=image, gpus=gpus, call=call))
    return file


def findings(answer: Answer) -> list[dict[str, Any]]:
    document = json.loads(answer.out)
    assert document["kind"] == "Findings"
    listed: list[dict[str, Any]] = document["findings"]
    return listed


def failed(answer: Answer) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in findings(answer) if one["state"] == "failed"}


@pytest.fixture
def look(tiphys: Command, api: KubeApi, kubeconfig: Path, tmp_path: Path) -> Command:
    """`tiphys preflight` of a file, as JSON."""

    def call(file: Path, *arguments: str | Path) -> Answer:
        given = ("--store", tmp_path / "store", "--kubeconfig", kubeconfig, "-o", "json")
        return tiphys("preflight", file, *given, *arguments)

    return call


def test_a_pipeline_that_is_fit(look: Command, server: KubeServer, tmp_path: Path) -> None:
    before = len(server.requests)
    answer = look(write_training(tmp_path))
    assert answer.code == 0, answer
    states = {one["check"]: one["state"] for one in findings(answer)}
    assert states == dict.fromkeys(states, "ok") | {"grace": "unknown"}
    assert {"store", "cluster", "submit", "gpus", "volumes", "secrets", "images", "size"} <= set(states)
    asked = server.requests[before:]
    assert {one.plural for one in asked if one.verb not in ("get", "list")} == {
        "subjectaccessreviews",
        "selfsubjectaccessreviews",
    }
    read = [one for one in asked if one.plural == "secrets"]
    assert {one.name for one in read} >= {"hub", "tiphys-store", "tiphys-workflow.service-account-token"}
    assert all(one.metadata_only for one in read)


def test_a_problem_is_shown_with_its_place_and_its_remedy(look: Command, api: KubeApi, tmp_path: Path) -> None:
    api.delete(SECRETS, "ml", "hub")
    api.delete(PERSISTENT_VOLUME_CLAIMS, "ml", "corpus")
    api.delete(SERVICE_ACCOUNTS, "ml", "tiphys-workflow")
    answer = look(write_training(tmp_path, gpus=64))
    assert answer.code == 1
    assert "gpus, volumes, secrets" in answer.error
    found = failed(answer)
    assert set(found) == {"cluster", "gpus", "volumes", "secrets"}
    assert "ExceedsMaxQuota: 64 GPUs can never be had" in found["gpus"]["sentence"]
    assert {(one["place"], one["line"]) for name, one in found.items() if name != "cluster"} == {("fit", 8)}
    assert all(one["remedy"] for one in found.values())


def test_a_table_for_people(tiphys: Command, api: KubeApi, kubeconfig: Path, tmp_path: Path) -> None:
    given = ("--store", tmp_path / "store", "--kubeconfig", kubeconfig)
    answer = tiphys("preflight", write_training(tmp_path, image="fit:1"), *given)
    assert answer.code == 0
    assert answer.out.splitlines()[0].split() == ["RESULT", "CHECK", "WHERE", "FINDING"]
    [line] = [line for line in answer.out.splitlines() if line.startswith("warn")]
    assert line.split()[:4] == ["warn", "images", "fit", "(digits.py:8)"]
    assert "the image fit:1 has the tag 1" in line
    assert "→ pin it: fit@sha256:…" in answer.out


def test_the_services_are_of_another_version(look: Command, api: KubeApi, tmp_path: Path) -> None:
    labels = {"metadata": {"labels": {"app.kubernetes.io/version": "9.0.0"}}}
    api.patch(CONFIG_MAPS, "ml", "tiphys-executor-plugin", labels)
    [version] = [one for one in findings(look(write_training(tmp_path))) if one["check"] == "version"]
    assert (version["state"], "9.0.0" in version["sentence"]) == ("warning", True)


def test_an_object_that_a_step_makes_of_a_kind_that_is_not_there(
    look: Command, server: KubeServer, tmp_path: Path
) -> None:
    server.paths["/apis/batch/v1"] = {
        "resources": [{"name": "jobs", "kind": "Job"}, {"name": "jobs/status", "kind": "Job"}]
    }
    server.authorize = lambda request: not (request.plural == "jobs" and request.user.endswith(":tiphys-executor"))
    makers = {
        name: {"name": name, "resource": {"action": "create", "manifest": f"{kind}\nmetadata: {{generateName: x-}}"}}
        for name, kind in MADE.items()
    }
    file = write_workflow(tmp_path, {"name": "prep", "metadata": STEP, "container": {"image": "x"}}, *makers.values())
    lines = [one["sentence"] for one in findings(look(file)) if one["check"] == "rights"]
    assert "the cluster has no kind JobSet (jobset.x-k8s.io/v1alpha2): the step ends in Error" in lines
    assert (
        "service account tiphys-executor may not create jobs.batch, get jobs.batch in ml: its pods end in Error"
        in lines
    )


MADE = {
    "make": "apiVersion: batch/v1\nkind: Job",
    "train": "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet",
}
STEP = {"annotations": {"tiphys.dev/adopt": "step"}}


def write_workflow(folder: Path, *templates: dict[str, Any]) -> Path:
    """A Workflow as YAML, one task for each template."""
    tasks = [{"name": f"task-{number}", "template": one["name"]} for number, one in enumerate(templates)]
    document = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "loud-"},
        "spec": {"entrypoint": "main", "templates": [{"name": "main", "dag": {"tasks": tasks}}, *templates]},
    }
    file = folder / "workflow.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_an_account_without_read_rights_reads_which_checks_are_unknown(
    look: Command, server: KubeServer, tmp_path: Path
) -> None:
    server.authorize = lambda request: bool(request.path)
    answer = look(write_training(tmp_path))
    assert answer.code == 0, answer
    unread = {one["check"] for one in findings(answer) if one["state"] == "unknown"}
    assert unread == {"cluster", "submit", "gpus", "volumes", "secrets", "grace"}


@pytest.mark.parametrize("status", [403, 500])
def test_an_api_server_that_refuses_each_review(look: Command, server: KubeServer, tmp_path: Path, status: int) -> None:
    for plural in ("subjectaccessreviews", "selfsubjectaccessreviews"):
        server.fail_next(status, 1000, plural=plural)
    answer = look(write_training(tmp_path), "--service-account", "own")
    assert answer.code == 0, answer
    unread = [one["sentence"] for one in findings(answer) if one["state"] == "unknown"]
    assert any("a fault of this test" in sentence for sentence in unread)


def test_without_a_kubeconfig(tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    answer = tiphys("preflight", write_training(tmp_path), "-o", "json", "--store", tmp_path / "store")
    assert answer.code == 0
    [unread] = [one for one in findings(answer) if one["check"] == "cluster"]
    assert "installation, rights, claims, Secrets, queues: there is no cluster to ask" in unread["sentence"]
    assert not {"submit", "rights", "volumes", "secrets", "gpus"} & {one["check"] for one in findings(answer)}


def test_queues_of_a_file_need_no_cluster(tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    queues = tmp_path / "queues.yaml"
    queues.write_text("queues: [{name: research, gpus: {'*': 4}}]")
    given = ("-o", "json", "--store", tmp_path / "store", "--queues", queues)
    assert tiphys("preflight", write_training(tmp_path, gpus=4), *given).code == 0
    answer = tiphys("preflight", write_training(tmp_path, gpus=16), *given)
    assert (answer.code, "ExceedsMaxQuota" in failed(answer)["gpus"]["sentence"]) == (1, True)


def test_a_kubeconfig_that_is_named_and_not_there(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("preflight", write_training(tmp_path), "--kubeconfig", tmp_path / "none")
    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.py", "x = 1", "defines no pipeline"),
        ("x.py", "raise ValueError(7)", "ValueError: 7"),
        ("x.yaml", "kind: Pod", "it has no Workflow"),
        ("x.yaml", "{", "this is not YAML"),
    ],
)
def test_a_file_that_is_no_pipeline(tiphys: Command, tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    answer = tiphys("preflight", name)
    assert (answer.code, answer.out, words in answer.error) == (2, "", True)


def test_a_cron_workflow_whose_name_is_too_long(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    source = small_pipeline.PIPELINE.replace("Pipeline, Retries", "CronPipeline, Retries").replace(
        'Pipeline("tiny", ', f'CronPipeline("{"n" * 53}", schedules=["0 2 * * *"], '
    )
    (tmp_path / "nightly.py").write_text(source)
    store = ("--store", tmp_path / "store")
    answer = tiphys("preflight", "nightly.py", "-o", "json", *store)
    assert (answer.code, "name of 53 characters" in failed(answer)["schedule"]["sentence"]) == (1, True)
    assert tiphys("compile", "nightly.py", *store).code == 2
    (tmp_path / "nightly.py").write_text(source.replace("n" * 53, "n" * 52))
    assert tiphys("preflight", "nightly.py", "-o", "json", *store).code == 0
    assert tiphys("compile", "nightly.py", *store).code == 0


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    accepted.append(listening.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in accepted:
                one.close()


def test_a_store_and_an_api_server_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_server() as url:
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT_URL_S3": url}.items():
            monkeypatch.setenv(name, value)
        given = ("--store", "s3://ml-runs/tiphys", "--kubeconfig", write_kubeconfig(tmp_path, url))
        line = ["preflight", write_training(tmp_path), *given, "--timeout", "0.5", "-o", "json"]
        answer = invoke(line, tmp_path)  # a process of its own: the threads that wait end with it
    assert answer.code == 0, answer
    unread = {one["check"]: one["sentence"] for one in findings(answer) if one["state"] == "unknown"}
    assert set(unread) == {"store", "cluster", "grace"}
    assert "store s3://ml-runs/tiphys did not answer within 0.5 s" in unread["store"]
    assert f"the API server {url} did not answer within 0.5 s" in unread["cluster"]


def test_a_bucket_that_is_not_there(
    tiphys: Command, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    file = write_training(tmp_path)
    sound = tiphys("preflight", file, "--store", f"s3://{bucket}/runs", "-o", "json")
    assert sound.code == 0, sound
    # Moto does not compare checksums, which is a warning.
    troubled = [one["sentence"] for one in findings(sound) if one["check"] == "store"]
    assert [sentence.partition("/runs: ")[2].partition(":")[0] for sentence in troubled] == ["checksum"]
    gone = tiphys("preflight", file, "--store", f"s3://{bucket}-gone/runs", "-o", "json")
    assert (gone.code, set(failed(gone))) == (1, {"store"})


def submit(tiphys: Command, kubeconfig: Path, tmp_path: Path, file: Path, *arguments: str) -> Answer:
    given = ("--store", tmp_path / "store", "--kubeconfig", kubeconfig, "--detach", "--run", "hot")
    return tiphys("run", file, "--cluster", *given, *arguments)


def test_run_submits_what_has_no_problem(
    tiphys: Command, api: KubeApi, server: KubeServer, kubeconfig: Path, tmp_path: Path
) -> None:
    answer = submit(tiphys, kubeconfig, tmp_path, write_training(tmp_path, image="fit:1"))
    assert (answer.code, answer.out) == (0, "hot\n")
    assert "preflight warning: images: fit (digits.py:8): the image fit:1 has the tag 1" in answer.err
    assert "preflight problem" not in answer.err
    assert "preflight: 1 checks could not be made" in answer.err
    assert len(server.objects("workflows")) == 1


def test_run_stops_at_a_problem_unless_checks_are_switched_off(
    tiphys: Command, api: KubeApi, server: KubeServer, kubeconfig: Path, tmp_path: Path
) -> None:
    file = write_training(tmp_path, gpus=64)
    answer = submit(tiphys, kubeconfig, tmp_path, file, "--quiet")
    assert (answer.code, answer.out) == (1, "")
    assert "preflight problem: gpus: fit (digits.py:8): ExceedsMaxQuota" in answer.err
    assert "preflight warning" not in answer.err
    assert answer.error.endswith("add --no-preflight to submit all the same")
    assert not server.objects("workflows")
    assert not (tmp_path / "store" / "control" / "runs").exists()
    assert submit(tiphys, kubeconfig, tmp_path, file, "--no-preflight").code == 0
    assert len(server.objects("workflows")) == 1


def test_run_tries_a_store_that_holds_runs_no_more(
    tiphys: Command, api: KubeApi, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []
    where = "hera_pipelines.cli.author.preflight_observation.probe_store"
    monkeypatch.setattr(where, lambda url, races: probed.append(url) or [])  # type: ignore[func-returns-value]
    file = write_training(tmp_path)
    assert submit(tiphys, kubeconfig, tmp_path, file).code == 0
    assert len(probed) == 1
    assert submit(tiphys, kubeconfig, tmp_path, file, "--run", "cold").code == 0
    assert len(probed) == 1


def test_an_argo_server_may_submit_for_an_account_that_the_api_server_refuses(
    look: Command, server: KubeServer, tmp_path: Path
) -> None:
    server.authorize = lambda request: (request.verb, request.plural) != ("create", "workflows")
    file = write_training(tmp_path)
    assert set(failed(look(file))) == {"submit"}
    answer = look(file, "--argo-server", "argo.example.com:443")
    assert (answer.code, failed(answer)) == (0, {})


def test_no_preflight_is_for_a_cluster(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path / "code"), "--no-preflight")
    assert (answer.code, "--no-preflight: this is for a cluster; add --cluster" in answer.error) == (2, True)


def test_hostile_texts_of_file_and_cluster_stay_visible(
    tiphys: Command, api: KubeApi, server: KubeServer, kubeconfig: Path, tmp_path: Path
) -> None:
    def refuse(request: Request) -> bool:
        return request.plural != "secrets"

    server.authorize = refuse
    server.fail_next(403, 100, plural="persistentvolumeclaims", message=HOSTILE)
    container = {
        "image": f"loud{HOSTILE}",
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": f"../{HOSTILE}", "key": "k"}}},
            {"name": "B", "value": f"hf://{HOSTILE.replace(' ', '')}"},
        ],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}]
    made = {"action": "create", "manifest": "{apiVersion: ../../x, kind: X}"}
    file = write_workflow(
        tmp_path,
        {"name": "shout", "metadata": STEP, "container": container, "volumes": volumes},
        {"name": HOSTILE, "resource": made},
    )
    given = ("--store", tmp_path / "store", "--kubeconfig", kubeconfig)
    answer = tiphys("preflight", file, *given)
    assert MARK in answer.out
    assert not {character for character in answer.out + answer.err if ord(character) in range(0x80, 0xA0)}
    assert "\x1b" not in answer.out + answer.err
    assert not [one for one in server.requests if ".." in one.path + one.name]


PAGE = Path(__file__).parents[3] / "docs" / "preflight.md"


def test_the_page_shows_what_the_command_prints(
    tiphys: Command, api: KubeApi, kubeconfig: Path, tmp_path: Path
) -> None:
    source, shown = re.findall(r"^```(?:python)?\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "digits.py").write_text(source)
    store = DirectoryStore(tmp_path / "store")
    record = RunRecord(run="digits-1", pipeline="digits", workflow={}, digest="d")
    claim_run(store, record)
    for number in range(1, 41):
        write_save(store, "digits-1", 48.0 if number > 39 else 34.0, number)
    given = ("-n", "ml", "--store", tmp_path / "store", "--kubeconfig", kubeconfig)
    answer = tiphys("preflight", "digits.py", *given)
    assert answer.code == 1
    printed = {" ".join(line.split()) for line in answer.out.splitlines()}
    lines = [" ".join(line.split()) for line in shown.splitlines()[1:]]
    assert len(lines) == 11
    assert [line for line in lines if line not in printed] == []
