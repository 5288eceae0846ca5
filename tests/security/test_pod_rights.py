"""Training code meets no token of the cluster, and each account may do only what is switched on.

| pod | must hold |
|---|---|
| of a compiled step | no token in the container of the program; Argo's executor has one of its own account |
| a member of a gang | no token |
| the one that creates a gang | the token of an account that exists only where gangs are switched on |
| anything under the chart's accounts | no token unless the pod's own spec asks for one |

Rights of the chart, by what is switched on:

| right | who | only with |
|---|---|---|
| create Jobs, JobSets, … | `tiphys-gang` | ``gangs`` |
| delete Jobs, JobSets, … | plugin, controller | ``gangs`` |
| write the status of task sets | `tiphys-workflow`, or the plugin in agent mode | mode |
| watch and delete agent pods | controller | mode sidecar |
| patch Workflows | controller | ``descriptions`` or ``api`` |
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from support.builders.authored_workflows import STORE, by_name, step, train, workflow
from support.checks.chart import MINIMAL, ROOT, Object, find_helm, named, of_kind, render
from support.checks.chart_rights import rights
from support.fakes.resource_templates import filled_in
from tiphys_controller.doctor.checks_namespace import PERMISSIONS

from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GangBackend, GangSpec
from tiphys.protocol.operations import ADMIT_OUTPUTS, GANG_OUTPUTS

COMPILED = sorted(
    [*(ROOT / "examples" / "golden").glob("*.yaml"), *(ROOT / "templates").glob("*.yaml")], key=lambda file: file.name
)
EXECUTOR, GANG = "tiphys-executor", "tiphys-gang"
PROGRAMS = ("container", "script", "containerSet", "data")
KNOWN = {
    **{f"inputs.parameters.tiphys-{name}": "" for name in (*ADMIT_OUTPUTS, *GANG_OUTPUTS)},
    "workflow.uid": "uid-1",
    "node.name": "digits.fit",
}


def specs(document: Manifest) -> Iterator[Manifest]:
    """The specs of Workflows in a document."""
    spec = document["spec"]
    yield spec.get("workflowSpec", spec)


def program_holds_token(spec: Manifest, template: Manifest) -> bool:
    """Whether Kubernetes mounts a token into the pod's containers (Argo, ``setupServiceAccount``)."""
    asked = template.get("automountServiceAccountToken", spec.get("automountServiceAccountToken"))
    return asked is not False


def executor_account(spec: Manifest, template: Manifest) -> str:
    """Account of Argo's own containers (Argo, ``executorServiceAccountName``)."""
    own, shared = (one.get("executor") or {} for one in (template, spec))
    return str(own.get("serviceAccountName") or shared.get("serviceAccountName") or "")


def compiled(template: Manifest, **spec: object) -> Manifest:
    found: Manifest = compile_workflow(workflow(template, **spec), CompileOptions(store=STORE))["spec"]
    return found


def gang(backend: GangBackend, **fields: object) -> Manifest:
    return train(asked={"gang": GangSpec(members=2, backend=backend)}, **fields)


def members(spec: Manifest) -> Iterator[Manifest]:
    """Pod specs of the members that a compiled Workflow creates; of a TrainJob those of the chart's runtime."""
    for template in spec["templates"]:
        if "resource" in template:
            yield from _pods(filled_in(template["resource"]["manifest"], KNOWN))


def _pods(part: object) -> Iterator[Manifest]:
    if isinstance(part, dict):
        if "containers" in part:
            yield part
        for value in part.values():
            yield from _pods(value)
    elif isinstance(part, list):
        for value in part:
            yield from _pods(value)


@pytest.mark.parametrize("file", COMPILED, ids=lambda file: file.stem)
def test_no_program_of_a_sample_holds_a_token(file: Path) -> None:
    for document in yaml.load_all(file.read_text(), yaml.CSafeLoader):
        for spec in specs(document):
            templates = [one for one in spec["templates"] if any(kind in one for kind in PROGRAMS)]
            assert templates or any("resource" in one for one in spec["templates"])
            for template in templates:
                assert not program_holds_token(spec, template), template["name"]
                assert executor_account(spec, template) == EXECUTOR, template["name"]
            for template in (one for one in spec["templates"] if "resource" in one):
                assert executor_account(spec, template) == GANG, template["name"]


@pytest.mark.parametrize("backend", [one for one in GangBackend if one is not GangBackend.TRAINJOB])
def test_no_member_of_a_gang_holds_a_token(backend: GangBackend) -> None:
    spec = compiled(gang(backend))
    found = list(members(spec))
    assert found
    assert [pod.get("automountServiceAccountToken") for pod in found] == [False] * len(found)
    assert executor_account(spec, by_name({"spec": spec})["fit-run"]) == GANG


def test_token_settings_of_the_author_are_kept() -> None:
    asked = {"automountServiceAccountToken": True, "executor": {"serviceAccountName": "mine"}}
    spec = compiled(step(), **asked)
    assert {field: spec[field] for field in asked} == asked
    spec = compiled(step(automountServiceAccountToken=True))
    assert spec["automountServiceAccountToken"] is False
    assert by_name({"spec": spec})["prep"]["automountServiceAccountToken"] is True


@pytest.mark.parametrize(("own", "shared"), [(True, None), (None, True), (False, True), (True, False)])
def test_members_have_a_token_where_the_author_asks_for_one(own: bool | None, shared: bool | None) -> None:
    """The step's word goes before the Workflow's, as in Argo."""
    name = "automountServiceAccountToken"
    fields, asked = ({} if value is None else {name: value} for value in (own, shared))
    [pod] = members(compiled(gang(GangBackend.JOB, **fields), **asked))
    assert pod[name] is (shared if own is None else own)


