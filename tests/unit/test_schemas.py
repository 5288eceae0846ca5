"""The golden files against other people's models of Argo and Kubernetes.

Each model reads a file and writes it again. What it loses on the way is a field
that it does not know, and so a typing error of ours.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from argo_workflows.model.io_argoproj_workflow_v1alpha1_cron_workflow import IoArgoprojWorkflowV1alpha1CronWorkflow
from argo_workflows.model.io_argoproj_workflow_v1alpha1_workflow import IoArgoprojWorkflowV1alpha1Workflow
from argo_workflows.model.io_argoproj_workflow_v1alpha1_workflow_template import (
    IoArgoprojWorkflowV1alpha1WorkflowTemplate,
)
from hera.workflows import models
from kubernetes import client

from tiphys.protocol.compiled_workflow import Manifest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "examples" / "golden").glob("*.yaml"), *(ROOT / "templates").glob("*.yaml")])
HERA = {
    "Workflow": models.Workflow,
    "CronWorkflow": models.CronWorkflow,
    "WorkflowTemplate": models.WorkflowTemplate,
}
ARGO = {
    "Workflow": IoArgoprojWorkflowV1alpha1Workflow,
    "CronWorkflow": IoArgoprojWorkflowV1alpha1CronWorkflow,
    "WorkflowTemplate": IoArgoprojWorkflowV1alpha1WorkflowTemplate,
}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")


def document(path: Path) -> Manifest:
    loaded: Manifest = yaml.load(path.read_text(), yaml.CSafeLoader)
    return loaded


def templates(manifest: Manifest) -> list[Manifest]:
    found: list[Manifest] = manifest["spec"].get("workflowSpec", manifest["spec"])["templates"]
    return found


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields of ``before`` that ``after`` lacks."""
    if isinstance(before, dict):
        for field, value in before.items():
            if not isinstance(after, dict) or field not in after:
                yield f"{path}.{field}"
            else:
                yield from lost(value, after[field], f"{path}.{field}")
    elif isinstance(before, list):
        for index, value in enumerate(before):
            yield from lost(value, after[index], f"{path}[{index}]")
    elif str(before) != str(after):
        yield f"{path} = {before!r}, not {after!r}"


def unknown(part: Any, kind: Any, path: str = "") -> Iterator[str]:
    """Names of the fields of ``part`` that the OpenAPI class ``kind`` does not have."""
    if isinstance(kind, tuple):
        kind = kind[0]
    if isinstance(part, list) and isinstance(kind, list):
        for index, value in enumerate(part):
            yield from unknown(value, kind[0], f"{path}[{index}]")
    elif isinstance(part, dict) and hasattr(kind, "attribute_map"):
        attributes = {field: name for name, field in kind.attribute_map.items()}
        for field, value in part.items():
            if field not in attributes:
                yield f"{path}.{field}"
            elif attributes[field] in kind.openapi_types:
                yield from unknown(value, kind.openapi_types[attributes[field]], f"{path}.{field}")


def pod_spec(template: Manifest) -> Manifest:
    """The pod that Argo would make of a container template, as far as the author decides it."""
    placed = {f: template[f] for f in ("affinity", "nodeSelector", "tolerations", "volumes") if f in template}
    patch = template.get("podSpecPatch", "{}")
    patched = {} if "{{" in patch else json.loads(patch)
    return {"containers": [{"name": "main", **template["container"]}], **placed, **patched}


@each_file
def test_heras_models_lose_nothing_but_the_plugin_bodies(path: Path) -> None:
    manifest = document(path)

    kept = HERA[manifest["kind"]].model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_none=True)

    plugins = [index for index, t in enumerate(templates(manifest)) if "plugin" in t]
    assert plugins
    assert all(".plugin." in field for field in lost(manifest, kept))


@each_file
def test_every_field_is_one_of_argo(path: Path) -> None:
    manifest = document(path)

    assert not list(unknown(manifest, ARGO[manifest["kind"]]))


@each_file
def test_containers_and_placement_are_what_kubernetes_reads(path: Path) -> None:
    for template in templates(document(path)):
        if "container" in template:
            pod = pod_spec(template)
            assert not list(lost(pod, client.V1PodSpec.from_dict(pod).model_dump(mode="json", by_alias=True)))


@each_file
def test_every_template_that_is_called_exists_once(path: Path) -> None:
    made = templates(document(path))
    names = [t["name"] for t in made]
    called = {node["template"] for t in made for node in _nodes(t) if "template" in node}

    assert len(names) == len(set(names))
    assert called <= set(names)


@each_file
def test_every_argument_is_an_input_and_every_input_is_given(path: Path) -> None:
    made = {t["name"]: t for t in templates(document(path))}
    for node in (node for t in made.values() for node in _nodes(t)):
        for kind in ("parameters", "artifacts"):
            inputs = {i["name"]: i for i in (made[node["template"]].get("inputs") or {}).get(kind, [])}
            given = {a["name"] for a in (node.get("arguments") or {}).get(kind, [])}
            assert given <= set(inputs), node
            assert {name for name, i in inputs.items() if not _has_value(i)} <= given, node


def test_the_comparison_sees_a_field_that_is_lost() -> None:
    assert list(lost({"a": [{"b": 1}]}, {"a": [{}]})) == [".a[0].b"]
    assert list(lost({"a": 1}, {"a": 2})) == [".a = 1, not 2"]
    wrong = {"spec": {"entryPoint": "main", "templates": [{"name": "a", "dag": {"task": []}}]}}
    assert set(unknown(wrong, ARGO["Workflow"])) == {".spec.entryPoint", ".spec.templates[0].dag.task"}


def _nodes(template: Manifest) -> list[Manifest]:
    groups = template.get("steps") or []
    return [*(template.get("dag") or {}).get("tasks", []), *(step for group in groups for step in group)]


def _has_value(declared: Manifest) -> bool:
    return bool({"default", "value", "valueFrom", "optional", "s3"} & set(declared))
