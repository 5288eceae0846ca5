"""What a Workflow could become is found by compiling it; marks are written into its text and change nothing else."""

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hera_pipelines.authoring.adoption import (
    Adoption,
    YamlPipeline,
    proposals,
    propose_adoption,
    read_argo_documents,
)
from hera_pipelines.authoring.adoption.documents import write_marks
from hera_pipelines.authoring.loading import load_pipeline
from hera_pipelines.cli.shared_options import with_parameters
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, find_template, read_template_specs, read_workflow_parameters
from tiphys.protocol.step_spec import STEP_ANNOTATION

TEXT = """\
# trains every night
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  generateName: nightly-
spec:
  entrypoint: main
  templates:
  - name: main
    steps:
    - - {name: prepare, template: prepare}
    - - {name: Train, template: train}   # the long one
    - - {name: flip, template: flip}
    - - name: report
        template: report
        when: "{{steps.flip.outputs.result}} == heads"
      - {name: nested, template: nested}
  - name: prepare
    # a comment that stays
    container: {image: busybox, command: [echo]}
  - name: train
    metadata:
      labels: {team: vision}
    container:
      image: trainer:1
      command: [python, train.py]
      resources: {limits: {nvidia.com/gpu: 2}}
  - name: flip
    script:
      image: python:3.12
      command: [python]
      source: print("heads")
  - metadata:
      annotations:
        team: vision
    name: report
    container: {image: busybox, command: [echo]}
  - name: nested
    dag:
      tasks:
      - {name: inner, template: inner}
  - name: inner
    container: {image: busybox, command: [echo]}
"""


