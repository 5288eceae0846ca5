"""`YamlPipeline`: a Workflow, template or schedule of a YAML file, as the commands take it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hera_pipelines.authoring.adoption.documents import ArgoDocument
from hera_pipelines.authoring.adoption.translation import is_marked, translate_workflow
from hera_pipelines.authoring.data_versions import read_data_version
from hera_pipelines.compile import (
    CompileOptions,
    TemplateKind,
    compile_workflow,
    cron_workflow,
    to_workflow_yaml,
    workflow_template,
)
from hera_pipelines.compile.references import pipeline_name
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STORE_ANNOTATION


@dataclass(frozen=True)
class YamlPipeline:
    """A document whose templates say by annotations what Tiphys makes of them."""

    document: ArgoDocument

    @property
    def pipeline_name(self) -> str:
        metadata = self.document.manifest.get("metadata") or {}
        return pipeline_name(None, metadata.get("name"), metadata.get("generateName")) or self.document.path.stem

    @property
    def store(self) -> str:
        """Store URL of the annotation ``tiphys.dev/store``; empty without it."""
        metadata = self.document.as_workflow()["metadata"]
        return str((metadata.get("annotations") or {}).get(STORE_ANNOTATION, ""))

    def compile(self, **options: Any) -> Manifest:
        """The object that Argo gets, of the kind of the document; arguments as in `Pipeline.compile`."""
        compiled, manifest = self.workflow(**options), self.document.manifest
        if self.document.kind == "CronWorkflow":
            cron = {field: value for field, value in manifest["spec"].items() if not field.startswith("workflow")}
            if schedule := cron.pop("schedule", ""):  # of Argo before 3.6
                cron.setdefault("schedules", [schedule])
            return cron_workflow(compiled, self.pipeline_name, cron)
        if self.document.kind in list(TemplateKind):
            return workflow_template(compiled, self.pipeline_name, TemplateKind(self.document.kind))
        return compiled

    def workflow(self, *, store: str | None = None, queues: Collection[str] | None = None) -> Manifest:
        """The Workflow, also of a template or schedule, for a run right now; arguments as in `Pipeline.compile`."""
        workflow = self.document.as_workflow()
        if not is_marked(workflow["spec"]):
            raise UsageError(
                f"{self.document.path}: none of its templates says what Tiphys makes of it; `tiphys adopt "
                f"{self.document.path}` finds out, and marks them"
            )
        if self.document.kind != "Workflow":
            workflow["metadata"].pop("name", None)
            workflow["metadata"]["generateName"] = f"{self.pipeline_name}-"
        options = CompileOptions(
            pipeline=self.pipeline_name,
            store=self.store if store is None else store,
            queues=None if queues is None else frozenset(queues),
            read_data_version=read_data_version,
        )
        try:
            return compile_workflow(translate_workflow(workflow), options)
        except UsageError as error:
            raise UsageError(f"{self.document.path}: {error}") from error

    def to_yaml(self) -> str:
        """The compiled document as YAML."""
        return to_workflow_yaml(self.compile())
