"""What is refused before anything starts, by name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.stories.local_engine import Bench, call, dag, plugin, shell, steps, workflow

from hera_pipelines.local.pods.pod_paths import NAMESPACE_VARIABLE
from hera_pipelines.local.supported import check_supported, find_unsupported
from tiphys.errors import UsageError

GOLDEN = sorted((Path(__file__).parents[3] / "examples" / "golden").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _machine_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here more is refused: a path that no text names."""
    monkeypatch.setenv(NAMESPACE_VARIABLE, "off")


def good() -> dict[str, Any]:
    return workflow(dag(call("a"), call("b", depends="a")), shell("true", "a"), shell("true", "b"))


def task(manifest: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = manifest["spec"]["templates"][0]["dag"]["tasks"][0]
    return first


def template(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["templates"][1]
    return found


CASES: list[tuple[str, Any]] = [
    ("spec.synchronization", lambda m: m["spec"].update(synchronization={"mutex": {"name": "x"}})),
    ("spec.hooks", lambda m: m["spec"].update(hooks={"exit": {"template": "a"}})),
    ("spec.podSpecPatch", lambda m: m["spec"].update(podSpecPatch="{}")),
    ("spec.workflowTemplateRef", lambda m: m["spec"].update(workflowTemplateRef={"name": "x"})),
    ("spec.entrypoint: there is no template 'gone'", lambda m: m["spec"].update(entrypoint="gone")),
    ("spec.onExit: there is no template 'gone'", lambda m: m["spec"].update(onExit="gone")),
    ("spec.volumes.v", lambda m: m["spec"].update(volumes=[{"name": "v", "hostPath": {"path": "/"}}])),
    (
        "spec.arguments.parameters.lr has no value",
        lambda m: m["spec"].update(arguments={"parameters": [{"name": "lr"}]}),
    ),
    ("template a: template.daemon", lambda m: template(m).update(daemon=True)),
    ("template a: template.sidecars", lambda m: template(m).update(sidecars=[{"name": "s"}])),
    ("template a: template.memoize", lambda m: template(m).update(memoize={"key": "k"})),
    ("template a: container has no command", lambda m: template(m)["container"].pop("command")),
    ("template a: container.envFrom", lambda m: template(m)["container"].update(envFrom=[{"secretRef": {}}])),
    ("template a: container.workingDir", lambda m: template(m)["container"].update(workingDir="/app")),
    ("env.TOKEN.valueFrom", lambda m: template(m)["container"].update(env=[{"name": "TOKEN", "valueFrom": {"x": 1}}])),
    ("volumeMounts.v", lambda m: template(m)["container"].update(volumeMounts=[{"name": "v", "mountPath": "/v"}])),
    ("calls sprig.now", lambda m: template(m)["container"].update(args=["{{=sprig.now()}}"])),
    ("is invalid", lambda m: template(m)["container"].update(args=["{{=1 +}}"])),
    ("retryPolicy 'OnTransientError'", lambda m: template(m).update(retryStrategy={"retryPolicy": "OnTransientError"})),
    ("timeout on a dag", lambda m: m["spec"]["templates"][0].update(timeout="1h")),
    ("'soon' is not a duration", lambda m: template(m).update(timeout="soon")),
    (
        "podSpecPatch: the local engine does not support hostNetwork",
        lambda m: template(m).update(podSpecPatch="hostNetwork: true"),
    ),
    ("task a: there is no template 'gone'", lambda m: task(m).update(template="gone")),
    ("task a.templateRef", lambda m: task(m).update(templateRef={"name": "x"})),
    ("task a.onExit", lambda m: task(m).update(onExit="b")),
    ("task a depends on 'gone'", lambda m: task(m).update(depends="gone")),
    ("depends on itself", lambda m: task(m).update(depends="b")),
    ("invalid 'when'", lambda m: task(m).update(when="{{workflow.name}} ==")),
    ("outputs.artifacts.m.s3.bucket", lambda m: template(m).update(outputs=_output(s3={"key": "k", "bucket": "b"}))),
    (
        "outputs.artifacts.m.archive",
        lambda m: template(m).update(outputs=_output(s3={"key": "k"}, archive={"tar": {}})),
    ),
    ("outputs.artifacts.m.gcs", lambda m: template(m).update(outputs=_output(gcs={"key": "k"}))),
    ("inputs.artifacts.m.git", lambda m: template(m).update(inputs=_output(git={"repo": "r"}))),
    ("outputs.parameters.p.globalName", lambda m: template(m).update(outputs=_parameter(globalName="g"))),
    (
        "outputs.parameters.p.valueFrom.jqFilter",
        lambda m: template(m).update(outputs=_parameter(valueFrom={"jqFilter": "."})),
    ),
    ("output artifact m: its path /out occurs in no command", lambda m: template(m).update(outputs=_output())),
    (
        "is none of dag, steps, container, script, plugin, resource, suspend",
        lambda m: m["spec"]["templates"].append({"name": "s", "http": {}}),
    ),
    ("template s: suspend has no duration, and the local engine cannot resume it", lambda m: _add_suspend(m)),
    ("template s: '1d' is not a duration of Argo", lambda m: _add_suspend(m, duration="1d")),
    ("template s: suspend.until", lambda m: _add_suspend(m, duration="1s", until="noon")),
    ("template s: timeout on a dag, steps or suspend", lambda m: _add_suspend(m, duration="1s").update(timeout="2s")),
    (
        "template s: outputs of a suspend template",
        lambda m: _add_suspend(m, duration="1s").update(outputs=_parameter()),
    ),
    (
        "the expression 'tasks.a ?' is invalid",
        lambda m: m["spec"]["templates"][0].update(
            outputs={"artifacts": [{"name": "m", "fromExpression": "tasks.a ?"}]}
        ),
    ),
    (
        "the expression '1 +' is invalid",
        lambda m: m["spec"]["templates"][0].update(outputs=_parameter(valueFrom={"expression": "1 +"})),
    ),
    ("plugin must have exactly one key", lambda m: m["spec"]["templates"].append({"name": "p", "plugin": {}})),
    ("metadata: there is neither", lambda m: m.pop("metadata")),
    ("kind CronWorkflow", lambda m: m.update(kind="CronWorkflow")),
]


def _add_suspend(manifest: dict[str, Any], **body: str) -> dict[str, Any]:
    added: dict[str, Any] = {"name": "s", "suspend": body}
    manifest["spec"]["templates"].append(added)
    return added


def _output(**location: Any) -> dict[str, Any]:
    return {"artifacts": [{"name": "m", "path": "/out", **location}]}


def _parameter(**fields: Any) -> dict[str, Any]:
    return {"parameters": [{"name": "p", "valueFrom": {"default": "x"}, **fields}]}


def test_a_plain_workflow_is_accepted() -> None:
    assert list(find_unsupported(good())) == []


@pytest.mark.parametrize("duration", ["20", "300ms", "1m", "{{inputs.parameters.pause}}"])
def test_a_suspend_that_ends_by_itself_is_accepted(duration: str) -> None:
    manifest = good()
    _add_suspend(manifest, duration=duration)
    assert list(find_unsupported(manifest)) == []


@pytest.mark.parametrize(("words", "spoil"), CASES, ids=[words for words, _ in CASES])
def test_an_unsupported_field_is_named(words: str, spoil: Any) -> None:
    manifest = copy.deepcopy(good())
    spoil(manifest)
    assert any(words in line for line in find_unsupported(manifest))
    with pytest.raises(UsageError, match="the local engine cannot run this workflow"):
        check_supported(manifest)


def test_unsupported_fields_are_listed_at_once_and_no_pod_starts(tmp_path: Path) -> None:
    manifest = good()
    manifest["spec"]["synchronization"] = {"mutex": {"name": "x"}}
    task(manifest)["onExit"] = "b"
    bench = Bench(tmp_path)
    with pytest.raises(
        UsageError, match=r"(?s)spec\.synchronization.*task a\.onExit.*submit the workflow to a cluster"
    ):
        bench.run(manifest)
    assert bench.changes == []


def test_a_field_that_only_places_or_keeps_a_pod_is_accepted() -> None:
    manifest = good()
    manifest["spec"].update(
        ttlStrategy={"secondsAfterCompletion": 1}, serviceAccountName="trainer", executorPlugins=[{}]
    )
    template(manifest).update(nodeSelector={"gpu": "a100"}, tolerations=[{"key": "spot"}])
    template(manifest)["container"].update(resources={"limits": {"nvidia.com/gpu": 4}}, imagePullPolicy="Always")
    assert list(find_unsupported(manifest)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"args": ["train --out=/out"]},
        {"env": [{"name": "TIPHYS_OUTPUT_M", "value": "/out"}]},
        {"args": ["{{outputs.artifacts.m.path}}"]},
    ],
)
def test_a_path_in_the_arguments_of_the_program_can_be_moved(fields: dict[str, Any]) -> None:
    manifest = good()
    template(manifest)["outputs"] = _output()
    template(manifest)["container"].update(fields)
    assert list(find_unsupported(manifest)) == []