def write(folder: Path, text: str, name: str = "old.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def adopt(path: Path) -> list[Adoption]:
    return [propose_adoption(document) for document in read_argo_documents(path)]


def test_a_template_becomes_what_compile_accepts_or_has_a_reason(tmp_path: Path) -> None:
    [adoption] = adopt(write(tmp_path, TEXT))
    assert adoption.refusal == ""
    found = {one.template: (one.kind.value, one.line, one.tasks) for one in adoption.proposals}
    assert found == {
        "main": ("plain", 9, ()),
        "prepare": ("step", 18, ("prepare",)),
        "train": ("train", 21, ("Train",)),
        "flip": ("step", 28, ("flip",)),
        "report": ("step", 33, ("report",)),
        "nested": ("plain", 38, ("nested",)),
        "inner": ("plain", 42, ()),
    }
    reasons = {one.template: one.reason for one in adoption.proposals}
    assert reasons["train"].startswith("it takes its 2 GPUs from a queue")
    assert reasons["inner"] == "is run by no task of the entry point itself"


def test_marks_are_lines_in_the_text_and_the_file_compiles(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT)
    [adoption] = adopt(path)
    text = write_marks([adoption.document], [adoption.marks])
    difference = list(difflib.ndiff(TEXT.splitlines(), text.splitlines()))
    assert not [line for line in difference if line.startswith("- ")]
    assert [line.split()[1:] for line in difference if line.startswith("+ ") and "tiphys" in line] == [
        ["tiphys.dev/adopt:", "step"],
        ["tiphys.dev/adopt:", "train"],
        ["tiphys.dev/adopt:", "step"],
        ["tiphys.dev/adopt:", "step"],
    ]
    before, after = yaml.safe_load(TEXT), yaml.safe_load(text)
    for template in after["spec"]["templates"]:
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        if annotations.pop("tiphys.dev/adopt", None) and not annotations:
            del template["metadata"]["annotations"]
            if not template["metadata"]:
                del template["metadata"]
    assert after == before

    adopted = load_pipeline(write(tmp_path, text, "adopted.yaml"))
    assert isinstance(adopted, YamlPipeline)
    assert adopted.pipeline_name == "nightly"
    compiled = adopted.compile(store="s3://ml-runs/tiphys")
    assert compiled["metadata"]["annotations"]["tiphys.dev/store"] == "s3://ml-runs/tiphys"
    assert find_template(compiled, "train-run")["metadata"]["labels"]["team"] == "vision"
    annotations = find_template(compiled, "report")["metadata"]["annotations"]
    assert {name: text for name, text in annotations.items() if name != STEP_ANNOTATION} == {"team": "vision"}
    assert find_template(compiled, "inner")["container"]["image"] == "busybox"


def test_adopting_an_adopted_file_changes_nothing(tmp_path: Path) -> None:
    [first] = adopt(write(tmp_path, TEXT))
    text = write_marks([first.document], [first.marks])
    [again] = adopt(write(tmp_path, text))
    assert again.marks == {}
    assert write_marks([again.document], [again.marks]) == text


def test_a_mark_of_the_author_decides(tmp_path: Path) -> None:
    plain = TEXT.replace(
        "  - name: prepare\n", "  - name: prepare\n    metadata:\n      annotations:\n        tiphys.dev/adopt: plain\n"
    )
    [adoption] = adopt(write(tmp_path, plain))
    assert {one.template: one.reason for one in adoption.proposals}["prepare"] == "is marked so"
    assert "prepare" not in adoption.marks


@pytest.mark.parametrize(
    ("original", "changed", "reason"),
    [
        ("  - name: train\n", "  - name: train\n    podSpecPatch: '{}'\n", "use the step's own options"),
        ("gpu: 2", "gpu: '{{workflow.parameters.gpus}}'", "and no lease counts them; use gpus=a number"),
        ("nvidia.com/gpu: 2", "nvidia.com/mig-3g.20gb: 1, amd.com/gpu: 2", "and its lease is for"),
    ],
)
def test_gpus_for_which_there_can_be_no_lease_are_in_no_step(tmp_path, original, changed, reason) -> None:
    [adoption] = adopt(write(tmp_path, TEXT.replace(original, changed)))
    [train] = [one for one in adoption.proposals if one.template == "train"]
    assert train.kind.value == "plain"
    assert reason in train.reason


@pytest.mark.parametrize(
    ("line", "place"), [("- {name: train, template: train}", "nested"), ("tiphys.dev/adopt: plain", "marked")]
)
def test_gpus_of_a_plain_template_are_named_as_outside_of_every_lease(tmp_path: Path, line: str, place: str) -> None:
    text = TEXT.replace("{name: Train, template: train}   #", "{name: Train, template: prepare}   #")
    if place == "marked":
        text = TEXT.replace(
            "labels: {team: vision}\n    container:\n      image: trainer",
            f"annotations: {{{line}}}\n    container:\n      image: trainer",
        )
    [adoption] = adopt(write(tmp_path, text))
    [train] = [one for one in adoption.proposals if one.template == "train"]
    assert (train.kind.value, train.reason.partition("; ")[2]) == (
        "plain",
        "it asks for nvidia.com/gpu: 2, and no lease counts these",
    )


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/mig-3g.20gb", "habana.ai/gaudi"])
def test_gpus_of_any_known_resource_are_those_of_a_training(tmp_path: Path, resource: str) -> None:
    path = write(tmp_path, TEXT.replace("nvidia.com/gpu: 2", f"{resource}: 2"))
    [adoption] = adopt(path)
    assert {one.template: one.kind.value for one in adoption.proposals}["train"] == "train"
    adopted = write(tmp_path, write_marks([adoption.document], [adoption.marks]), "adopted.yaml")
    pipeline = load_pipeline(adopted)
    assert isinstance(pipeline, YamlPipeline)
    compiled = pipeline.compile(store="s3://ml-runs/tiphys")
    assert find_template(compiled, "train-run")["container"]["resources"] == {"limits": {resource: "2"}}
    [gpu] = [spec.gpu for _, spec in read_template_specs(compiled["spec"]["templates"]) if spec.gpu]
    assert (gpu.gpus, gpu.resource) == (2, resource)


@pytest.mark.parametrize(
    ("template", "task", "words"),
    [
        ("{name: a-1, steps: []}", "template: a-1", "template 'a-1': holds steps of its own"),
        ("{name: a-1, suspend: {}}", "template: a-1", "template 'a-1': is suspend"),
        (
            "{name: b, suspend: {}}",
            "templateRef: {name: lib, template: x}",
            "templateRef 'lib' is another object; copy",
        ),
    ],
)
def test_a_workflow_without_a_step_says_why_none_of_its_templates_becomes_one(
    tmp_path: Path, template: str, task: str, words: str
) -> None:
    text = PARTS.partition("      dag")[0] + f"      dag: {{tasks: [{{name: a, {task}}}]}}\n    - {template}\n"
    [adoption] = adopt(write(tmp_path, text))
    assert adoption.refusal.startswith(f"no container of its entry point can become a step: {words}")


LIBRARY_AND_USER = """\
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata: {name: ml.lib}
spec:
  templates:
  - name: fit  # a comment that stays
    container: {image: "x:1"}
  - name: both
    dag: {tasks: [{name: a, template: fit}, {name: b, template: main}]}
  - name: main
    container: {image: "y:1"}
---
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: uses-}
spec:
  entrypoint: main
  templates:
  - name: main
    steps:
    - - {name: fit, templateRef: {name: ml.lib, template: fit}}
      - {name: other, templateRef: {name: elsewhere, template: fit}}
    - - {name: both, templateRef: {name: ml.lib, template: both}}
"""


def test_templates_of_a_library_in_the_same_file_are_those_of_the_workflow(tmp_path: Path) -> None:
    [library, adoption] = adopt(write(tmp_path, LIBRARY_AND_USER))
    assert library.refusal == "it has no entrypoint; a library of templates has nothing that runs"
    found = {one.template: (one.line, one.kind.value, one.tasks) for one in adoption.proposals}
    assert found == {
        "main": (19, "plain", ()),
        "fit": (6, "step", ("fit",)),
        "both": (8, "plain", ("both",)),
        "main-x": (10, "plain", ()),
    }
    text = write_marks([library.document, adoption.document], [library.marks, adoption.marks])
    assert text == LIBRARY_AND_USER.replace(
        "stays\n", "stays\n    metadata:\n      annotations:\n        tiphys.dev/adopt: step\n"
    )
    compiled = load_pipeline(write(tmp_path, text, "adopted.yaml")).compile(store="s3://ml-runs/tiphys")
    tasks = {task["name"]: task for task in find_template(compiled, compiled["spec"]["entrypoint"])["dag"]["tasks"]}
    assert [tasks[name].get("template") for name in ("fit", "both", "other")] == ["fit-program", "both", None]
    assert [task["template"] for task in find_template(compiled, "both")["dag"]["tasks"]] == ["fit", "main-x"]
    assert tasks["other"]["templateRef"]["name"] == "elsewhere"
    assert adopt(write(tmp_path, text))[1].marks == {}


def test_a_template_of_a_library_is_marked_once_for_two_workflows(tmp_path: Path) -> None:
    path = write(tmp_path, f"{LIBRARY_AND_USER}---\n{LIBRARY_AND_USER.partition('---')[2].replace('uses-', 'also-')}")
    adoptions = adopt(path)
    text = write_marks([one.document for one in adoptions], [one.marks for one in adoptions])
    assert text.count("tiphys.dev/adopt: step") == 1


def test_a_list_of_objects_is_adopted_as_its_items(tmp_path: Path) -> None:
    items = "".join(f"- {part.strip()}\n".replace("\n", "\n  ")[:-2] for part in LIBRARY_AND_USER.split("---\n"))
    path = write(tmp_path, f"apiVersion: v1\nkind: List\nitems:\n{items}")
    adoptions = adopt(path)
    assert [one.document.name for one in adoptions] == ["ml.lib", "uses-"]
    text = write_marks([one.document for one in adoptions], [one.marks for one in adoptions])
    assert [one.marks for one in adopt(write(tmp_path, text))] == [{}, {}]


INLINE = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: inline-}
spec:
  entrypoint: main
  templates:
  - name: main
    KIND
  - name: echo
    container: {image: busybox}
