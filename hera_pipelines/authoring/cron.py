"""`CronPipeline`: a pipeline on a schedule, as Hera's CronWorkflow around the compiled Workflow."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hera.exceptions import NotFound
from hera.workflows import CronWorkflow, models

from hera_pipelines.authoring.pipeline import ArgoObject, PipelineMixin
from hera_pipelines.authoring.policies import AutoResume, Drift
from hera_pipelines.compile import compile_workflow, cron_workflow
from hera_pipelines.compile.settings import refuse_unknown_keywords
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest


@refuse_unknown_keywords
@dataclass(kw_only=True, eq=False)
class CronPipeline(PipelineMixin, CronWorkflow):
    """A pipeline that runs on a schedule; each Workflow is a separate run.

    It takes the arguments of Hera's `CronWorkflow` and those that `Pipeline` adds.
    The default of ``concurrency_policy`` is ``Forbid``: while a run takes longer
    than the interval, the schedule starts no other.
    """

    pipeline: str | None = field(default=None, kw_only=False)
    store: str = ""
    run_name: str = ""
    auto_resume: AutoResume | None = None
    drift: Drift | None = None
    reuse: bool = False
    _argo_object = ArgoObject("cron-workflows", "cronWorkflow", models.CronWorkflow)

    def __post_init__(self) -> None:
        self.kind = self.kind or "CronWorkflow"
        self.name = self.name or self.pipeline
        super().__post_init__()

    def compile(self, *, store: str | None = None, queues: Collection[str] | None = None) -> Manifest:
        """The CronWorkflow that Argo runs; see `Pipeline.compile`."""
        cron = self._build_manifest()
        workflow = {"kind": "Workflow", "metadata": cron["metadata"], "spec": cron["spec"].pop("workflowSpec")}
        compiled = compile_workflow(workflow, self._compile_options(store, queues))
        return cron_workflow(compiled, cron["metadata"]["name"], cron["spec"])

    def workflow(self, *, store: str | None = None, queues: Collection[str] | None = None) -> Manifest:
        """The Workflow that the schedule starts, for a run right now; arguments as in `Pipeline.compile`."""
        built = self._build_manifest()
        metadata = {k: v for k, v in built["metadata"].items() if k != "name"}
        metadata["generateName"] = f"{built['metadata']['name']}-"
        workflow = {
            "apiVersion": built["apiVersion"],
            "kind": "Workflow",
            "metadata": metadata,
            "spec": built["spec"]["workflowSpec"],
        }
        return compile_workflow(workflow, self._compile_options(store, queues))

    def to_dict(self) -> Manifest:
        """The compiled CronWorkflow."""
        return self.compile()

    def build(self) -> models.CronWorkflow:
        """The compiled CronWorkflow as Hera's model, which cannot hold plugin bodies; submit with `create`."""
        return models.CronWorkflow.model_validate(self.compile())

    def create(self) -> Any:  # type: ignore[override]  # as Hera's own CronWorkflow
        """Create the compiled CronWorkflow; as in Hera."""
        return self._send()

    def update(self) -> Any:
        """Replace the CronWorkflow of this name, or create it; as in Hera."""
        try:
            current = self.get()
        except NotFound:
            return self.create()
        return self._send("put", f"/{self.name}", self._replacing(current))

    async def async_create(self) -> Any:  # type: ignore[override]
        """Like `create`, with an `AsyncWorkflowsService`."""
        return await self._send_async()

    async def async_update(self) -> Any:
        """Like `update`, with an `AsyncWorkflowsService`."""
        try:
            current = await self.async_get()
        except NotFound:
            return await self.async_create()
        return await self._send_async("put", f"/{self.name}", self._replacing(current))

    def _replacing(self, current: Any) -> Manifest:
        manifest = self.compile()
        manifest["metadata"]["resourceVersion"] = current.metadata.resource_version
        return manifest

    def _build_manifest(self) -> Manifest:
        if not self.name:
            raise UsageError("CronPipeline(…) needs a name; its Workflows are named after it")
        self._check_exit_handlers()
        cron: Manifest = CronWorkflow.build(self).model_dump(mode="json", exclude_none=True, by_alias=True)
        self._complete_spec(cron["spec"]["workflowSpec"])
        return cron
