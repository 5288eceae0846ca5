"""`Pipeline`: Hera's Workflow, which leaves this process only in compiled form.

`PipelineMixin` holds what `Pipeline` and `CronPipeline` share. It compiles in
every method of Hera that prints, checks or submits a document.

`PipelineMixin._send` sends the compiled document itself. Hera's own calls send
Hera's models, which have no field for the body of a plugin template. Service,
address, headers and errors are Hera's.
"""

import atexit
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urljoin

from hera.exceptions import exception_from_server_response
from hera.workflows import DAG, Parameter, Workflow, WorkflowsService, models
from hera.workflows.async_service import AsyncWorkflowsService
from hera.workflows.protocol import Templatable

from hera_pipelines.authoring.adoption.translation import make_entry_dag
from hera_pipelines.authoring.data_versions import read_data_version
from hera_pipelines.authoring.functions.decorators import check_workflow_parameters
from hera_pipelines.authoring.plugins import PluginTemplate
from hera_pipelines.authoring.policies import AutoResume, Drift, ObjectTrigger
from hera_pipelines.compile import CompileOptions, compile_workflow, to_workflow_yaml
from hera_pipelines.compile.references import pipeline_name
from hera_pipelines.compile.settings import refuse_unknown_keywords
from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest

ENTRY_DAG = "main"
HttpMethod = Literal["post", "put"]


class ArgoObject(NamedTuple):
    """A kind of object in the API of the Argo server: its path, its field in a request, and Hera's model of it."""

    path: str
    field: str
    model: type[Any]


