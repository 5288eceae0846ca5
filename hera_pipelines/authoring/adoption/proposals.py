"""Finds out what each template of a Workflow can become, by compiling it.

A container that a task of the entry point runs becomes a step, or a training if
it asks for GPUs, unless compile refuses it; then its reason is that of compile.
"""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hera_pipelines.authoring.adoption import marks
from hera_pipelines.authoring.adoption.documents import ArgoDocument
from hera_pipelines.authoring.adoption.marks import AdoptedKind
from hera_pipelines.authoring.adoption.translation import (
    inline_templates,
    is_leaf,
    list_tasks,
    mounts_workflow_volume,
    template_kind,
    translate_workflow,
)
from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.compile.gpu_resources import find_gpu_resources
from hera_pipelines.compile.settings import DataSource
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import DataVersion


def _unknown_version(source: DataSource) -> DataVersion:
    """Takes the place of each version: what can be compiled does not depend on it."""
    return DataVersion(name=str(source), algorithm="md5", digest="unknown")


_OPTIONS = CompileOptions(pipeline="adopted", store="s3://bucket/prefix", read_data_version=_unknown_version)


@dataclass(frozen=True)
class Proposal:
    """What a template becomes, and why.

    Attributes:
        template: Name of the template; of one written within a task of the entry point, as in `marks.inline_name`.
        line: Its line in the file.
        kind: What it becomes.
        reason: Why.
        tasks: Tasks of the entry point that run it.
        is_marked: Whether its author has marked it already.
    """

    template: str
    line: int
    kind: AdoptedKind
    reason: str
    tasks: tuple[str, ...]
    is_marked: bool


@dataclass(frozen=True)
class Adoption:
    """What becomes of a Workflow. ``refusal`` says why it stays as it is; empty if it has a step."""

    document: ArgoDocument
    proposals: tuple[Proposal, ...]
    refusal: str

    @property
    def marks(self) -> dict[str, dict[str, str]]:
        """Annotations for the templates that become steps and have none; empty for a Workflow that stays."""
        if self.refusal:
            return {}
        chosen = (
            proposal for proposal in self.proposals if proposal.kind is not AdoptedKind.PLAIN and not proposal.is_marked
        )
        return {proposal.template: {marks.ADOPT: proposal.kind.value} for proposal in chosen}


def propose_adoption(document: ArgoDocument) -> Adoption:
    """What becomes of each template of ``document``. A mark that its author has written stays."""
    workflow = document.as_workflow()
    try:
        translate_workflow(_mark(workflow, {}))
    except UsageError as error:
        return Adoption(document, (), str(error))
    spec = workflow["spec"]
    inline = inline_templates(spec)
    users = _entry_tasks(spec) | {name: [task["name"]] for name, task in inline.items()}
    templates = [*spec["templates"], *({**task["inline"], "name": name} for name, task in inline.items())]
    used = [template for template in templates if users.get(template["name"])]
    preferred = {template["name"]: kind for template in used if (kind := _preferred_kind(template))}
    compiled = list(_compile_groups(workflow, preferred))
    accepted = {name for group in compiled for name in group}
    chosen: dict[str, AdoptedKind] = {}
    proposals = []
    for template in templates:
        proposal = _propose(document, workflow, template, tuple(users.get(template["name"], ())), accepted)
        proposals.append(proposal)
        if proposal.kind is not AdoptedKind.PLAIN:
            chosen[proposal.template] = proposal.kind
    refusal = "" if chosen else _describe_refusal(spec, proposals)
    if chosen and chosen not in compiled:
        try:
            compile_workflow(translate_workflow(_mark(workflow, chosen)), _OPTIONS)
        except UsageError as error:
            refusal = str(error)
    return Adoption(document, tuple(proposals), refusal)


def _preferred_kind(template: Manifest) -> AdoptedKind | None:
    declared = marks.adopted_kind(template)
    if not is_leaf(template) or declared is AdoptedKind.PLAIN:
        return None
    return declared or (AdoptedKind.TRAIN if marks.requested_gpus(template) else AdoptedKind.STEP)


def _compile_groups(workflow: Manifest, kinds: dict[str, AdoptedKind]) -> Iterator[dict[str, AdoptedKind]]:
    """Groups of templates that compile accepts in these kinds: all at once, or halves where that fails."""
    try:
        compile_workflow(translate_workflow(_mark(workflow, kinds)), _OPTIONS)
        yield kinds
    except UsageError:
        names, middle = list(kinds), len(kinds) // 2
        for half in (names[:middle], names[middle:]) if middle else ():
            yield from _compile_groups(workflow, {name: kinds[name] for name in half})


