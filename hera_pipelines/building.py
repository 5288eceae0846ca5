"""What `Pipeline` and `CronPipeline` share: compile stands between Hera and every way out."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hera.workflows import DAG

from hera_pipelines.compile import CompileOptions, read_executor_plugin, to_workflow_yaml
from hera_pipelines.compile.names import pipeline_name
from hera_pipelines.drift import Drift
from hera_pipelines.plugins import PluginTemplate
from hera_pipelines.policies import AutoResume
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

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
