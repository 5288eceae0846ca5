"""Tokens and rights of the pods that a real Argo makes of a compiled Workflow.

| pod | must hold |
|---|---|
| of a step | its program finds no token; Argo's executor has that of `tiphys-executor`, and its report arrives |
| that creates a gang | the token of `tiphys-gang` |
| a member of a gang | no token |
| Argo's agent | the token of `tiphys-workflow`, and plugin steps are answered |

No account that a tenant's pods run under may create a pod, and only that of gangs a Job.
"""

from collections.abc import Iterator

import pytest
from hera.workflows import DAG, Parameter
from support.stories.interrupted_training.pipelines import expected_version, story
from support.stories.interrupted_training.scenarios import version

from hera_pipelines import Pipeline, Step
from tiphys.kube import Object
from tiphys.kube.resources import PODS, SUBJECT_ACCESS_REVIEWS
from tiphys.protocol.gang import GANG_ACCOUNT, GANG_LABEL, MEMBER_LABEL, gang_name
from tiphys.protocol.step_spec import EXECUTOR_ACCOUNT

from .settings import Mode
from .world import WORKFLOW_ACCOUNT, Workflow, World

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
LOOK = f"""
import pathlib
pathlib.Path("/tmp/tiphys").mkdir(parents=True, exist_ok=True)
pathlib.Path("/tmp/tiphys/found").write_text(str(pathlib.Path("{TOKEN_FOLDER}").exists()))
"""
RANKS = 2
STEPS = 12


def token_secrets(pod: Object) -> Iterator[tuple[str, str]]:
    """Each container with a token, and the Secret that it is from; a token of the kubelet has no Secret."""
    volumes = {one["name"]: one for one in pod["spec"].get("volumes") or []}
    for container in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]:
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"] == TOKEN_FOLDER:
                yield container["name"], volumes[mount["name"]].get("secret", {}).get("secretName", "")


def of_account(account: str) -> str:
    return f"{account}.service-account-token"


def is_agent(pod: Object) -> bool:
    return pod["metadata"]["labels"].get("workflows.argoproj.io/component") == "agent"


def pods_of(workflow: Workflow) -> list[Object]:
    """The pods that Argo made, without its agent."""
    return [pod for pod in workflow.pods() if not is_agent(pod)]


def test_a_program_finds_no_token_and_what_it_returns_arrives(world: World) -> None:
    options = {"image": world.settings.image, **world.place.options}
    with Pipeline("look", store=world.settings.store, entrypoint="main", **world.place.workflow) as pipeline:
        look = Step(
            name="look",
            command=["python", "-c", LOOK],
            outputs=[Parameter(name="found", value_from={"path": "/tmp/tiphys/found"})],
            **options,
        )
        with DAG(name="main"):
            look()
    workflow = world.submit(pipeline.compile())
    workflow.wait()
    nodes = (workflow.read() or {})["status"]["nodes"].values()
    [look_pod] = [node for node in nodes if node.get("templateName") == "look" and node["type"] == "Pod"]
    assert [one["value"] for one in look_pod["outputs"]["parameters"] if one["name"] == "found"] == ["False"]
    [pod] = pods_of(workflow)
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert set(token_secrets(pod)) == {(name, of_account(EXECUTOR_ACCOUNT)) for name in ("init", "wait")}


def test_the_pods_of_a_training_hold_only_the_token_of_the_executor(world: World) -> None:
    workflow = world.submit(story(world.place, steps=STEPS).compile())
    workflow.wait()
    assert version(world.store, workflow.run) == expected_version(STEPS)
    pods = pods_of(workflow)
    assert len(pods) == 4
    for pod in pods:
        assert set(token_secrets(pod)) == {(name, of_account(EXECUTOR_ACCOUNT)) for name in ("init", "wait")}


def test_the_agent_pod_keeps_the_tokens_that_it_needs(world_in_sidecar_mode: World) -> None:
    workflow = world_in_sidecar_mode.submit(story(world_in_sidecar_mode.place, steps=STEPS, pause=0.5).compile())
    workflow.trains()
    held = set(token_secrets(workflow.agent_pod()))
    agent = {(name, of_account(WORKFLOW_ACCOUNT)) for name in ("init", "main")}
    assert held == {("tiphys", of_account("tiphys-executor-plugin")), *agent}
    workflow.wait()


def test_only_the_pod_that_creates_a_gang_holds_the_token_for_that(world: World) -> None:
    if not may(world, GANG_ACCOUNT, "create", "jobs", "batch"):
        pytest.skip("the release has no gangs.job=true")
    pipeline = story(world.place, steps=STEPS, name="gang", training={"nodes": RANKS})
    workflow = world.submit(pipeline.compile())
    workflow.wait()
    assert version(world.store, workflow.run) == expected_version(STEPS)
    held = {secret for pod in pods_of(workflow) for _, secret in token_secrets(pod)}
    assert held == {of_account(EXECUTOR_ACCOUNT), of_account(GANG_ACCOUNT)}
    labels = f"{GANG_LABEL}={gang_name(workflow.run, 'train', 1)},{MEMBER_LABEL}=true"
    members = world.api.list(PODS, world.settings.namespace, labels=labels).items
    assert len(members) == RANKS
    assert [list(token_secrets(member)) for member in members] == [[]] * RANKS


def test_no_account_of_a_tenants_pods_may_start_pods(world: World) -> None:
    for account in (WORKFLOW_ACCOUNT, EXECUTOR_ACCOUNT, GANG_ACCOUNT, "tiphys-executor-plugin", "default"):
        for verb, resource, group in (("create", "pods", ""), ("create", "workflows", "argoproj.io")):
            assert not may(world, account, verb, resource, group), f"{account} may {verb} {resource}"
        assert not may(world, account, "get", "secrets", "")
        assert account == GANG_ACCOUNT or not may(world, account, "create", "jobs", "batch")
    assert may(world, EXECUTOR_ACCOUNT, "create", "workflowtaskresults", "argoproj.io")
    may_answer = may(world, WORKFLOW_ACCOUNT, "patch", "workflowtasksets", "argoproj.io", "status")
    assert may_answer is (world.settings.mode is Mode.SIDECAR)


def may(world: World, account: str, verb: str, resource: str, group: str, subresource: str = "") -> bool:
    """Whether an account of the namespace may do something, as the API server decides it."""
    namespace = world.settings.namespace
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
    spec = {"user": f"system:serviceaccount:{namespace}:{account}", "resourceAttributes": asked}
    return bool(world.api.create(SUBJECT_ACCESS_REVIEWS, None, {"spec": spec})["status"]["allowed"])