"""
INLINE_TASKS = {
    "dag": """\
dag:
      tasks:
      - name: a
        inline:
          # a comment that stays
          container: {image: busybox}
      - name: b
        template: echo
""",
    "steps": """\
steps:
    - - inline:
          metadata:
            labels: {team: vision}
          container: {image: busybox}
        name: a
      - name: b
        template: echo
""",
}


@pytest.mark.parametrize("kind", ["dag", "steps"])
def test_a_template_within_a_task_becomes_a_step(tmp_path: Path, kind: str) -> None:
    before = INLINE.replace("KIND\n", INLINE_TASKS[kind])
    [adoption] = adopt(write(tmp_path, before))
    found = {one.template: (one.kind.value, one.tasks) for one in adoption.proposals}
    assert found == {"main": ("plain", ()), "echo": ("step", ("b",)), "main/a": ("step", ("a",))}
    text = write_marks([adoption.document], [adoption.marks])
    difference = list(difflib.ndiff(before.splitlines(), text.splitlines()))
    assert not [line for line in difference if line.startswith("- ")]
    compiled = load_pipeline(write(tmp_path, text, "adopted.yaml")).compile(store="s3://ml-runs/tiphys")
    assert find_template(compiled, "a-program")["container"]["image"] == "busybox"
    [again] = adopt(write(tmp_path, text))
    assert again.marks == {}


SCHEDULE = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: beside}
---
apiVersion: argoproj.io/v1alpha1
kind: CronWorkflow
metadata: {name: nightly}
spec:
  schedule: "0 2 * * *"
  timezone: Europe/Berlin
  workflowMetadata: {labels: {team: vision}}
  workflowSpec:
    entrypoint: say
    templates:
    - name: say
      metadata:
        annotations: {tiphys.dev/adopt: step}
      container: {image: busybox, command: [echo]}
"""
LIBRARY = """\
apiVersion: argoproj.io/v1alpha1
kind: WorkflowTemplate
metadata:
  name: library
  annotations: {tiphys.dev/store: s3://ml-runs/tiphys}
spec:
  entrypoint: say
  templates:
  - name: say
    metadata: {annotations: {tiphys.dev/adopt: step}}
    container: {image: busybox, command: [echo]}
"""


