"""An adopted Workflow is the author's, but for what `support.checks.adoption_differences` lists.

| Workflows | what is compared |
|---|---|
| samples of this repository, and drawn ones | the text with marks, and what Argo gets once it is compiled |
| the same, with a planted change | that the comparison sees it |
| any folder, such as Argo's own examples | the same, and a table: adopted, refused by which field, changed |

``TIPHYS_ARGO_EXAMPLES`` names the folder; ``make argo-examples`` prints the table.
"""

import copy
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from support.builders.seeds import SEED
from support.checks.adoption_differences import compiled_differences, marked_differences

from hera_pipelines.authoring.adoption import Adoption, propose_adoption, read_argo_documents
from hera_pipelines.authoring.adoption.documents import write_marks
from hera_pipelines.authoring.adoption.yaml_pipeline import YamlPipeline
from tiphys.errors import UsageError

ROOT = Path(__file__).parents[4]
FOLDER = os.environ.get("TIPHYS_ARGO_EXAMPLES", "")
DRAWN = 40
STORE = "s3://ml-runs/tiphys"


class Examined(NamedTuple):
    """What became of the Workflows of a file: differences from the author's, and refusals by the words that say why."""

    adopted: int
    refusals: list[str]
    differences: list[str]


def examine(path: Path, folder: Path) -> Examined:
    """Adopt and compile all Workflows of a file; what is no Workflow of Argo counts as nothing."""
    try:
        documents = read_argo_documents(path)
    except UsageError as error:
        return Examined(0, [] if "it has no Workflow" in str(error) else [str(error)], [])
    adoptions = [propose_adoption(document) for document in documents]
    text = write_marks(documents, [adoption.marks for adoption in adoptions])
    marked = folder / path.name
    marked.write_text(text, newline="")
    original = path.read_bytes().decode("utf-8-sig")
    refusals = [adoption.refusal for adoption in adoptions if adoption.refusal]
    is_adopted = len(refusals) < len(adoptions)
    differences = marked_differences(original, text) if is_adopted else ["the text"] * (text != original)
    for adoption, document in zip(adoptions, read_argo_documents(marked), strict=True):
        if not adoption.refusal:
            pipeline = YamlPipeline(document)
            assert pipeline.compile(store=STORE)["kind"] == document.kind
            differences += compiled_differences(adoption, pipeline.workflow(store=STORE))
    return Examined(len(adoptions) - len(refusals), refusals, [f"{path.name}: {found}" for found in differences])


def yaml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())


@pytest.mark.skipif(not FOLDER, reason="TIPHYS_ARGO_EXAMPLES names no folder with Workflows of Argo")
def test_no_workflow_of_a_folder_changes_in_meaning(tmp_path: Path) -> None:
    examined = [examine(path, tmp_path) for path in yaml_files(Path(FOLDER))]
    refusals = Counter(_kind_of_refusal(refusal) for one in examined for refusal in one.refusals)
    changed = [found for one in examined for found in one.differences]
    rows = [("adopted", sum(one.adopted for one in examined)), ("refused", refusals.total())]
    rows += [(f"  {reason}", count) for reason, count in refusals.most_common()]
    table = [f"{count:5}  {what}" for what, count in [*rows, ("changed in meaning", len(changed))]]
    print("", *table, sep="\n")  # noqa: T201  `make argo-examples` shows it
    assert rows[0][1], f"{FOLDER} has no Workflow that can be adopted"
    assert changed == []


def _kind_of_refusal(refusal: str) -> str:
    """The field that a refusal names, without names of the Workflow."""
    first = re.split(r"; (?!\w+ gives)", refusal.removeprefix("no container of its entry point can become a step: "))[0]
    return re.sub(
        r"(template|step|artifact|parameter|point|WorkflowTemplate|templateRef|write) '[^']*':? ?", r"\1 … ", first
    )


@pytest.mark.parametrize(
    "sample",
    [ROOT / "docs/adopt/before.yaml", *yaml_files(ROOT / "examples/golden"), *yaml_files(ROOT / "templates")],
    ids=lambda path: path.stem,
)
def test_a_sample_of_the_repository_is_adopted_unchanged_or_refused_as_compiled(sample: Path, tmp_path: Path) -> None:
    examined = examine(sample, tmp_path)
    assert examined.differences == []
    assert all("it is compiled already; submit it as it is" in refusal for refusal in examined.refusals)


