"""`tiphys conformance` as a person runs it: what it tries on this cluster holds, and it leaves nothing."""

import json
from pathlib import Path

from hera_pipelines.cli import main
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import list_runs

from .world import World


def test_conformance_holds_on_a_cluster_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    settings, (queue, _) = world.settings, world.queue()
    where = ["--kubeconfig", settings.kubeconfig, "-n", settings.namespace, "--store", settings.store]
    what = ["--cluster", "--image", settings.image, "--queue", queue, "--output", str(tmp_path / "report.json")]
    code = main(["conformance", *where, *what, "--minutes", str(3 * settings.patience_seconds / 60)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == 0, report
    assert {"kubernetes", "argo", "store", "tiphys"} <= set(report["versions"])
    found = {promise["name"]: promise for promise in report["promises"]}
    assert {found[name]["result"] for name in ("submission", "deleted-pod", "quota")} == {"held"}
    left = [item["metadata"]["name"] for item in world.api.list(WORKFLOWS, settings.namespace).items]
    assert not [name for name in [*left, *list_runs(world.store)] if name.startswith("conformance-")]
    assert not list(world.store.list("control/probe/"))