def test_a_schedule_stays_a_schedule_and_can_run_right_now(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path, SCHEDULE))
    assert isinstance(pipeline, YamlPipeline)
    cron = pipeline.compile(store="s3://ml-runs/tiphys")
    assert (cron["kind"], cron["spec"]["schedules"], cron["spec"]["timezone"]) == (
        *("CronWorkflow", ["0 2 * * *"], "Europe/Berlin"),
    )
    assert cron["spec"]["workflowMetadata"]["labels"]["team"] == "vision"
    now = pipeline.workflow(store="s3://ml-runs/tiphys")
    assert (now["kind"], now["metadata"]["generateName"]) == ("Workflow", "nightly-")


def test_a_template_stays_a_template_with_the_store_of_its_annotation(tmp_path: Path) -> None:
    compiled = load_pipeline(write(tmp_path, LIBRARY)).compile()
    assert (compiled["kind"], compiled["metadata"]["name"]) == ("WorkflowTemplate", "library")
    assert compiled["spec"]["workflowMetadata"]["annotations"]["tiphys.dev/store"] == "s3://ml-runs/tiphys"


def test_several_documents_are_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, f"{SCHEDULE}---\n{LIBRARY}")
    assert load_pipeline(path, "library").pipeline_name == "library"
    with pytest.raises(UsageError, match="nightly, library"):
        load_pipeline(path)
    templates = LIBRARY.replace("  entrypoint: say\n", "")
    assert load_pipeline(write(tmp_path, f"{templates}---\n{SCHEDULE}")).pipeline_name == "nightly"  # it alone runs
    with pytest.raises(UsageError, match="it has no entrypoint"):
        load_pipeline(write(tmp_path, templates)).compile()


