"""A Workflow that brings its executor plugin along, from either form of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.builders.authored_workflows import step, workflow

from hera_pipelines import Pipeline
from hera_pipelines import step as gated
from hera_pipelines.compile import CompileOptions, compile_workflow, read_executor_plugin
from tiphys.errors import UsageError

CONTAINER: dict[str, Any] = {
    "name": "tiphys",
    "image": "ghcr.io/acme/tiphys:1",
    "ports": [{"containerPort": 7243}],
    "resources": {"requests": {"memory": "50Mi"}, "limits": {"memory": "50Mi"}},
    "securityContext": {"runAsNonRoot": True},
}
PLUGIN = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "ExecutorPlugin",
    "metadata": {"name": "tiphys"},
    "spec": {"sidecar": {"automountServiceAccountToken": True, "container": CONTAINER}},
}
CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {
        "name": "tiphys-executor-plugin",
        "labels": {"workflows.argoproj.io/configmap-type": "ExecutorPlugin"},
    },
    "data": {"sidecar.automountServiceAccountToken": "true", "sidecar.container": yaml.safe_dump(CONTAINER)},
}
ENTRY = {
    "metadata": {"name": "tiphys"},
    "spec": {"sidecar": {"automountServiceAccountToken": True, "container": CONTAINER}},
}


@pytest.mark.parametrize("document", [PLUGIN, CONFIG_MAP], ids=["ExecutorPlugin", "ConfigMap"])
def test_a_config_map_and_a_plugin_give_the_same_entry(document: dict[str, Any]) -> None:
    compiled = compile_workflow(workflow(step()), CompileOptions(executor_plugin=document))
    assert compiled["spec"]["executorPlugins"] == [ENTRY]


def test_the_plugins_of_the_author_stay() -> None:
    theirs = {"metadata": {"name": "slack"}}
    compiled = compile_workflow(workflow(step(), executorPlugins=[theirs]), CompileOptions(executor_plugin=PLUGIN))
    assert compiled["spec"]["executorPlugins"] == [theirs, ENTRY]


def test_without_one_the_workflow_brings_none() -> None:
    assert "executorPlugins" not in compile_workflow(workflow(step()), CompileOptions())["spec"]


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        ("ports", "a port"),
        ("resources", "resources.requests"),
        ("securityContext", "a securityContext"),
    ],
)
def test_a_field_that_argo_requires_of_a_plugin_is_demanded_at_compile(lacking: str, sentence: str) -> None:
    container = {name: value for name, value in CONTAINER.items() if name != lacking}
    plugin = {**PLUGIN, "spec": {"sidecar": {"container": container}}}
    with pytest.raises(UsageError, match=sentence):
        compile_workflow(workflow(step()), CompileOptions(executor_plugin=plugin))


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="has no name or no container"):
        compile_workflow(workflow(step()), CompileOptions(executor_plugin={"kind": "Service"}))


def test_the_plugin_is_found_among_the_documents_of_a_rendered_chart(tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all([{"kind": "Service"}, None, CONFIG_MAP, {"kind": "ConfigMap", "data": {}}]))
    assert read_executor_plugin(file) == CONFIG_MAP


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "No such file"),
        ("a: b: c", "line 1, column 5, is not valid YAML"),
        ("kind: Service", "holds no executor plugin;"),
        (yaml.safe_dump_all([PLUGIN, CONFIG_MAP]), "holds 2 executor plugins"),
    ],
)
def test_a_file_without_exactly_one_is_refused(content: str | None, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_executor_plugin(file)


def test_a_pipeline_names_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text(yaml.safe_dump(CONFIG_MAP))

    @gated(image="python:3.12")
    def prepare() -> None: ...

    with Pipeline("digits", executor_plugin=file) as pipeline:
        prepare()
    assert pipeline.compile()["spec"]["executorPlugins"] == [ENTRY]
    assert pipeline.compile(executor_plugin={**PLUGIN, "metadata": {"name": "other"}})["spec"]["executorPlugins"][0][
        "metadata"
    ] == {"name": "other"}
