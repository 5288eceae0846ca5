"""A training on four nodes as a real Indexed Job: how it comes together, how it ends, and what is left.

The plugin's own decisions, and Argo's part played by the test: it fills in the
manifest that compile made, creates the Job, and asks to admit and to conclude.

| what happens | what must hold |
|---|---|
| all ranks start | they find each other by the host name of the first, and get their numbers |
| one rank is deleted | the others are told, all end, the GPUs come back after the last, the cause is preemption |
| the ranks keep checkpoints | all save at one step when one is told to go, and the next attempt begins there |
| one rank fails | the others are told, and its exit code is the cause, not theirs |
| the pod that watched for Argo is lost | the Job is ended, and its pods get their grace period |
| the Workflow is stopped | the controller ends the Job |
| the Workflow is deleted | so are Job and pods |
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cluster.client import SECONDS, Cluster, Json, Store
from hera.workflows import DAG, Artifact
from support.builders.argo_objects import NARRATED
from support.builders.ledger import ask
from support.fakes.resource_templates import filled_in
from support.stories.plugin import QUICK, Flow, outputs, phase, said
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.pod_cleanup import GangCleaner
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter
from tiphys_plugin import PluginCore, Queues, SqliteLedger
from tiphys_plugin.cluster.kubernetes_cluster import KubernetesCluster
from tiphys_plugin.quota.lease import Admitted, Deferred
from tiphys_plugin.quota.ledger import transitions

from hera_pipelines import Checkpoints, Pipeline, Train
from tiphys.kube import KubeApi, ListSnapshot
from tiphys.kube.resources import JOBS, PODS, WORKFLOWS
from tiphys.protocol.gang import GANG_LABEL, GANG_SERVICE, MEMBER_LABEL
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, STORE_SECRET
from tiphys.records import utc_now
from tiphys.store import Store as RunStore

RANKS = 4
QUEUES = {"queues": [{"name": "research", "gpus": {"*": RANKS}, "preempts_lower_priority": True}]}
SETTINGS = replace(QUICK, pod_end_timeout_seconds=2 * SECONDS)
"""No end is forced: these are pods that take their time on a busy machine."""
PROGRAM = """
import os, signal, socket, sys, time
rank, members = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
first = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(("", first[1]))
    others = [server.accept()[0] for _ in range(members - 1)]
else:
    while True:
        try:
            line = socket.create_connection(first, timeout=5)
            break
        except OSError:
            time.sleep(0.2)
print(f"rank {rank} of {members} has met the others", flush=True)
while not os.path.exists("/tmp/exit"):
    time.sleep(0.1)
sys.exit(int(open("/tmp/exit").read()))
"""

TRAINER = """
import time
import numpy
from tiphys import checkpoint
with checkpoint.session() as session:
    state = session.restore(default={"weights": numpy.zeros(4), "step": 0})
    first = state["step"]
    print(f"begins at {first} and has met the others", flush=True)
    for step in range(first + 1, 1_000_000):
        state["step"] = step
        time.sleep(0.02)
        if session.step(step, state):
            print("saves", step, flush=True)
        if first and step >= first + 50:
            break
numpy.save("/tmp/weights.npy", state["weights"])
"""

ELASTIC = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(f"node {os.environ['NODE_RANK']} of {os.environ['PET_NNODES']} has met the others", flush=True)
while not os.path.exists("/tmp/exit"):
    time.sleep(0.1)
sys.exit(int(open("/tmp/exit").read()))
"""


