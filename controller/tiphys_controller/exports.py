"""Tasks whose outputs are read where no binding reaches, so that they must stay in the Workflow."""

import json
from collections.abc import Iterator

from tiphys.protocol.pipeline import CompiledPipeline, template
from tiphys_controller.graph import Graph
from tiphys_controller.references import references
from tiphys_controller.templates import declares, reachable, template_names


def exporting(pipeline: CompiledPipeline, graph: Graph) -> Iterator[tuple[str, str]]:
    """Such tasks, each with the reader in words."""
    spec = pipeline.manifest["spec"]
    for reference in references(template(pipeline.manifest, spec["entrypoint"]).get("outputs") or {}):
        yield reference.task, "the workflow's own outputs read it"
    if "workflow.outputs." not in json.dumps(spec):
        return
    for name, task in graph.tasks.items():
        used = reachable(pipeline.manifest, template_names(task.body))
        if any(declares(template(pipeline.manifest, one), "globalName") for one in used):
            yield name, "it sets outputs of the workflow"