def test_values_of_workflow_parameters_are_the_texts_that_argo_makes_of_them(tmp_path: Path) -> None:
    values = "[{name: flag, value: true}, {name: seed, value: 7}, {name: rate, value: 1.0}, {name: n, enum: [1, 2]}]"
    text = LIBRARY.replace("  entrypoint: say\n", f"  entrypoint: say\n  arguments: {{parameters: {values}}}\n")
    compiled = load_pipeline(write(tmp_path, text)).workflow()
    found = {name: value for name, value in read_workflow_parameters(compiled).items() if "tiphys" not in name}
    assert found == {"flag": "true", "seed": "7", "rate": "1"}
    with_parameters(compiled, {"n": "2"})
    with pytest.raises(UsageError, match="one of '1', '2'"):
        with_parameters(compiled, {"n": "3"})


PARTS = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: parts-}
spec:
  entrypoint: main
  templates:
    - name: main
      dag: {tasks: [{name: a-1, template: a-1}, {name: größe, template: größe}]}
"""
LABELS = 'labels: {team: größe}, annotations: {inject: "false"}'


def marked_metadata(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    """The text with marks, and the metadata of each template that compile would see."""
    path.write_text(text, newline="")
    [adoption] = adopt(path)
    assert adoption.refusal == ""
    written = write_marks([adoption.document], [adoption.marks])
    templates = yaml.safe_load(written)["spec"]["templates"]
    return written, {one["name"]: one.get("metadata") for one in templates if one["name"] != "main"}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        # merged into the template, also without a key of its own at the beginning
        ("name: a-1\n      <<: *base\n      CONTAINER", "<<: *base\n      name: größe # ü\n      CONTAINER"),
        # shared between templates
        (
            "name: a-1\n      metadata: &m {LABELS}\n      CONTAINER",
            "name: größe\n      metadata: *m  # ü\n      CONTAINER",
        ),
        ("name: a-1\n      metadata: *base-m\n      CONTAINER", "{name: größe, metadata: *base-m, CONTAINER}"),
        # merged into the metadata, or into the annotations
        (
            "name: a-1\n      metadata:\n        <<: *base-m\n        labels: {team: größe}\n      CONTAINER",
            "name: größe\n      CONTAINER\n      metadata:\n        annotations: {<<: *base-a}\n        TEAM",
        ),
        # all of the other template
        ("&t\n      name: a-1\n      metadata: {LABELS}\n      CONTAINER", "<<: *t\n      name: größe"),
    ],
    ids=["template", "shared", "alias", "metadata", "whole"],
)
def test_anchors_and_merge_keys_stay_beside_the_mark(tmp_path: Path, first: str, second: str, line_end: str) -> None:
    base = "metadata: &base-m {labels: {team: größe}, annotations: &base-a {inject: 'false'}}"
    text = f"x-base: &base {{{base}}}\n{PARTS}    - {first}\n    - {second}".replace("LABELS", LABELS).replace(
        "TEAM", "labels: {team: größe}"
    )
    text = text.replace("CONTAINER", "container: {image: busybox, command: [echo]}").replace("\n", line_end)
    written, metadata = marked_metadata(tmp_path / "old.yaml", text)
    expected = {
        "labels": {"team": "größe"},
        "annotations": {"inject": "false", "tiphys.dev/adopt": "step"},
    }
    assert metadata == {"a-1": expected, "größe": expected}
    assert written.count("\n") == written.count(line_end)
    assert ("# ü" in written) == ("# ü" in text)


@pytest.mark.parametrize("metadata", ["metadata:", "metadata: ~", "metadata: {}", "metadata: {annotations: }"])
def test_an_empty_metadata_takes_the_mark(tmp_path: Path, metadata: str) -> None:
    rest = "container: {image: busybox, command: [echo]}"
    text = f"{PARTS}    - name: a-1\n      {metadata}\n      {rest}\n    - {{name: größe, {rest}}}\n"
    marked = {"annotations": {"tiphys.dev/adopt": "step"}}
    assert marked_metadata(tmp_path / "old.yaml", text)[1] == {"a-1": marked, "größe": marked}


@pytest.mark.parametrize(
    "parts",
    [
        "    - name: a-1\n      metadata: &m\n        labels: {a: b}\n      CONTAINER\n"
        "    - {name: größe, metadata: *m, suspend: {}}\n",
        "    - &t {name: a-1, CONTAINER}\n    - {name: größe, suspend: {x: *t}}\n",
    ],
    ids=["metadata", "template"],
)
def test_a_mark_that_would_reach_another_template_is_refused_with_its_line(tmp_path: Path, parts: str) -> None:
    parts = parts.replace("CONTAINER", "container: {image: busybox, command: [echo]}")
    with pytest.raises(UsageError, match=r"old\.yaml:1\d: template 'größe': .*by an anchor or a merge key; write that"):
        marked_metadata(tmp_path / "old.yaml", PARTS + parts)


def test_templates_are_compiled_together_and_only_those_that_are_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count_and_compile(manifest: Manifest, options: CompileOptions) -> Manifest:
        calls.append(options)
        return compile_workflow(manifest, options)

    monkeypatch.setattr(proposals, "compile_workflow", count_and_compile)
    names = [f"t-{number}" for number in range(64)]
    steps = "".join(f"      - - {{name: {name}, template: {name}}}\n" for name in names)
    templates = "".join(f"    - {{name: {name}, container: {{image: busybox, command: [echo]}}}}\n" for name in names)
    text = f"{PARTS.partition('      dag')[0]}      steps:\n{steps}{templates}"
    [adoption] = adopt(write(tmp_path, text))
    assert (len(adoption.marks), len(calls)) == (64, 1)
    [adoption] = adopt(
        write(tmp_path, text.replace("{name: t-7, container", "{name: t-7, memoize: {key: k}, container"))
    )
    assert set(names) - adoption.marks.keys() == {"t-7"}
    assert len(calls) < 24


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", r"old\.yaml:1: this is not YAML"),
        ("", "but nothing"),
        ("- 1", "but nothing"),
        ("kind: Workflow\napiVersion: v1\n", "but Workflow"),
        ("kind: Service\napiVersion: v1\n", "but Service"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 400_000, "nested too deeply"),
        ("a: &x 1\nb: &x 2", r"old\.yaml:2: this anchor is defined twice; give the second another name"),
        ("b: 1\na: &a [*a]", r"old\.yaml:2: .*an anchor contains its own alias"),
        ("a: 1\nb: {c: 1, d: 2,\n c: 3}", r"old\.yaml:3: .*the key 'c' is there twice; keep one"),
        ("a: &u-1 {b: {<<: [{c: *u-1}]}}", r"old\.yaml:1: .*an anchor contains its own alias"),
        ("a:\n  b: 1" + "0" * 5000, r"old\.yaml:2: .*5001 digits"),
        ("a: -0x1" + "0" * 5000, r"old\.yaml:1: .*an integer of 20001 bits; write it in quotes"),
        ("a0: &a0 1\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 9)), "aliases stand for"),
    ],
)
def test_a_document_that_is_no_workflow_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_argo_documents(write(tmp_path, text))


def test_a_workflow_of_odd_parts_is_refused_and_not_a_crash(tmp_path: Path) -> None:
    head = "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\n"
    for spec in (
        "spec: []",
        "spec: {entrypoint: a, templates: {a: 1}}",
        "spec: {entrypoint: a, templates: [1]}",
        "spec: 7",
    ):
        path = write(tmp_path, f"{head}{spec}\n")
        with pytest.raises(UsageError, match=r"old\.yaml:1: this is no Workflow: spec"):
            adopt(path)


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [
        ("resources: {limits: {cpu: 1}}", "resources: {limits: [cpu]}", "container.resources.limits"),
        ("valueFrom: {path: /tmp/o}", "valueFrom: /tmp/o", "outputs.parameters.0.valueFrom"),
        ("path: /tmp/a", "path: 7", "outputs.artifacts.0.path"),
        ("parallelism: 2", "parallelism: '2'", "parallelism"),
        ("withItems: [1]", "withItems: 1", "dag.tasks.0.withItems"),
        ("withItems: [1]", "withParam: [1]", "dag.tasks.0.withParam"),
        ("withItems: [1]", "withSequence: 3", "dag.tasks.0.withSequence"),
    ],
)
def test_a_field_of_another_shape_is_named(tmp_path: Path, before: str, after: str, place: str) -> None:
    text = """apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: odd-}