class Training:
    """One Workflow with one step on four nodes, and who answers and executes it."""

    def __init__(
        self, cluster: Cluster, api: KubeApi, store: RunStore, ledger: SqliteLedger, image: str, program: str
    ) -> None:
        self.cluster, self.api, self.ledger = cluster, api, ledger
        self.core = PluginCore(store, KubernetesCluster(api, None, "kubernetes:test"), ledger, settings=SETTINGS)
        self.manifest = _pipeline(store.url, image, program, "2:4" if program == ELASTIC else RANKS)
        self.manifest["metadata"] |= {"name": "digits", "namespace": api.namespace}
        self.manifest["metadata"]["annotations"] |= NARRATED
        made = api.create(WORKFLOWS, api.namespace, {**self.manifest, "status": {"phase": "Running"}})
        self.uid: str = made["metadata"]["uid"]
        self.flow = Flow(self, "digits", self.uid, namespace=api.namespace)  # type: ignore[arg-type]  # the core is enough
        self.job = ""

    def begin(self, retry: int = 0) -> None:
        """Admit an attempt and create its Job, as Argo's executor would; it runs once all ranks have met."""
        admitted = self.flow.admit("fit", retry)
        assert phase(admitted) == "Succeeded", said(admitted)
        answers = outputs(admitted)
        assert answers["run"] == "true", said(admitted)
        [run] = [one for one in self.manifest["spec"]["templates"] if one["name"] == "fit-run"]
        given = {f"inputs.parameters.tiphys-{name}": value for name, value in answers.items()}
        node = f"digits.fit({retry}).run"
        text = run["resource"]["manifest"]
        manifest = filled_in(text, {**given, "workflow.uid": self.uid, "node.name": node})
        owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "digits", "uid": self.uid}
        manifest["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
        self.job = self.api.create(JOBS, self.api.namespace, manifest)["metadata"]["name"]
        self.cluster.wait("all ranks have met", lambda: len(self.logs("has met the others")) == RANKS)

    def pods(self) -> list[Json]:
        """Those of the present attempt, by rank."""
        found = self.api.list(PODS, self.api.namespace, f"{GANG_LABEL}={self.job}").items
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def logs(self, words: str) -> list[str]:
        """Lines of all ranks that hold ``words``."""
        where = ["--namespace", self.api.namespace, "--selector", f"{GANG_LABEL}={self.job}"]
        text = self.cluster.kubectl("logs", *where, "--tail=-1", "--max-log-requests=8", check=False)
        return [line for line in text.splitlines() if words in line]

    def delete(self, rank: int) -> None:
        """As a drain or a person does, without waiting."""
        name = self.pods()[rank]["metadata"]["name"]
        self.cluster.kubectl("delete", "pod", name, "--namespace", self.api.namespace, "--wait=false")

    def exit(self, code: int, *ranks: int) -> None:
        """Have the programs of some ranks end."""
        pods = self.pods()
        for rank in ranks:
            name = pods[rank]["metadata"]["name"]
            command = ["--", "python", "-c", f"open('/tmp/exit.new', 'w').write('{code}')"]
            self.cluster.kubectl("exec", name, "--namespace", self.api.namespace, *command)
            rename = ["--", "python", "-c", "import os; os.rename('/tmp/exit.new', '/tmp/exit')"]
            self.cluster.kubectl("exec", name, "--namespace", self.api.namespace, *rename, check=False)

    def watched(self, condition: str) -> None:
        """Wait until Argo's executor would see one of the conditions of the resource template."""
        field, wanted = {"failed": ("failed", 1), "succeeded": ("succeeded", RANKS)}[condition]

        def holds() -> bool:
            found = self.api.get(JOBS, self.api.namespace, self.job) or {}
            return int((found.get("status") or {}).get(field) or 0) >= wanted

        self.cluster.wait(f"the Job has {condition}", holds)

    def verdict(self) -> str:
        """What Argo's executor sees of an elastic Job: the type of its first condition."""
        status = (self.api.get(JOBS, self.api.namespace, self.job) or {}).get("status") or {}
        return str(next((one["type"] for one in status.get("conditions") or []), ""))

    def end_try(self, status: str, retry: int = 0, expected: str = "Error") -> str:
        """What conclude says in the end; while it waits, GPUs are held as long as any pod lives."""

        def ended() -> str:
            reply = self.flow.end_try("fit", retry, status=status, exit_code="1")
            if phase(reply) == "Pending":
                assert self.ledger.snapshot().leases, "GPUs came back while the attempt was waited for"
                return ""
            assert phase(reply) == expected, said(reply)
            return said(reply)

        message: str = self.cluster.wait("conclude decides", ended)
        # A pod that is being deleted says Running until it is gone; its containers tell the truth.
        states = [one["state"] for pod in self.pods() for one in pod["status"].get("containerStatuses", [])]
        assert all("terminated" in state for state in states), states
        assert not self.ledger.snapshot().leases
        return message


def _pipeline(store: str, image: str, program: str, nodes: int | str) -> Json:
    with Pipeline("digits", store=store, entrypoint="main") as pipeline:
        fit = Train(
            name="fit",
            image=image,
            command=["python", "-c", program],
            gpus=1,
            nodes=nodes,
            queue="research",
            grace="60s",
            checkpoints=Checkpoints(every="1000000 steps"),
            outputs=[Artifact(name="weights", path="/tmp/weights.npy")] if program == TRAINER else [],
        )
        with DAG(name="main"):
            fit()
    return pipeline.compile()


@pytest.fixture
def training(
    cluster: Cluster,
    api: KubeApi,
    run_store: RunStore,
    program_store: Store,
    images: dict[str, str],
    gpus: Callable[[str, int], None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Training]:
    credentials = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": STORE_SECRET}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": GANG_SERVICE},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {MEMBER_LABEL: "true"}},
    }
    cluster.apply({**credentials, "stringData": program_store.environment}, service, namespace=api.namespace)
    gpus("node-1", RANKS)
    ledger = SqliteLedger(tmp_path / "ledger.db", Queues.model_validate(QUEUES))
    program = getattr(request, "param", PROGRAM)
    made = Training(cluster, api, run_store, ledger, images["tiphys-trainer"], program)
    yield made
    made.core.close()
    ledger.close()