class PipelineMixin:
    """Base class in front of a Hera workflow class. The fields are those of `Pipeline`."""

    if TYPE_CHECKING:  # Hera reads annotations at run time, and these would hide its own
        pipeline: str | None
        store: str
        run_name: str
        auto_resume: AutoResume | None
        drift: Drift | None
        reuse: bool
        entrypoint: str | None
        on_exit: Any
        name: str | None
        generate_name: str | None
        templates: list[Any]
        workflows_service: Any
        namespace: str | None
        _build_arguments: Callable[[], models.Arguments | None]
        _argo_object: "ArgoObject"

    _entry_dag: DAG | None = None
    _is_compiled = False

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[misc]
        names = sys._getframe(1).f_globals  # of the file with the `with` statement
        if names.get("__name__") == "__main__" and "__file__" in names and not any(failure):
            atexit.register(self._say_if_unused, names["__file__"])

    def _say_if_unused(self, file: str) -> None:
        """Say that a file which a person ran with ``python`` has defined a pipeline and started nothing."""
        if not self._is_compiled and not os.environ.keys() & {environment.STEP, "ARGO_NODE_ID"}:
            sys.stderr.write(f"tiphys: {file} defines pipeline {self.pipeline_name!r}; `tiphys run {file}` runs it\n")

    @contextmanager
    def entry_dag(self) -> Iterator[None]:
        """Open the DAG for tasks that are called outside any DAG; the first call creates it.

        Raises:
            UsageError: the pipeline also has a DAG as its own entry point, or names another one.
        """
        if self._entry_dag is None:
            names = {template.name for template in self.templates}
            if self.entrypoint not in (None, ENTRY_DAG, *names):
                raise UsageError(
                    f"pipeline {self.pipeline_name!r} calls tasks directly, which form its entry DAG, and names the "
                    f"entry point {self.entrypoint!r}; drop entrypoint=, or call them inside that DAG"
                )
            if self.entrypoint not in (None, ENTRY_DAG) or ENTRY_DAG in names:
                raise UsageError(
                    f"pipeline {self.pipeline_name!r} has a DAG of its own, and tasks outside it; "
                    "call all tasks inside the DAG, or none"
                )
            self.entrypoint = ENTRY_DAG
            self._entry_dag = DAG(name=ENTRY_DAG)
        with self._entry_dag:
            yield

    def get_parameter(self, name: str) -> Parameter:
        """The workflow parameter ``name``, as an argument of a step.

        Raises:
            UsageError: the pipeline declares no such parameter; the message lists those that it does.
        """
        arguments = self._build_arguments()
        names = [parameter.name for parameter in (arguments.parameters if arguments else None) or []]
        if name not in names:
            raise UsageError(unknown_name_message(f"pipeline {self.pipeline_name!r}", "parameter", name, names))
        return Parameter(name=name, value=f"{{{{workflow.parameters.{name}}}}}")

    def check_parameters(self, values: Mapping[str, str]) -> None:
        """Refuse values of workflow parameters that a function which gets one as it is could not read.

        Raises:
            UsageError: names step, input and what is wrong with the value.
        """
        for task in self._tasks():
            check_workflow_parameters(task, values)

    def _tasks(self) -> list[Any]:
        tasks = [task for template in self.templates if isinstance(template, DAG) for task in template.tasks]
        return [*tasks, *(self._entry_dag.tasks if self._entry_dag else [])]

    def _check_exit_handlers(self) -> None:
        """Refuse a function as exit handler: Hera takes a template, and a function is one only where it is called."""
        owners = [(f"pipeline {self.pipeline_name!r}", self.on_exit)]
        owners += [(f"task {task.name!r}", task.on_exit) for task in self._tasks()]
        for where, handler in owners:
            if callable(handler) and not isinstance(handler, Templatable):
                raise UsageError(
                    f"{where}: its on_exit is the function {handler.__name__!r}; call it in "
                    "`with DAG(name='at-exit') as handler:`, and write on_exit = handler"
                )

    @property
    def pipeline_name(self) -> str:
        """Name of the pipeline: the field ``pipeline``, or else the name of the Workflow."""
        return pipeline_name(self.pipeline, self.name, self.generate_name)

    def to_yaml(self, *_: Any, **__: Any) -> str:
        """The compiled document as YAML, with its fields in a readable order. Arguments for PyYAML are ignored."""
        return to_workflow_yaml(self.to_dict())

    def to_dict(self) -> Manifest:
        """The compiled document."""
        # The next class in the resolution order is Hera's, whose `to_dict` does not compile: a pipeline class
        # without its own must fail here.
        raise NotImplementedError

    def _compile_options(self, store: str | None, queues: Collection[str] | None) -> CompileOptions:
        self._is_compiled = True
        return CompileOptions(
            pipeline=self.pipeline_name,
            store=self.store or os.environ.get(environment.STORE, "") if store is None else store,
            run_name=self.run_name,
            queues=None if queues is None else frozenset(queues),
            auto_resume=None if self.auto_resume is None else self.auto_resume.policy(),
            drift=None if self.drift is None else self.drift.policy(),
            reuse=self.reuse,
            read_data_version=read_data_version,
        )

    def _complete_spec(self, spec: Manifest) -> None:
        """Write the authors' plugin bodies, for which Hera's model has no field, and a DAG of Steps as entry point."""
        bodies = {t.name: t.body for t in self.templates if isinstance(t, PluginTemplate)}
        templates: list[Manifest] = spec.get("templates", [])
        for template in templates:
            if template["name"] in bodies:
                template["plugin"] = bodies[template["name"]]
        entry = next((template for template in templates if template["name"] == spec.get("entrypoint")), {})
        if entry.keys() & {"steps", "container", "script"}:
            make_entry_dag(spec)

    def lint(self) -> Any:
        """Have the Argo server check the compiled document; as in Hera."""
        return self._send(suffix="/lint")

    async def async_lint(self) -> Any:
        """Like `lint`, with an `AsyncWorkflowsService`."""
        return await self._send_async(suffix="/lint")

    def _send(self, method: HttpMethod = "post", suffix: str = "", document: Manifest | None = None) -> Any:
        """Send a document, by default the compiled one, to the Argo server, and return Hera's model of its answer.

        Raises:
            UsageError: the pipeline has no host, no namespace or an asynchronous service.
            hera.exceptions.HeraException: the server refused.
        """
        service = self.workflows_service
        if not isinstance(service, WorkflowsService):
            raise UsageError("the pipeline has an AsyncWorkflowsService; use async_create or async_lint")
        call: Any = service._request
        request = self._build_request(service, method, suffix, document)
        reply = call(**request, verify=service.verify_ssl, cert=service.client_certs)
        return self._read_reply(reply, reply.ok)

    async def _send_async(self, method: HttpMethod = "post", suffix: str = "", document: Manifest | None = None) -> Any:
        """Like `_send`, with an `AsyncWorkflowsService`."""
        service = self.workflows_service
        if not isinstance(service, AsyncWorkflowsService):
            raise UsageError(
                "the pipeline has no AsyncWorkflowsService; give workflows_service=…, or use create or lint"
            )
        call: Any = service._request
        reply = await call(**self._build_request(service, method, suffix, document))
        return self._read_reply(reply, reply.is_success)

    def _build_request(
        self,
        service: WorkflowsService | AsyncWorkflowsService,
        method: HttpMethod,
        suffix: str,
        document: Manifest | None,
    ) -> dict[str, Any]:
        if not service.host or "://" not in service.host:
            raise UsageError("there is no Argo server to call; set hera.shared.global_config.host='https://…'")
        namespace = self.namespace or service.namespace
        if not namespace:
            raise UsageError("no namespace is given; use Pipeline(namespace=…) or global_config.namespace")
        return {
            "method": method,
            "url": urljoin(service.host, f"api/v1/{self._argo_object.path}/{namespace}{suffix}"),
            "headers": {"Authorization": service.token or "", "Content-Type": "application/json"},
            "json": {self._argo_object.field: self.to_dict() if document is None else document},
        }

    def _read_reply(self, reply: Any, success: bool) -> Any:
        if not success:
            raise exception_from_server_response(reply)
        return self._argo_object.model(**reply.json())