spec:
  entrypoint: main
  templates:
    - name: main
      parallelism: 2
      dag: {tasks: [{name: a, template: a, withItems: [1]}]}
    - name: a
      outputs: {parameters: [{name: o, valueFrom: {path: /tmp/o}}], artifacts: [{name: a, path: /tmp/a}]}
      container: {image: busybox, command: [echo], resources: {limits: {cpu: 1}}}
"""
    assert adopt(write(tmp_path, text))[0].marks
    assert before in text
    with pytest.raises(UsageError, match=rf"this is no Workflow: spec\.templates\.\d\.{re.escape(place)}: "):
        adopt(write(tmp_path, text.replace(before, after)))


def test_a_field_without_a_value_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    text = """apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: bare-}
spec:
  entrypoint: main
  arguments:
  templates:
    - name: main
      inputs:
      dag: {tasks: [{name: a, template: a, withItems: [{x: 1}, {x: null}], arguments: , when: }]}
    - name: a
      metadata:
      container: {image: busybox, command: [echo], env: , resources: }
"""
    [document] = read_argo_documents(write(tmp_path, text))
    [task] = document.manifest["spec"]["templates"][0]["dag"]["tasks"]
    assert task == {"name": "a", "template": "a", "withItems": [{"x": 1}, {"x": None}]}
    [adoption] = adopt(write(tmp_path, text))
    assert (set(adoption.marks), adoption.refusal) == ({"a"}, "")


def test_a_template_that_names_data_stays_what_its_author_made_it_though_nothing_can_be_read(tmp_path: Path) -> None:
    marked = TEXT.replace(
        "    name: report\n",
        "        tiphys.dev/adopt: step\n        tiphys.dev/data: data/train, lakefs://d-1/main/x\n    name: report\n",
    ).replace('        when: "{{steps.flip.outputs.result}} == heads"\n', "")
    [adoption] = adopt(write(tmp_path, marked))
    [report] = [one for one in adoption.proposals if one.template == "report"]
    assert (report.kind.value, report.is_marked, adoption.refusal) == ("step", True, "")


def test_gpus_of_a_template_with_release_in_its_name_are_named_too(tmp_path: Path) -> None:
    text = """
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {name: w}
spec:
  entrypoint: main
  templates:
  - name: main
    dag: {tasks: [{name: release, template: release}, {name: use, template: use, depends: release}]}
  - name: release
    daemon: true
    container: {image: i, command: [serve], resources: {limits: {nvidia.com/gpu: 2}}}
  - {name: use, container: {image: i, command: [use]}}
"""
    [adoption] = adopt(write(tmp_path, text))
    [release] = [one for one in adoption.proposals if one.template == "release"]
    assert "a daemon never ends" in release.reason
    assert release.reason.endswith("; it asks for nvidia.com/gpu: 2, and no lease counts these")
