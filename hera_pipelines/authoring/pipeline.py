"""`Pipeline`: Hera's Workflow, of which only the compiled form ever leaves.

What `Pipeline` and `CronPipeline` share: compile stands between Hera and every way out.

Sending a compiled document to the Argo server.

Hera's own calls take Hera's models, which would drop the plugin bodies on the
way. These use the same service, address, headers and errors with the document
as it is.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urljoin

from hera.exceptions import exception_from_server_response
from hera.workflows import DAG, Workflow, WorkflowsService, models
from hera.workflows.async_service import AsyncWorkflowsService

from hera_pipelines.authoring.plugins import PluginTemplate
from hera_pipelines.authoring.policies import AutoResume, Drift
from hera_pipelines.compile import CompileOptions, compile_workflow, read_executor_plugin, to_workflow_yaml
from hera_pipelines.compile.references import pipeline_name
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest

ENTRY_DAG = "main"


class Compiled:
    """Mixed into a Hera workflow class, before it. Fields are those of `Pipeline`."""

    if TYPE_CHECKING:  # Hera reads annotations at run time, and these would hide its own
        pipeline: str | None
        store: str
        run_name: str
        executor_plugin: Mapping[str, Any] | Path | None
        auto_resume: AutoResume | None
        drift: Drift | None
        entrypoint: str | None
        name: str | None
        generate_name: str | None
        templates: list[Any]

    _entry: DAG | None = None

    @contextmanager
    def entry_dag(self) -> Iterator[None]:
        """The DAG of tasks that are called directly in the pipeline, open; it is made on first use.

        Raises:
            UsageError: the pipeline has an entry point of its own, too.
        """
        if self._entry is None:
            if self.entrypoint not in (None, ENTRY_DAG) or any(t.name == ENTRY_DAG for t in self.templates):
                raise UsageError(
                    f"pipeline {self.pipeline_name!r} has a DAG of its own, and tasks outside it; "
                    "call all tasks inside the DAG, or none"
                )
            self.entrypoint = ENTRY_DAG
            self._entry = DAG(name=ENTRY_DAG)
        with self._entry:
            yield

    @property
    def pipeline_name(self) -> str:
        """Name of the pipeline: as given, or from the Workflow's name."""
        return pipeline_name(self.pipeline, self.name, self.generate_name)

    def to_yaml(self, *_: Any, **__: Any) -> str:
        """The compiled document as YAML, in an order for readers. Arguments of PyYAML are ignored."""
        return to_workflow_yaml(self.to_dict())

    def to_dict(self) -> Manifest:
        """The compiled document."""
        # Behind this class stands Hera's own `to_dict`, which does not compile: a pipeline class without one
        # of its own must fail here and not fall through to that.
        raise NotImplementedError

    def _options(
        self,
        store: str | None,
        queues: Collection[str] | None,
        executor_plugin: Mapping[str, Any] | Path | None,
    ) -> CompileOptions:
        plugin = self.executor_plugin if executor_plugin is None else executor_plugin
        return CompileOptions(
            pipeline=self.pipeline_name,
            store=self.store if store is None else store,
            run_name=self.run_name,
            queues=None if queues is None else frozenset(queues),
            executor_plugin=read_executor_plugin(plugin) if isinstance(plugin, Path) else plugin,
            auto_resume=None if self.auto_resume is None else self.auto_resume.policy(),
            drift=None if self.drift is None else self.drift.policy(),
        )

    def _put_bodies_back(self, templates: list[Manifest]) -> None:
        """Hera's model of a plugin is empty; its templates get the bodies that their authors wrote."""
        bodies = {t.name: t.body for t in self.templates if isinstance(t, PluginTemplate)}
        for template in templates:
            if template["name"] in bodies:
                template["plugin"] = bodies[template["name"]]


Method = Literal["post", "put"]


class Submittable(Protocol):
    """The part of a Hera workflow that says where it goes."""

    workflows_service: WorkflowsService | AsyncWorkflowsService | None
    namespace: str | None


def send(workflow: Submittable, method: Method, path: str, body: Manifest) -> Manifest:
    """Call ``api/v1/<path>`` and return the answer; ``{namespace}`` in ``path`` is filled in.

    Raises:
        UsageError: the workflow has no host, no namespace or an asynchronous service.
        hera.exceptions.HeraException: the server refused.
    """
    service = workflow.workflows_service
    if not isinstance(service, WorkflowsService):
        raise UsageError("the pipeline has an AsyncWorkflowsService; use async_create or async_lint")
    reply = service._request(  # type: ignore[no-untyped-call]
        **_call(workflow, service, method, path, body), verify=service.verify_ssl, cert=service.client_certs
    )
    return _answer(reply, reply.ok)


async def send_async(workflow: Submittable, method: Method, path: str, body: Manifest) -> Manifest:
    """Like `send`, with an `AsyncWorkflowsService`."""
    service = workflow.workflows_service
    if not isinstance(service, AsyncWorkflowsService):
        raise UsageError("the pipeline has no AsyncWorkflowsService; give workflows_service=…, or use create or lint")
    reply = await service._request(**_call(workflow, service, method, path, body))  # type: ignore[no-untyped-call]
    return _answer(reply, reply.is_success)


def _call(
    workflow: Submittable,
    service: WorkflowsService | AsyncWorkflowsService,
    method: Method,
    path: str,
    body: Manifest,
) -> dict[str, Any]:
    if not service.host or "://" not in service.host:
        raise UsageError("there is no Argo server to call; set hera.shared.global_config.host='https://…'")
    namespace = workflow.namespace or service.namespace
    if not namespace:
        raise UsageError("no namespace is given; use Pipeline(namespace=…) or global_config.namespace")
    return {
        "method": method,
        "url": urljoin(service.host, f"api/v1/{path.format(namespace=namespace)}"),
        "headers": {"Authorization": service.token or "", "Content-Type": "application/json"},
        "json": body,
    }


def _answer(reply: Any, success: bool) -> Manifest:
    if not success:
        raise exception_from_server_response(reply)
    answer: Manifest = reply.json()
    return answer


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
