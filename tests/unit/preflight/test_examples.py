"""Our own examples and golden files have no problem, neither without a cluster nor on a healthy one."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.builders.preflights import CLUSTER, HEALTHY, NAMESPACE, plugin
from tiphys_controller.doctor.observed import DeploymentSearch
from tiphys_plugin.quota.queues import Queues

from hera_pipelines import load_pipeline
from hera_pipelines.preflight import PreflightObservation, build_subject, run_preflight_checks
from hera_pipelines.preflight.checks_objects import find_claims, find_named_objects
from hera_pipelines.preflight.observation import ReferencedObjects
from tiphys.protocol.compiled_workflow import Manifest

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
GOLDEN = sorted((ROOT / "examples" / "golden").glob("*.yaml"))


def as_workflow(document: Manifest) -> Manifest:
    if document["kind"] == "Workflow":
        return document
    spec = document["spec"]
    return {"kind": "Workflow", "metadata": spec["workflowMetadata"], "spec": spec["workflowSpec"]}


def problems(file: Path, manifest: Manifest) -> list[str]:
    """What is called a problem without a cluster, and on one that has everything that the pipeline names."""
    subject = build_subject(file, manifest, "tiphys-workflow", "ml")
    store = f"--store={subject.pipeline.store or 's3://ml-runs/tiphys'}"
    served = plugin()
    served["spec"]["template"]["spec"]["containers"] = [{"args": [store, "--namespace=ml"]}]
    secrets, config_maps = find_named_objects(subject)
    there = ReferencedObjects(
        secrets=dict.fromkeys(secrets, True),
        config_maps=dict.fromkeys(config_maps, True),
        claims=dict.fromkeys(find_claims(subject), frozenset({"ReadWriteMany"})),
    )
    names = sorted({step.gpu.queue for step in subject.gpu_steps if step.gpu})
    queues = Queues.model_validate({"queues": [{"name": name, "gpus": {"*": 1024}} for name in names]})
    cluster = replace(CLUSTER, tiphys=DeploymentSearch((served, *CLUSTER.tiphys.found[1:])), namespaces=(NAMESPACE,))
    here = replace(HEALTHY, cluster=cluster, objects=there, queues=queues)
    offline = PreflightObservation(unasked="no kubeconfig")
    findings = [one for observed in (offline, here) for one in run_preflight_checks(subject, observed)]
    assert len(findings) > 10
    return [f"{one.check}: {one.sentence}" for one in findings if one.state == "failed"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_problem(example: Path) -> None:
    assert not problems(example, as_workflow(load_pipeline(example).compile()))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_file_has_no_problem(golden: Path) -> None:
    assert not problems(golden, as_workflow(yaml.load(golden.read_text(), yaml.CSafeLoader)))
