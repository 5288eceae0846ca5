"""`Pipeline`: Hera's Workflow, of which only the compiled form ever leaves."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hera.workflows import Workflow, models

from hera_pipelines.building import Compiled
from hera_pipelines.compile import compile_workflow
from hera_pipelines.drift import Drift
from hera_pipelines.policies import AutoResume
from hera_pipelines.submission import send, send_async
from tiphys.protocol.pipeline import Manifest

_WORKFLOWS = "workflows/{namespace}"


@dataclass(kw_only=True, eq=False)
class Pipeline(Compiled, Workflow):
    """A Workflow whose steps survive.

    Everything that Hera's `Workflow` takes, and:

    Attributes:
        pipeline: Its name, and where neither ``name`` nor ``generate_name`` is
            given the beginning of its Workflows' names.
        store: URL of the run store, such as ``s3://ml/tiphys``.
        run_name: Name of the run from workflow parameters, ``digits-lr{lr}``;
            empty: a run per Workflow, named after it.
        executor_plugin: The executor plugin that its Workflows bring along: a YAML
            file, or an ExecutorPlugin or its ConfigMap as parsed from one. For an
            Argo that has `ARGO_WORKFLOW_LEVEL_EXECUTOR_PLUGINS=true`.
        auto_resume: That its runs go on by themselves; None: only when somebody resumes them.
        drift: What may change when its runs go on; None: what `Drift` says by default.
    """

    pipeline: str | None = field(default=None, kw_only=False)
    store: str = ""
    run_name: str = ""
    executor_plugin: Mapping[str, Any] | Path | None = None
    auto_resume: AutoResume | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        self.kind = self.kind or "Workflow"
        if self.pipeline and not self.name and not self.generate_name:
            self.generate_name = f"{self.pipeline}-"
        super().__post_init__()  # type: ignore[no-untyped-call]

    def compile(
        self,
        *,
        store: str | None = None,
        queues: Collection[str] | None = None,
        executor_plugin: Mapping[str, Any] | Path | None = None,
    ) -> Manifest:
        """The Workflow that Argo runs.

        Args:
            store: Store URL in place of the pipeline's own.
            queues: Queues that exist; a step that names another is refused.
            executor_plugin: Executor plugin in place of the pipeline's own.

        Raises:
            UsageError: see `hera_pipelines.compile.compile_workflow`.
        """
        built: Manifest = Workflow.build(self).model_dump(mode="json", exclude_none=True, by_alias=True)
        self._put_bodies_back(built["spec"].get("templates", []))
        return compile_workflow(built, self._options(store, queues, executor_plugin))

    def to_dict(self) -> Manifest:
        """The compiled Workflow."""
        return self.compile()

    def build(self) -> models.Workflow:
        """The compiled Workflow as Hera's model, which cannot hold plugin bodies; submit with `create`."""
        return models.Workflow.model_validate(self.compile())

    def create(self, wait: bool = False, poll_interval: int = 5) -> Any:
        """Submit the compiled Workflow; as in Hera."""
        created = models.Workflow(**send(self, "post", _WORKFLOWS, {"workflow": self.compile()}))
        self.name = created.metadata.name
        return self.wait(poll_interval=poll_interval) if wait else created

    def lint(self) -> Any:
        """Have the Argo server check the compiled Workflow; as in Hera."""
        return models.Workflow(**send(self, "post", f"{_WORKFLOWS}/lint", {"workflow": self.compile()}))

    async def async_create(self, wait: bool = True, poll_interval: int = 5) -> Any:
        """Like `create`, with an `AsyncWorkflowsService`."""
        created = models.Workflow(**await send_async(self, "post", _WORKFLOWS, {"workflow": self.compile()}))
        self.name = created.metadata.name
        return await self.async_wait(poll_interval=poll_interval) if wait else created

    async def async_lint(self) -> Any:
        """Like `lint`, with an `AsyncWorkflowsService`."""
        return models.Workflow(**await send_async(self, "post", f"{_WORKFLOWS}/lint", {"workflow": self.compile()}))