def test_a_lost_rank_ends_all_and_the_next_attempt_gets_the_gpus(training: Training) -> None:
    training.begin()
    assert training.ledger.snapshot().leases
    training.delete(2)
    training.watched("failed")
    message = training.end_try("Failed")
    assert "Attempt 1 ended by preemption" in message, message
    assert "attempt 2 starts from the beginning" in message
    training.begin(retry=1)
    training.exit(0, *range(RANKS))
    training.watched("succeeded")
    message = training.end_try("Succeeded", retry=1, expected="Succeeded")
    assert message == "Attempt 2 is done: no outputs to be verified"


@pytest.mark.parametrize("training", [TRAINER], indirect=True, ids=["trainer"])
def test_ranks_save_together_when_one_has_to_go_and_go_on_from_there(training: Training) -> None:
    training.begin()
    training.delete(2)
    training.watched("failed")
    message = training.end_try("Failed")
    found = re.search(r"ended by preemption.*attempt 2 resumes from step (\d+)", message)
    assert found, message
    training.begin(retry=1)
    assert training.logs("begins at") == [f"begins at {found[1]} and has met the others"] * RANKS
    training.watched("succeeded")
    training.end_try("Succeeded", retry=1, expected="Succeeded")


def test_the_failed_rank_is_the_cause_and_not_the_ranks_stopped_after_it(training: Training) -> None:
    training.begin()
    training.exit(3, 1)
    training.watched("failed")
    message = training.end_try("Failed", expected="Failed")
    assert "user error: rank 1 of 4: the program exited with 3" in message, message


@pytest.mark.parametrize("training", [ELASTIC], indirect=True, ids=["elastic"])
def test_an_elastic_one_goes_on_without_a_lost_member_and_gives_its_gpus_back(training: Training) -> None:
    training.begin()
    said = {f"node {node} of 2:4 has met the others" for node in range(RANKS)}
    assert set(training.logs("has met the others")) == said
    looking = training.core.preemption_loop()

    def members() -> int:
        looking.run_once()
        [lease] = [one for one in training.ledger.snapshot().leases if one.request.uid == training.uid]
        assert lease.request.gpus == lease.request.members
        return lease.request.members

    assert members() == RANKS
    training.delete(3)
    training.cluster.wait("the GPUs of the lost member come back", lambda: members() == RANKS - 1)

    def indexes() -> list[str]:
        # The pod of the lost member is listed until the kubelet has deleted it, also after its GPUs are back.
        staying = [pod for pod in training.pods() if "deletionTimestamp" not in pod["metadata"]]
        return [pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] for pod in staying]

    assert indexes() == ["0", "1", "2"], "no pod replaces the lost member"
    assert training.verdict() == "", "it goes on"
    urgent = ask(2, "urgent", gpu_type=None, priority=5)
    assert isinstance(training.ledger.request(urgent), Deferred), "one GPU is free"
    training.cluster.wait("another member has gone for it", lambda: members() == RANKS - 2)
    given = training.ledger.request(urgent)
    assert isinstance(given, Admitted)
    training.ledger.release(given.lease)
    training.exit(0, 0)
    training.cluster.wait("it has succeeded", lambda: training.verdict() in ("SuccessCriteriaMet", "Complete"))
    message = training.end_try("Succeeded", expected="Succeeded")
    assert message == "Attempt 1 is done: no outputs to be verified; 2 of its 4 nodes were left in the end"


