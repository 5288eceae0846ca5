"""On Argo an adopted Workflow does what it did before, and an unchanged image keeps its checkpoints."""

import re
from pathlib import Path

import yaml

from hera_pipelines.authoring.adoption import YamlPipeline, propose_adoption, read_argo_documents
from hera_pipelines.authoring.adoption.documents import write_marks
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import EXECUTOR_ACCOUNT
from tiphys.records import AttemptEndOutcome

from .world import WORKFLOW_ACCOUNT, World

BEFORE = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  generateName: adopted-
spec:
  serviceAccountName: ACCOUNT
  executor: {serviceAccountName: EXECUTOR}   # the account of the programs has no token
  entrypoint: main
  onExit: goodbye
  arguments:
    parameters: [{name: who, value: world}]
  templates:
  - name: main
    inputs:
      parameters: [{name: who}]
    steps:
    - - name: MakeIt
        template: make
        arguments: {parameters: [{name: who, value: "{{inputs.parameters.who}}"}]}
      - {name: flip, template: flip}
    - - name: read
        template: read
        arguments:
          parameters:
          - {name: number, value: "{{item}}"}
          - {name: who, value: "{{steps.MakeIt.outputs.parameters.upper}}"}
          artifacts: [{name: greeting, from: "{{steps.MakeIt.outputs.artifacts.greeting}}"}]
        withItems: [1, 2]
      - name: heads
        template: say
        arguments: {parameters: [{name: text, value: heads}]}
        when: "{{steps.flip.outputs.result}} == heads"
      - name: tails
        template: say
        arguments: {parameters: [{name: text, value: tails}]}
        when: "{{steps.flip.outputs.result}} == tails"
      - name: within
        inline:
          script:
            image: IMAGE
            command: [python]
            source: print("SAYS inline")
      - name: fails
        template: fail
        continueOn: {failed: true}
    - - name: nested
        template: nested
  - name: make
    inputs:
      parameters: [{name: who}]
    container:
      image: IMAGE
      command: [python, -c]
      args:
      - |
        open("/tmp/greeting", "w").write("hello {{inputs.parameters.who}}")
        open("/tmp/upper", "w").write("{{inputs.parameters.who}}".upper())
        print("SAYS made")
    outputs:
      parameters: [{name: upper, valueFrom: {path: /tmp/upper}}]
      artifacts: [{name: greeting, path: /tmp/greeting}]
  - name: flip
    script:
      image: IMAGE
      command: [python]
      source: print("heads")
  - name: read
    inputs:
      parameters: [{name: number}, {name: who}]
      artifacts: [{name: greeting, path: /tmp/greeting}]
    container:
      image: IMAGE
      command: [python, -c]
      args: ["print('SAYS', open('/tmp/greeting').read(), '{{inputs.parameters.who}} {{inputs.parameters.number}}')"]
  - name: say
    inputs:
      parameters: [{name: text}]
    container:
      image: IMAGE
      command: [python, -c]
      args: ["print('SAYS {{inputs.parameters.text}}')"]
  - name: fail
    container:
      image: IMAGE
      command: [python, -c, "print('SAYS failing'); raise SystemExit(3)"]
  - name: nested
    dag:
      tasks:
      - name: inner
        template: say
        arguments: {parameters: [{name: text, value: inner}]}
  - name: goodbye
    container:
      image: IMAGE
      command: [python, -c, "print('SAYS goodbye {{workflow.status}}')"]
"""
TRAIN = """\
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata:
  generateName: unchanged-
spec:
  serviceAccountName: ACCOUNT
  executor: {serviceAccountName: EXECUTOR}   # the account of the programs has no token
  entrypoint: fit
  templates:
  - name: fit
    metadata:
      annotations:
        tiphys.dev/adopt: train
        tiphys.dev/checkpoint-folder: /tmp/ckpt
        tiphys.dev/runtime-image: IMAGE
    retryStrategy: {limit: 1}
    container:
      image: IMAGE
      command: [python, -I, -c]
      args:
      - |
        import pathlib, sys, time
        assert not any("tiphys-runtime" in path for path in sys.path)
        state = pathlib.Path("/tmp/ckpt/state")
        if state.exists():
            print("goes on from", state.read_text())
            pathlib.Path("/tmp/model").write_text(state.read_text())
        else:
            state.write_text("step 7")
            time.sleep(20)  # so long is a folder quiet that is committed
            sys.exit(3)
    outputs:
      artifacts: [{name: model, path: /tmp/model}]
"""


def said(world: World, name: str) -> list[str]:
    """What the programs of a Workflow printed, sorted."""
    return sorted(re.findall(r"^\S+: SAYS (.*)$", world.argo("logs", name, "--no-color"), re.MULTILINE))


def adopted(world: World, text: str, folder: Path) -> Manifest:
    path = folder / "workflow.yaml"
    path.write_text(text)
    documents = read_argo_documents(path)
    path.write_text(write_marks(documents, [propose_adoption(document).marks for document in documents]))
    [document] = read_argo_documents(path)
    return YamlPipeline(document).compile(store=world.settings.store)


def test_programs_do_what_they_did(world: World, tmp_path: Path) -> None:
    text = (
        BEFORE.replace("IMAGE", world.settings.image)
        .replace("ACCOUNT", WORKFLOW_ACCOUNT)
        .replace("EXECUTOR", EXECUTOR_ACCOUNT)
    )
    before = world.submit(yaml.safe_load(text))
    before.wait()
    after = world.submit(adopted(world, text, tmp_path))
    after.wait()
    assert said(world, after.name) == said(world, before.name)
    assert "hello world WORLD 2" in said(world, after.name)
    for step in ("makeit", "flip", "heads", "within"):
        assert [attempt.end and attempt.end.outcome for attempt in after.attempts(step)] == [AttemptEndOutcome.DONE]
    assert after.phases("fail") == before.phases("fail") == ["Failed"]


def test_an_unchanged_image_goes_on_from_its_checkpoint(world: World, tmp_path: Path) -> None:
    text = (
        TRAIN.replace("IMAGE", world.settings.image)
        .replace("ACCOUNT", WORKFLOW_ACCOUNT)
        .replace("EXECUTOR", EXECUTOR_ACCOUNT)
    )
    workflow = world.submit(adopted(world, text, tmp_path))
    workflow.wait()
    first, second = workflow.attempts("fit")
    assert (first.end and first.end.outcome, second.end and second.end.outcome) == (
        AttemptEndOutcome.FAILED,
        AttemptEndOutcome.DONE,
    )
    assert second.claim.starts_from is not None
    [model] = [output for output in (second.end.outputs if second.end else ()) if output.name == "model"]
    assert world.store.read(model.key) == b"step 7"