def test_drawn_workflows_are_adopted_unchanged(tmp_path: Path) -> None:
    total = Counter[str]()
    for number in range(DRAWN):
        text = drawn_workflow(random.Random(f"{SEED}-{number}"))
        path = tmp_path / f"drawn-{number}.yaml"
        path.write_text(text, newline="")
        (tmp_path / "marked").mkdir(exist_ok=True)
        try:
            examined = examine(path, tmp_path / "marked")
        except UsageError as error:
            assert "write that part out" in str(error), f"{text}\n{error}"
            total["shared parts"] += 1
            continue
        assert examined.differences == [], text
        total += Counter(adopted=examined.adopted, refused=len(examined.refusals))
    assert total["adopted"] > DRAWN * 0.8, total
    assert not total["refused"], total


BODIES = r"""
container: {image: busybox, command: [echo], args: ['it''s', "tab\t \u00fc", '{{inputs.parameters.who}}']}
~
container:
  image: busybox
  command: [sh, -c]
  args:
  - |
    echo 'a: b' # no comment

    echo "{{=inputs.parameters['who'] ?? 'x'}}"
~
container:
  image: &image 漢/字:1
  args:
  - >-
    folded
    text
  env:
  - {name: IMAGE, value: *image}
  - {name: EMPTY}
~
script:
  image: python:3.12
  command: [python]
  source: |+
    print('größe: 1', '''
    # still text
    ''')

~
script: {image: busybox, command: [sh], source: "echo '\\n' \\ {{workflow.name}}"}
volumes: []
~
container: {image: busybox, resources: {limits: {memory: 64Mi, cpu: 1}}, env: [{name: A, value: "yes"}]}
nodeSelector: {disk: ssd}
tolerations: [{key: a.b/c, operator: Exists}]
~
<<: *shared
container: {<<: *program, args: ["1"]}
"""
METADATA = r"""
~
metadata:
~
metadata: {}
~
metadata: {labels: {a.b/c: 'x: y'}}
~
metadata:
  # why
  annotations:
    note: |
      two
      lines
  labels: {team: größe}
~
metadata: {annotations: {'quoted: key': "1", x: '{}'}}
~
metadata: *labels
"""
FIELDS = r"""
~
retryStrategy: {}
~
retryStrategy:
~
retryStrategy: {limit: "2", retryPolicy: OnError}
~
activeDeadlineSeconds: 60
~
securityContext: {}
~
outputs:
  parameters:
  - {name: made, valueFrom: {path: /tmp/made}}
  artifacts:
  - name: file
    path: /tmp/file
~
inputs:
  artifacts:
  - {name: raw, path: /tmp/raw, raw: {data: "a\nb"}}
  parameters:
  - {name: who, default: 'x"y'}
"""
HEAD = """\
%s
x-parts: {labels: &labels {labels: {team: größe}}, shared: &shared {automountServiceAccountToken: false},
  program: &program {image: busybox, command: [echo]}}
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: drawn.dots-}
spec:
  arguments: {parameters: [{name: who, value: "a 'b' {c} ü"}]}
  entrypoint: Main
  templates:
"""


def drawn_workflow(draw: random.Random) -> str:
    """A Workflow in one of the many ways in which YAML is written."""
    names = draw.sample(["a", "B-2", "Make-it", "run", "x" * 40, "admit-run", "step-1"], draw.randint(1, 4))
    templates = [_drawn_template(draw, name) for name in names]
    templates.insert(draw.randrange(len(templates) + 1), _drawn_entry(draw, names))
    text = HEAD % draw.choice(["# grüße", "---", "# a: &b"]) + "".join(templates)
    if draw.random() < 0.3:
        text = text.rstrip("\n")
    return text.replace("\n", "\r\n") if draw.random() < 0.3 else text


def _drawn_template(draw: random.Random, name: str) -> str:
    body, metadata, field = (draw.choice(parts[1:-1].split("\n~\n")) for parts in (BODIES, METADATA, FIELDS))
    if "inputs.parameters" in body and "inputs:" not in field:
        field += "\ninputs: {parameters: [{name: who, value: 'w{{workflow.parameters.who}}'}]}"
    body = body.replace("&image", f"&image-{name}").replace("*image", f"*image-{name}")
    parts = [f"name: {draw.choice([name, repr(name)])}", metadata.lstrip("~\n"), body, field.lstrip("~\n")]
    draw.shuffle(parts)
    lines = "\n".join(filter(None, parts)).split("\n")
    indent = draw.choice(["    ", "      "])
    return f"  -{indent[3:]}" + f"\n{indent}".join(lines) + "\n"