@pytest.mark.parametrize("training", [ELASTIC], indirect=True, ids=["elastic"])
def test_an_elastic_one_gets_another_member_for_a_lost_one(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "GROWTH_EVERY", timedelta(0))
    training.begin()
    looking = training.core.preemption_loop()

    def members() -> int:
        looking.run_once()
        [lease] = training.ledger.snapshot().leases
        return lease.request.members

    training.delete(3)
    training.cluster.wait("the lost member is counted", lambda: members() == RANKS - 1)
    training.cluster.wait("the GPUs of another are granted", lambda: members() == RANKS)
    met = f"node {RANKS} of 2:4 has met the others"
    training.cluster.wait("the other member runs", lambda: training.logs(met) == [met])
    assert members() == RANKS
    assert training.verdict() == "", "it goes on"
    training.exit(0, 0)
    training.cluster.wait("it has succeeded", lambda: training.verdict() in ("SuccessCriteriaMet", "Complete"))
    assert training.end_try("Succeeded", expected="Succeeded") == "Attempt 1 is done: no outputs to be verified"


@pytest.mark.parametrize("training", [ELASTIC], indirect=True, ids=["elastic"])
def test_an_elastic_one_ends_when_more_are_lost_than_it_can_spare(training: Training) -> None:
    training.begin()
    for rank in (3, 2, 1):
        training.delete(rank)
    training.cluster.wait("it has failed", lambda: training.verdict() in ("FailureTarget", "Failed"))
    message = training.end_try("Failed")
    assert re.search(r"Attempt 1 ended by preemption, rank \d of 4: its pod was taken away", message), message
    assert "attempt 2 starts from the beginning" in message


def test_a_gang_without_a_watcher_is_ended(training: Training) -> None:
    training.begin()
    message = training.end_try("Error")
    assert "Attempt 1 ended by infrastructure" in message, message
    assert training.api.get(JOBS, training.api.namespace, training.job) is None


def test_a_stopped_workflow_leaves_no_gang(cluster: Cluster, training: Training) -> None:
    training.begin()
    api = training.api
    view, metrics = WatchCache(), ControllerMetrics()
    gangs = GangCleaner(view, api, ClusterWriter(api, lambda: True, metrics, utc_now), metrics)

    def look() -> list[Json]:
        view.apply_workflow_change(None, ListSnapshot(api.list(WORKFLOWS, api.namespace, PIPELINE_ANNOTATION).items))
        gangs.end_finished()
        return training.pods()

    assert len(look()) == RANKS
    api.patch(WORKFLOWS, api.namespace, "digits", {"spec": {"shutdown": "Terminate"}})
    look()
    cluster.wait("all pods are gone", lambda: not look())
    api.patch(WORKFLOWS, api.namespace, "digits", {"status": {"phase": "Failed"}})

    def given_back() -> bool:  # that a Workflow goes on may be remembered for some seconds
        assert phase(training.flow.finalize("Failed")) == "Succeeded"
        return not training.ledger.snapshot().leases

    cluster.wait("the GPUs come back", given_back)


def test_a_deleted_workflow_takes_its_gang_along(cluster: Cluster, training: Training) -> None:
    training.begin()
    training.api.delete(WORKFLOWS, training.api.namespace, "digits")
    cluster.wait("all pods are gone", lambda: not training.pods())
    assert training.api.get(JOBS, training.api.namespace, training.job) is None


def test_members_get_their_rank_and_address(training: Training) -> None:
    training.begin()
    ranks = {pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: pod for pod in training.pods()}
    command = ["--", "python", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    name = ranks["3"]["metadata"]["name"]
    text = training.cluster.kubectl("exec", name, "--namespace", training.api.namespace, *command)
    environ = json.loads(text)
    expected = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_NPROC_PER_NODE": "1", "RANK": "3", "TIPHYS_ATTEMPT": "1"}
    assert environ.items() >= expected.items()
    assert environ["PET_MASTER_ADDR"] == environ["MASTER_ADDR"] == f"{training.job}-0.{GANG_SERVICE}"