def test_a_longer_path_is_not_the_declared_one() -> None:
    manifest = good()
    template(manifest)["outputs"] = _output()
    template(manifest)["container"]["args"] = ["/outer /out.bak s3://bucket/out"]
    assert any("/out occurs in no" in line for line in find_unsupported(manifest))


def test_a_path_in_a_declared_folder_and_in_the_arguments_can_be_moved() -> None:
    manifest = good()
    template(manifest)["outputs"] = {"artifacts": [{"name": "m", "path": "/ckpt/final"}]}
    template(manifest)["container"]["args"] = ["tiphys-exec --dir /ckpt -- train"]
    assert list(find_unsupported(manifest)) == []


def test_steps_are_checked_like_tasks() -> None:
    manifest = workflow(steps([call("a", "gone", when="{{x}} =")]), plugin("p", op="admit"))
    found = list(find_unsupported(manifest))
    assert any("step a: there is no template 'gone'" in line for line in found)
    assert any("invalid 'when'" in line for line in found)


@pytest.mark.parametrize("path", GOLDEN, ids=[path.stem for path in GOLDEN])
def test_a_compiled_workflow_is_supported_except_for_kinds_of_objects(path: Path) -> None:
    manifest = yaml.load(path.read_text(), yaml.CSafeLoader)
    allowed = ("kind ",)
    assert [line for line in find_unsupported(manifest) if not line.startswith(allowed)] == []


def test_a_container_that_can_do_without_a_secret_runs_without_it() -> None:
    manifest = good()
    template(manifest)["container"]["envFrom"] = [{"secretRef": {"name": "tiphys-store", "optional": True}}]
    assert list(find_unsupported(manifest)) == []