def _drawn_entry(draw: random.Random, names: list[str]) -> str:
    called = {name: draw.choice(names) if draw.random() < 0.3 else name for name in names}
    if draw.random() < 0.5:
        groups = "".join(f"    - - {{name: {name}, template: {called[name]}}}\n" for name in names)
        return f"  - name: Main\n    steps:\n{groups}"
    tasks = "".join(
        f"      - name: {name}\n        template: {called[name]}\n"
        + (f"        depends: {draw.choice(names[:index])}.Succeeded\n" if index else "        when: \"'a' == a\"\n")
        for index, name in enumerate(names)
    )
    return f"  - name: Main\n    dag:\n      tasks:\n{tasks}"


PLANTED = {
    "an argument": ("echo hello", "echo bye"),
    "a number as text": ("cpu: 1", "cpu: '1'"),
    "a variable": ("value: fast", "value: slow"),
    "retries": ("retryStrategy: {}", "retryStrategy:"),
    "an output": ("path: /tmp/made", "path: /tmp/other"),
    "an input": ("raw: {data: x}", "raw: {data: y}"),
    "a condition": ('when: "a == a"', 'when: "a == b"'),
    "an edge": ("dependencies: [first]", "dependencies: []"),
    "a program that is no step": ("exit 0", "exit 1"),
    "an exit handler": ("onExit: inner", "onExit: nested"),
}
SAMPLE = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: planted-}
spec:
  entrypoint: main
  onExit: inner
  templates:
  - name: main
    dag:
      tasks:
      - {name: first, template: first, when: "a == a"}
      - {name: second, template: nested, dependencies: [first]}
  - name: first
    retryStrategy: {}
    inputs: {artifacts: [{name: raw, path: /tmp/raw, raw: {data: x}}]}
    outputs: {parameters: [{name: made, valueFrom: {path: /tmp/made}}]}
    container:
      image: busybox
      command: [sh, -c, echo hello]
      env: [{name: MODE, value: fast}]
      resources: {limits: {cpu: 1}}
  - {name: nested, steps: [[{name: inner, template: inner}]]}
  - {name: inner, container: {image: busybox, command: [sh, -c, exit 0]}}
"""


@pytest.mark.parametrize("planted", PLANTED)
def test_the_comparison_sees_a_change(planted: str, tmp_path: Path) -> None:
    before, after = PLANTED[planted]
    assert before in SAMPLE
    adoption, text = _adopt(SAMPLE, tmp_path)
    changed = text.replace(before, after)
    assert marked_differences(SAMPLE, text) == []
    assert marked_differences(SAMPLE, changed) != []

    def compiled(source: str) -> list[str]:
        path = tmp_path / "marked.yaml"
        path.write_text(source)
        [document] = read_argo_documents(path)
        return compiled_differences(adoption, YamlPipeline(document).workflow(store=STORE))

    assert compiled(text) == []
    assert compiled(changed) != []


def test_the_comparison_of_texts_sees_a_mark_elsewhere_and_one_that_took_the_place_of_an_annotation(
    tmp_path: Path,
) -> None:
    _, text = _adopt(SAMPLE, tmp_path)
    document = yaml.safe_load(text)
    for change in _misplaced_marks(document):
        assert marked_differences(SAMPLE, yaml.safe_dump(change)) != []


def _misplaced_marks(document: dict) -> Iterator[dict]:
    for metadata in (
        {"annotations": {"tiphys.dev/adopt": "x"}},
        {"annotations": {"tiphys.dev/adopt": "step", "a": "b"}},
    ):
        changed = copy.deepcopy(document)
        changed["spec"]["templates"][1]["metadata"] = metadata
        yield changed


def _adopt(text: str, folder: Path) -> tuple[Adoption, str]:
    path = folder / "sample.yaml"
    path.write_text(text)
    [document] = read_argo_documents(path)
    adoption = propose_adoption(document)
    return adoption, write_marks([document], [adoption.marks])