def _propose(
    document: ArgoDocument, workflow: Manifest, template: Manifest, tasks: tuple[str, ...], accepted: Collection[str]
) -> Proposal:
    name, declared = template["name"], marks.adopted_kind(template)

    def build(kind: AdoptedKind, reason: str) -> Proposal:
        asked = next(find_gpu_resources(template), None)
        if kind is AdoptedKind.PLAIN and asked is not None and asked.name not in reason:
            reason += f"; it asks for {asked.name}: {asked.amount}, and no lease counts these"
        return Proposal(name, document.lines.get(name, 0), kind, reason, tasks, declared is not None)

    if not is_leaf(template):
        what = template_kind(template)
        nested = "holds steps of its own, which Argo runs as before" if what in ("steps", "dag") else f"is {what}"
        return build(AdoptedKind.PLAIN, "holds the steps" if name == workflow["spec"]["entrypoint"] else nested)
    if not tasks:
        return build(AdoptedKind.PLAIN, "is run by no task of the entry point itself")
    if declared is AdoptedKind.PLAIN:
        return build(AdoptedKind.PLAIN, "is marked so")
    gpus, kind = marks.requested_gpus(template), _preferred_kind(template)
    assert kind is not None
    refusals: list[str] = []
    for candidate in dict.fromkeys((kind, AdoptedKind.STEP)):
        try:
            if candidate is not kind or name not in accepted:
                compile_workflow(translate_workflow(_mark(workflow, {name: candidate})), _OPTIONS)
        except UsageError as error:
            refusals.append(str(error))
            continue
        is_repeated = mounts_workflow_volume(template, workflow["spec"])
        return build(candidate, _describe(candidate, gpus, refusals, is_repeated))
    return build(AdoptedKind.PLAIN, refusals[0])


def _describe(kind: AdoptedKind, gpus: int, refusals: list[str], is_repeated: bool) -> str:
    if is_repeated:
        return "its attempts are recorded; a resume repeats it, because each Workflow makes its volume anew"
    if kind is AdoptedKind.STEP:
        why = f"; no training, because {refusals[0]}" if refusals else ""
        return f"its result is recorded, and a resume takes it over{why}"
    granted = f"its {gpus} GPU{'' if gpus == 1 else 's'} from a queue" if gpus else "part in a queue only with GPUs"
    return f"it takes {granted}; nothing is kept without {marks.CHECKPOINT_FOLDER} or a session"


def _describe_refusal(spec: Manifest, proposals: list[Proposal]) -> str:
    """Why a Workflow without a step stays as it is: what its tasks run, and how that becomes a step."""
    entry = next(template for template in spec["templates"] if template["name"] == spec["entrypoint"])
    reasons = [f"template {proposal.template!r}: {proposal.reason}" for proposal in proposals if proposal.tasks]
    if referring := next((task for task in list_tasks(entry) if task.get("templateRef")), None):
        library = referring["templateRef"].get("name")
        reasons.append(
            f"templateRef {library!r} is another object; copy the template that it names into this file, or the "
            "library as a document of its own"
        )
    return f"no container of its entry point can become a step: {'; '.join(reasons) or 'it has no tasks'}"


def _mark(workflow: Manifest, kinds: dict[str, AdoptedKind]) -> Manifest:
    """``workflow`` with only these marks of `marks.ADOPT`."""
    marked = copy.deepcopy(workflow)
    named = {template.get("name", ""): template for template in marked["spec"].get("templates") or []}
    inline = {name: task["inline"] for name, task in inline_templates(marked["spec"]).items()}
    for name, template in (named | inline).items():
        metadata = template["metadata"] = template.get("metadata") or {}
        annotations = {k: v for k, v in (metadata.get("annotations") or {}).items() if k != marks.ADOPT}
        if kind := kinds.get(name):
            annotations[marks.ADOPT] = kind.value
        metadata["annotations"] = annotations
    return marked


def _entry_tasks(spec: Manifest) -> dict[str, list[str]]:
    """Names of the tasks of the entry point by the template that they run."""
    entry = next(template for template in spec["templates"] if template["name"] == spec["entrypoint"])
    if is_leaf(entry):
        return {entry["name"]: [entry["name"]]}
    users: dict[str, list[str]] = {}
    for task in list_tasks(entry):
        users.setdefault(task.get("template") or "", []).append(task["name"])
    return users