def test_a_train_job_refuses_a_token_which_it_cannot_ask_for() -> None:
    compiled(gang(GangBackend.TRAINJOB))
    with pytest.raises(UsageError, match="a TrainJob has no place for automountServiceAccountToken"):
        compiled(gang(GangBackend.TRAINJOB, automountServiceAccountToken=True))


needs_helm = pytest.mark.skipif(
    not find_helm(), reason="there is no helm on PATH, nor in the cache of the test cluster"
)

MODES = ("mode=sidecar", "mode=agent")
GANGS: Mapping[str, str] = {
    "gangs.job": "jobs.batch",
    "gangs.jobSet": "jobsets.jobset.x-k8s.io",
    "gangs.trainJob": "trainjobs.trainer.kubeflow.org",
}
EXECUTES = {("workflowtaskresults.argoproj.io", "create"), ("workflowtaskresults.argoproj.io", "patch")}


def granted(*values: str) -> dict[str, set[tuple[str, str]]]:
    """Resource and verb of each right, by account."""
    found: dict[str, set[tuple[str, str]]] = {}
    for right in rights(render(*MINIMAL, *values)):
        found.setdefault(right.account, set()).update((right.resource, verb) for verb in right.verbs.split(", "))
    return found


def workloads(found: Mapping[str, set[tuple[str, str]]]) -> dict[str, set[tuple[str, str]]]:
    """Rights to what creates pods."""
    kinds = set(GANGS.values())
    return {who: of for who, every in found.items() if (of := {one for one in every if one[0] in kinds})}


@needs_helm
@pytest.mark.parametrize("mode", MODES)
def test_without_gangs_no_account_may_touch_what_creates_pods(mode: str) -> None:
    assert workloads(granted(mode)) == {}
    objects = render(*MINIMAL, mode)
    assert GANG not in {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}


@needs_helm
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "resource"), GANGS.items())
def test_with_gangs_only_the_account_that_creates_them_may_create_that_kind(
    mode: str, value: str, resource: str
) -> None:
    found = granted(mode, f"{value}=true")
    # The Job of a JobSet, also that of a TrainJob, records which member ended first.
    # An elastic Job grows by a patch of its number of members.
    grows = {("jobs.batch", "patch")} if resource == "jobs.batch" else set()
    assert workloads(found) == {
        GANG: {(resource, "create"), (resource, "get")},
        "plugin": {(resource, "get"), (resource, "delete"), ("jobs.batch", "get"), *grows},
        "controller": {(resource, "list"), (resource, "delete")},
    }
    assert found[GANG] - {(resource, "create"), (resource, "get")} == EXECUTES


@needs_helm
@pytest.mark.parametrize("more", [(), tuple(f"{value}=true" for value in GANGS)], ids=["plain", "gangs"])
def test_the_executor_may_only_report_results_and_the_agent_only_answer_task_sets(more: tuple[str, ...]) -> None:
    sidecar, agent = (granted(mode, *more) for mode in MODES)
    watches = {("workflowtasksets.argoproj.io", "watch")}
    writes = {("workflowtasksets.argoproj.io/status", "patch")}
    assert sidecar[EXECUTOR] == agent[EXECUTOR] == EXECUTES
    assert sidecar["tiphys-workflow"] == watches | writes
    assert "tiphys-workflow" not in agent
    assert not sidecar["plugin"] & writes
    assert agent["plugin"] >= writes


@needs_helm
def test_the_controller_sees_and_deletes_pods_only_where_something_needs_that() -> None:
    def verbs(*values: str) -> set[str]:
        return {verb for resource, verb in granted(*values)["controller"] if resource == "pods"}

    assert verbs("mode=sidecar") == {"list", "watch", "delete"}
    assert verbs("mode=agent") == set()
    assert verbs("mode=agent", "gangs.job=true") == {"list"}


@needs_helm
@pytest.mark.parametrize(
    ("values", "may"),
    [
        ((), True),
        (("descriptions.enabled=false",), False),
        (("descriptions.enabled=false", "api.tokenSecret=t"), True),
    ],
)
def test_the_controller_patches_workflows_only_to_describe_or_to_stop_them(values: tuple[str, ...], may: bool) -> None:
    assert (("workflows.argoproj.io", "patch") in granted(*values)["controller"]) is may


@needs_helm
@pytest.mark.parametrize("mode", MODES)
def test_no_account_of_the_chart_has_its_token_mounted_unasked(mode: str) -> None:
    for account in of_kind(render(*MINIMAL, mode, *(f"{value}=true" for value in GANGS)), "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, account["metadata"]["name"]


@needs_helm
def test_the_runtime_of_train_jobs_gives_no_member_a_token() -> None:
    runtime: Object = named(render(*MINIMAL, "gangs.trainJob=true"), "TrainingRuntime", "tiphys")
    assert [pod["automountServiceAccountToken"] for pod in _pods(runtime)] == [False]


@needs_helm
def test_doctor_asks_for_the_rights_that_the_chart_gives() -> None:
    found = granted("mode=sidecar", "gangs.job=true")
    for account, permissions in PERMISSIONS.items():
        asked = {(_full(one.resource, one.group), one.verb) for one in permissions}
        assert asked == found[account], account


def _full(resource: str, group: str) -> str:
    plural, slash, subresource = resource.partition("/")
    return f"{plural}.{group}{slash}{subresource}"