@refuse_unknown_keywords
@dataclass(kw_only=True, eq=False)
class Pipeline(PipelineMixin, Workflow):
    """A Workflow whose finished steps and checkpoints survive failures.

    It takes the arguments of Hera's `Workflow`, and these:

    Attributes:
        pipeline: Name of the pipeline. Without ``name`` and ``generate_name`` it
            also begins the names of the Workflows.
        store: URL of the run store, such as ``s3://ml-runs/tiphys``; empty: the variable TIPHYS_STORE.
        run_name: Name of the run from workflow parameters, ``digits-lr{lr}``;
            empty: each Workflow is a run of the same name.
        auto_resume: When the controller resumes an interrupted run automatically; None: never.
        drift: Which changes a resume or fork accepts; None: the defaults of `Drift`.
        reuse: Whether a Workflow that Argo starts without Tiphys (`argo submit`, a
            schedule) looks for shared results first, in one plugin node for all steps.
        trigger: Which objects of a bucket start a run of its WorkflowTemplate; None: none.
    """

    pipeline: str | None = field(default=None, kw_only=False)
    store: str = ""
    run_name: str = ""
    auto_resume: AutoResume | None = None
    drift: Drift | None = None
    reuse: bool = False
    trigger: ObjectTrigger | None = None
    _argo_object = ArgoObject("workflows", "workflow", models.Workflow)

    def __post_init__(self) -> None:
        self.kind = self.kind or "Workflow"
        if self.pipeline and not self.name and not self.generate_name:
            self.generate_name = f"{self.pipeline}-"
        super().__post_init__()  # type: ignore[no-untyped-call]

    def compile(self, *, store: str | None = None, queues: Collection[str] | None = None) -> Manifest:
        """The Workflow that Argo runs.

        Args:
            store: Store URL in place of the pipeline's own.
            queues: Queues that exist; a step that names another is refused. None: no check.

        Raises:
            TiphysError: see `hera_pipelines.compile.compile_workflow`.
        """
        self._check_exit_handlers()
        built: Manifest = Workflow.build(self).model_dump(mode="json", exclude_none=True, by_alias=True)
        self._complete_spec(built["spec"])
        options = self._compile_options(store, queues)
        trigger = None if self.trigger is None else self.trigger.spec()
        return compile_workflow(built, replace(options, trigger=trigger))

    def to_dict(self) -> Manifest:
        """The compiled Workflow."""
        return self.compile()

    def build(self) -> models.Workflow:
        """The compiled Workflow as Hera's model, which cannot hold plugin bodies; submit with `create`."""
        return models.Workflow.model_validate(self.compile())

    def create(self, wait: bool = False, poll_interval: int = 5) -> Any:
        """Submit the compiled Workflow; as in Hera."""
        created = self._send()
        self.name = created.metadata.name
        return self.wait(poll_interval=poll_interval) if wait else created

    async def async_create(self, wait: bool = True, poll_interval: int = 5) -> Any:
        """Like `create`, with an `AsyncWorkflowsService`."""
        created = await self._send_async()
        self.name = created.metadata.name
        return await self.async_wait(poll_interval=poll_interval) if wait else created
