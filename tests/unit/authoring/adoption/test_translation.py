"""A marked Workflow becomes one that compile takes, and Argo does the same with the author's programs.

| part | becomes |
|---|---|
| entry point of steps | a DAG: each task waits for all of the group before, references follow |
| entry point that is a container | a DAG of one task with the inputs of the entry point |
| names of tasks that cannot name results | small ones, also where they are referred to |
| a template that several tasks call | the program of all of them, where they have no gate; else a copy for each |
| a template that others use, too | a copy for the steps |
| a template with a name that compile needs for a gated step | another name |
| defaults of all templates, patches of all pods | those of the author's templates |
| `{{steps.name}}`, `{{tasks.name}}` | the name as it was, where Argo would now give another |
| what has no counterpart | refused, with what to do |
"""

import json
import re
from typing import Any

import pytest
import yaml

from hera_pipelines.authoring.adoption.marks import ADOPT
from hera_pipelines.authoring.adoption.translation import translate_workflow
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, find_template
from tiphys.protocol.step_spec import StepKind

STORE = CompileOptions(store="s3://ml-runs/tiphys")
ECHO = {"container": {"image": "busybox", "command": ["echo"]}}


def marked(name: str, kind: str = "step", **annotations: str) -> Manifest:
    texts = {ADOPT: kind, **{f"tiphys.dev/{key.replace('_', '-')}": value for key, value in annotations.items()}}
    return {"name": name, "metadata": {"annotations": texts}, **ECHO}


def workflow(*templates: Manifest, entrypoint: str = "main", **spec: Any) -> Manifest:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "old-"},
        "spec": {"entrypoint": entrypoint, "templates": list(templates), **spec},
    }


def entry_of(manifest: Manifest) -> Manifest:
    found: Manifest = find_template(manifest, manifest["spec"]["entrypoint"])
    return found


def steps_of(manifest: Manifest) -> dict[str, Any]:
    return dict(CompiledPipeline.from_manifest(compile_workflow(translate_workflow(manifest), STORE)).steps)


def test_groups_of_steps_wait_for_all_of_the_group_before() -> None:
    text = """
    - - {name: make, template: echo}
    - - {name: left, template: echo, when: "{{steps.make.outputs.parameters.way}} == left"}
      - {name: right, template: echo, withParam: "{{steps.make.outputs.parameters.list}}"}
    - - name: last
        template: echo
        arguments: {parameters: [{name: x, value: "{{= steps['left'].outputs.parameters.y ?? '' }}, not steps.left"}]}
    """
    entry = entry_of(translate_workflow(workflow({"name": "main", "steps": yaml.safe_load(text)}, marked("echo"))))
    assert "steps" not in entry
    assert entry["dag"]["failFast"] is False
    tasks = {task["name"]: task for task in entry["dag"]["tasks"]}
    assert {name: task.get("dependencies") for name, task in tasks.items()} == {
        "make": None,
        "left": ["make"],
        "right": ["make"],
        "last": ["left", "right"],
    }
    assert tasks["left"]["when"] == "{{tasks.make.outputs.parameters.way}} == left"
    assert tasks["right"]["withParam"] == "{{tasks.make.outputs.parameters.list}}"
    [argument] = tasks["last"]["arguments"]["parameters"]
    assert argument["value"] == "{{= tasks['left'].outputs.parameters.y ?? '' }}, not steps.left"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{=jsonpath(workflow.parameters.c, '$.steps.a-b')}}", None),
        ("""{{=toJson({"steps": "steps['a-b']", 'n': "it's steps.a-b"})}}""", None),
        ("{{=`steps.one` /* steps.one */ + inputs.parameters.steps.one}}", None),
        ("{{inputs.parameters.steps.größe}} {{item.steps.one}} steps.one", None),
        ("{{=item.steps.one + item['steps'].one}}", None),
        ("{{=steps.one.id + '$.steps.one'}}", "{{=tasks.one.id + '$.steps.one'}}"),
        ('{{=steps [ "a-b" ] . id}}{{ steps.a-b.id }}', '{{=tasks [ "a-b" ] . id}}{{ tasks.a-b.id }}'),
        ("{{=filter(keys(steps), {# != 'steps'})}}", "{{=filter(keys(tasks), {# != 'steps'})}}"),
    ],
)
def test_only_the_variable_steps_becomes_that_of_a_dag(text: str, expected: str | None) -> None:
    last = {"name": "last", "template": "echo", "arguments": {"parameters": [{"name": "x", "value": text}]}}
    steps = [[{"name": "one", "template": "echo"}, {"name": "a-b", "template": "echo"}], [last]]
    entry = entry_of(translate_workflow(workflow({"name": "main", "steps": steps}, marked("echo"))))
    assert entry["dag"]["tasks"][2]["arguments"]["parameters"][0]["value"] == (expected or text)


def test_outputs_of_an_entry_point_of_steps_follow() -> None:
    outputs = {
        "parameters": [{"name": "a", "valueFrom": {"parameter": "{{steps.one.outputs.parameters.a}}"}}],
        "artifacts": [{"name": "b", "fromExpression": "steps.one.outputs.artifacts.b"}],
    }
    main = {"name": "main", "steps": [[{"name": "one", "template": "echo"}]], "outputs": outputs}
    entry = entry_of(translate_workflow(workflow(main, marked("echo"))))
    assert entry["outputs"]["parameters"][0]["valueFrom"] == {"parameter": "{{tasks.one.outputs.parameters.a}}"}
    assert entry["outputs"]["artifacts"][0]["fromExpression"] == "tasks.one.outputs.artifacts.b"


def test_a_single_container_becomes_the_task_of_a_dag_with_its_inputs() -> None:
    only = marked("say")
    only["inputs"] = {
        "parameters": [{"name": "words", "value": "hello"}],
        "artifacts": [{"name": "data", "path": "/data"}, {"name": "code", "path": "/code", "http": {"url": "u"}}],
    }
    arguments = {"parameters": [{"name": "words", "value": "x"}], "artifacts": [{"name": "data", "s3": {"key": "k"}}]}
    translated = translate_workflow(workflow(only, entrypoint="say", arguments=arguments))
    entry = entry_of(translated)
    assert entry["inputs"] == {"parameters": [{"name": "words", "value": "hello"}], "artifacts": [{"name": "data"}]}
    [task] = entry["dag"]["tasks"]
    assert task["arguments"] == {
        "parameters": [{"name": "words", "value": "{{inputs.parameters.words}}"}],
        "artifacts": [{"name": "data", "from": "{{inputs.artifacts.data}}"}],
    }
    assert list(steps_of(workflow(only, entrypoint="say", arguments=arguments))) == ["say"]


def test_names_that_cannot_name_results_become_small_wherever_they_are_used() -> None:
    text = """
    - {name: A, template: echo}
    - {name: a, template: echo}
    - {name: Make_All, depends: "A && a.Succeeded", template: echo}
    - name: last
      depends: (Make_All || A.Failed) && !Make_All.Skipped
      template: echo
      arguments: {parameters: [{name: x, value: "{{tasks.Make_All.outputs.parameters.x}} {{=tasks['A'].status}} A"}]}
    """
    dag = {"tasks": yaml.safe_load(text), "target": "last Make_All"}
    entry = entry_of(translate_workflow(workflow({"name": "main", "dag": dag}, marked("echo"))))
    assert [task["name"] for task in entry["dag"]["tasks"]] == ["a-x", "a", "make-all", "last"]
    last = entry["dag"]["tasks"][3]
    assert entry["dag"]["tasks"][2]["depends"] == "a-x && a.Succeeded"
    assert last["depends"] == "(make-all || a-x.Failed) && !make-all.Skipped"
    assert last["arguments"]["parameters"][0]["value"] == (
        "{{tasks.make-all.outputs.parameters.x}} {{=tasks['a-x'].status}} A"
    )
    assert entry["dag"]["target"] == "last make-all"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{=tasks.Make_All.id + tasks?.A.id}}", "{{=tasks['make-all'].id + tasks?.a.id}}"),
        ("{{=f(tasks[`A`].id, '$.tasks.A')}}", "{{=f(tasks[`a`].id, '$.tasks.A')}}"),
        ("{{item.tasks.A}} {{=item.tasks.A + 'tasks.A'}}", "{{item.tasks.A}} {{=item.tasks.A + 'tasks.A'}}"),
    ],
)
def test_a_new_name_is_written_so_that_the_expression_means_the_same(text: str, expected: str) -> None:
    tasks = [{"name": "A", "template": "echo"}, {"name": "Make_All", "template": "echo"}]
    last = {"name": "last", "template": "echo", "arguments": {"parameters": [{"name": "x", "value": text}]}}
    entry = entry_of(translate_workflow(workflow({"name": "main", "dag": {"tasks": [*tasks, last]}}, marked("echo"))))
    assert entry["dag"]["tasks"][2]["arguments"]["parameters"][0]["value"] == expected


def test_a_task_that_an_expression_chooses_cannot_have_another_name() -> None:
    chosen = {"parameters": [{"name": "x", "value": "{{=tasks[inputs.parameters.which].id}}"}]}
    tasks = [{"name": "Größe", "template": "echo"}, {"name": "last", "template": "echo", "arguments": chosen}]
    with pytest.raises(UsageError, match=r"an expression chooses a task, .* write 'Größe' small"):
        translate_workflow(workflow({"name": "main", "dag": {"tasks": tasks}}, marked("echo")))


def test_a_template_that_an_exit_handler_uses_stays_beside_its_step() -> None:
    main = {"name": "main", "dag": {"tasks": [{"name": "echo", "template": "echo", "onExit": "echo"}]}}
    manifest = workflow(
        main, marked("echo"), onExit="echo", hooks={"running": {"template": "echo", "expression": "true"}}
    )
    compiled = compile_workflow(translate_workflow(manifest), STORE)
    names = [template["name"] for template in compiled["spec"]["templates"]]
    assert len(names) == len(set(names))
    assert find_template(compiled, "echo") == {"name": "echo", **ECHO}
    [task] = entry_of(compiled)["dag"]["tasks"]
    assert (task["template"], task["onExit"]) == ("echo-program", "echo")
    assert compiled["spec"]["hooks"]["running"]["template"] == "echo"
    assert find_template(compiled, "tiphys-exit")["dag"]["tasks"][0]["template"] == "echo"
    assert list(CompiledPipeline.from_manifest(compiled).steps) == ["echo"]


@pytest.mark.parametrize(
    "other",
    [
        {"name": "nested", "steps": [[{"name": "inner", "template": "echo"}]]},
        {"name": "nested", "dag": {"tasks": [{"name": "inner", "template": "echo"}]}},
        {
            "name": "nested",
            "dag": {"tasks": [{"name": "inner", "template": "x", "hooks": {"a": {"template": "echo"}}}]},
        },
    ],
    ids=["steps", "dag", "hook"],
)
def test_steps_share_one_copy_of_a_template_that_others_use_too(other: Manifest) -> None:
    tasks = [{"name": name, "template": "echo"} for name in ("one", "two")]
    main = {"name": "main", "dag": {"tasks": [*tasks, {"name": "three", "template": "nested"}]}}
    translated = translate_workflow(workflow(main, marked("echo"), other))
    assert [task["template"] for task in entry_of(translated)["dag"]["tasks"]] == ["echo-program"] * 2 + ["nested"]
    assert find_template(translated, "echo") == {"name": "echo", **ECHO}
    assert find_template(translated, "nested") == other
    assert list(steps_of(workflow(main, marked("echo"), other))) == ["one", "two"]


def test_tasks_without_a_gate_share_the_template_of_the_author() -> None:
    tasks = [{"name": f"t-{number}", "template": "echo"} for number in range(100)]
    manifest = workflow({"name": "main", "dag": {"tasks": tasks}}, marked("echo"))
    translated = translate_workflow(manifest)
    assert [template["name"] for template in translated["spec"]["templates"]] == ["main", "echo"]
    assert entry_of(translated)["dag"]["tasks"] == tasks
    assert list(steps_of(manifest)) == [task["name"] for task in tasks]


def test_trainings_have_programs_of_their_own() -> None:
    fit = marked("fit", "train", checkpoint_every="none")
    fit["container"] = {"image": "old", "command": ["python", "train.py"]}
    tasks = [{"name": name, "template": "fit"} for name in ("one", "two")]
    translated = translate_workflow(workflow({"name": "main", "dag": {"tasks": tasks}}, fit))
    assert [task["template"] for task in entry_of(translated)["dag"]["tasks"]] == ["one-program", "two-program"]
    assert [template["name"] for template in translated["spec"]["templates"]] == ["main", "one-program", "two-program"]


@pytest.mark.parametrize("kind", ["step", "plain"])
def test_a_template_makes_way_for_those_of_a_gated_step(kind: str) -> None:
    fit = marked("train", "train", checkpoint_every="none")
    fit["container"] = {"image": "old", "command": ["python", "train.py"]}
    tasks = [{"name": "fit", "template": "train"}, {"name": "other", "template": "fit-run", "onExit": "fit"}]
    manifest = workflow(
        {"name": "main", "dag": {"tasks": tasks}}, fit, marked("fit-run", kind), {"name": "fit", **ECHO}, onExit="fit"
    )
    compiled = compile_workflow(translate_workflow(manifest), STORE)
    first, second = entry_of(compiled)["dag"]["tasks"]
    assert (first["template"], second["template"], second["onExit"]) == ("fit", "fit-run-template", "fit-template")
    assert find_template(compiled, "fit-run-template")["container"]["command"] == ["echo"]
    assert find_template(compiled, "fit-template") == {"name": "fit-template", **ECHO}
    steps = CompiledPipeline.from_manifest(compiled).steps
    assert list(steps) == (["fit", "other"] if kind == "step" else ["fit"])


def test_an_inline_container_becomes_a_step() -> None:
    inline = {key: value for key, value in marked("x").items() if key != "name"}
    manifest = workflow({"name": "main", "dag": {"tasks": [{"name": "one", "inline": inline}]}})
    assert list(steps_of(manifest)) == ["one"]
    translated = translate_workflow(manifest)
    assert entry_of(translated)["dag"]["tasks"] == [{"name": "one", "template": "one-program"}]


def test_adopted_training_keeps_checkpoints_unless_it_is_marked_with_none() -> None:
    def checkpoints_of(**annotations: str) -> Any:
        fit = marked("fit", "train", **annotations)
        fit["container"] = {"image": "old", "command": ["python", "train.py"]}
        return steps_of(workflow({"name": "main", "dag": {"tasks": [{"name": "fit", "template": "fit"}]}}, fit))[
            "fit"
        ].checkpoints

    assert (checkpoints_of().every, checkpoints_of().keep_last) == (600, 3)
    assert checkpoints_of(checkpoint_every="5 steps").every_unit == "steps"
    assert checkpoints_of(checkpoint_every="none") is None
    with pytest.raises(UsageError, match=r"checkpoint-every is 'none', and tiphys.dev/checkpoint-folder names"):
        checkpoints_of(checkpoint_every="none", checkpoint_folder="/ckpt")


def test_a_training_takes_its_gpus_retries_and_checkpoints_from_the_template() -> None:
    fit = marked("fit", "train", queue="research", gpu_type="A100,H100", checkpoint_folder="/ckpt", grace="2m")
    fit["metadata"]["annotations"] |= {"tiphys.dev/checkpoint-every": "5m", "tiphys.dev/checkpoint-marker": "*/DONE"}
    fit["metadata"]["annotations"]["tiphys.dev/gpu-speed"] = "H100=2.5, A100=1"
    fit["container"] = {
        "image": "old",
        "command": ["python", "train.py"],
        "args": ["--out", "/ckpt"],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    }
    fit["retryStrategy"] = {"limit": "4", "retryPolicy": "Always"}
    manifest = workflow({"name": "main", "dag": {"tasks": [{"name": "fit", "template": "fit"}]}}, fit)
    spec = steps_of(manifest)["fit"]
    assert spec.kind is StepKind.TRAIN
    assert (spec.gpu.gpus, spec.gpu.gpu_types, spec.gpu.queue) == (2, ("A100", "H100"), "research")
    assert (spec.gpu.speed, spec.gpu.gpu_types_by_speed) == ({"H100": 2.5, "A100": 1}, ("H100", "A100"))
    assert (spec.retry.user_error, spec.retry.unknown, spec.grace_seconds) == (4, 4, 120)
    assert spec.checkpoints.every == 300
    run = find_template(compile_workflow(translate_workflow(manifest), STORE), "fit-run")
    assert run["container"]["command"] == [
        "tiphys-exec",
        "--dir",
        "/ckpt",
        "--marker",
        "*/DONE",
        "--",
        "python",
        "train.py",
    ]
    assert run["container"]["args"] == ["--out", "/ckpt"]
    assert run["container"]["resources"]["limits"]["nvidia.com/gpu"] in (2, "2")


def test_an_init_container_brings_what_an_image_lacks() -> None:
    fit = marked("fit", "train", checkpoint_folder="/ckpt", runtime_image="trainer:1")
    fit["container"] = {"image": "old", "command": ["train"], "volumeMounts": [{"name": "d", "mountPath": "/d"}]}
    fit["initContainers"] = [{"name": "own", "image": "own", "command": ["true"]}]
    manifest = workflow({"name": "main", "dag": {"tasks": [{"name": "fit", "template": "fit"}]}}, fit)
    run = find_template(compile_workflow(translate_workflow(manifest), STORE), "fit-run")
    first, own = run["initContainers"]
    assert (first["image"], own["name"]) == ("trainer:1", "own")
    [mount] = first["volumeMounts"]
    assert mount in [{k: v for k, v in one.items() if k != "readOnly"} for one in run["container"]["volumeMounts"]]
    assert {"name": mount["name"], "emptyDir": {}} in run["volumes"]
    loader, *_ = command = run["container"]["command"]
    assert loader.startswith(mount["mountPath"])
    assert command[-4:] == ["--dir", "/ckpt", "--", "train"]


def test_a_step_keeps_its_retries_and_programs_keep_the_token_of_their_account() -> None:
    step = {**marked("echo"), "retryStrategy": {"limit": 3}}
    compiled = compile_workflow(
        translate_workflow(workflow({"name": "main", "dag": {"tasks": [{"name": "one", "template": "echo"}]}}, step)),
        STORE,
    )
    assert find_template(compiled, "echo")["retryStrategy"] == {"limit": 3}
    assert compiled["spec"]["automountServiceAccountToken"] is True


def test_template_defaults_move_to_the_templates_of_the_author() -> None:
    own = {**marked("own"), "timeout": "1m"}
    main = {"name": "main", "dag": {"tasks": [{"name": "one", "template": "echo"}, {"name": "two", "template": "own"}]}}
    manifest = workflow(
        *(main, marked("echo"), own),
        templateDefaults={"timeout": "30s", "nodeSelector": {"pool": "cpu"}},
        podSpecPatch='{"priority": 1}',
    )
    compiled = compile_workflow(translate_workflow(manifest), STORE)
    assert compiled["spec"]["templateDefaults"] == {"nodeSelector": {"pool": "cpu"}}
    assert "podSpecPatch" not in compiled["spec"]
    one, two = (find_template(compiled, name) for name in ("echo", "own"))
    assert (one["timeout"], two["timeout"]) == ("30s", "1m")
    assert one["podSpecPatch"] == '{"priority": 1}'


SAYS_NAME = {
    "script": {"image": "x", "source": "echo {{ steps.name }} {{=steps.name + '!'}} {{steps.one.id}} {{tasks.name}}"}
}


def test_the_name_of_a_task_is_written_where_argo_would_give_another() -> None:
    says = {"parameters": [{"name": "me", "value": "{{steps.name}}"}]}
    translated = translate_workflow(
        workflow(
            {
                "name": "main",
                "steps": [
                    [{"name": "One", "template": "say", "arguments": says}],
                    [{"name": "two", "template": "plain", "arguments": says}, {"name": "three", "template": "other"}],
                ],
            },
            {**marked("say"), "script": SAYS_NAME["script"]},
            {"name": "plain", **SAYS_NAME},
            {"name": "other", **ECHO},
        )
    )
    one, two, three = entry_of(translated)["dag"]["tasks"]
    assert [task["arguments"]["parameters"][0]["value"] for task in (one, two)] == ["One", "two"]
    sources = [find_template(translated, task["template"])["script"]["source"] for task in (one, two)]
    assert sources == [
        f"echo {name} {{{{='{name}' + '!'}}}} {{{{steps.one.id}}}} {{{{tasks.name}}}}" for name in ("One", "two")
    ]
    assert find_template(translated, "plain")["script"] == SAYS_NAME["script"]
    assert three["template"] == "other"


def test_the_name_of_a_task_of_a_dag_stays_a_variable_unless_its_program_becomes_a_step() -> None:
    tasks = [{"name": "one", "template": "step"}, {"name": "two", "template": "plain"}]
    source = {"script": {"image": "x", "source": "echo {{tasks.name}}"}}
    manifest = workflow(
        {"name": "main", "dag": {"tasks": tasks}}, {**marked("step"), **source}, {"name": "plain", **source}
    )
    translated = translate_workflow(manifest)
    one, two = entry_of(translated)["dag"]["tasks"]
    assert find_template(translated, one["template"])["script"]["source"] == "echo one"
    assert (two["template"], find_template(translated, "plain")["script"]) == ("plain", source["script"])


MAIN: Manifest = {"name": "main", "dag": {"tasks": [{"name": "one", "template": "echo"}]}}
WITH_VOLUME = {
    **marked("echo"),
    "container": {**ECHO["container"], "volumeMounts": [{"name": "work", "mountPath": "/w"}]},
}
CLAIMS = [{"metadata": {"name": "work"}, "spec": {}}]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (workflow(MAIN, marked("echo"), entrypoint=""), "has no entrypoint"),
        (workflow(MAIN, marked("echo"), entrypoint="absent"), "'absent' is no template"),
        (workflow(MAIN, marked("echo"), marked("echo")), "two of its templates are called 'echo'"),
        (workflow(workflowTemplateRef={"name": "other"}), "those of WorkflowTemplate 'other'"),
        (workflow(MAIN, marked("echo"), artifactGC={"strategy": "OnWorkflowDeletion"}), "deletes outputs"),
        (workflow({**MAIN, "retryStrategy": {"limit": 1}}, marked("echo")), "entry point 'main' has a retryStrategy"),
        (workflow(MAIN, marked("echo"), templateDefaults={"retryStrategy": {}}), "templateDefaults has retryStrategy"),
        (
            workflow(MAIN, {**marked("echo"), "podSpecPatch": "a"}, podSpecPatch="b"),
            "both have a podSpecPatch",
        ),
        (
            workflow(
                MAIN, {**marked("echo"), "securityContext": {}, "metrics": {"a": 1}}, templateDefaults={"metrics": {}}
            ),
            "templateDefaults has metrics",
        ),
        (
            workflow(MAIN, {**marked("echo"), "volumes": [], "dns": {"a": 1}}, templateDefaults={"dns": {"b": 1}}),
            "Argo merges the two",
        ),
        (
            workflow({"name": "main", "suspend": {}}),
            "is suspend, of which no step can be made; call it from an entry point of steps or a DAG",
        ),
        (
            workflow(
                {"name": "main", "steps": [[{"name": "one", "template": "echo", "withItems": [1]}]]},
                {**marked("echo"), "script": {"image": "x", "source": "{{steps.name}}"}},
            ),
            "{{steps.name}} of an item has no counterpart",
        ),
        (
            workflow({"name": "main", "steps": [[{"name": "one", "inline": {**marked("x"), **SAYS_NAME}}]]}),
            "{{steps.name}} of a template within a task is empty in Argo",
        ),
        (
            workflow(
                {"name": "main", "dag": {"tasks": [{"name": "A", "template": "e"}], "target": "{{workflow.name}}"}}
            ),
            "a parameter chooses its targets",
        ),
        (
            workflow(
                MAIN, {**marked("echo"), "outputs": {"artifacts": [{"name": "o", "artifactGC": {"strategy": "x"}}]}}
            ),
            "would delete its output 'o'",
        ),
        (workflow(MAIN, marked("echo", "stepp")), "did you mean 'step'"),
        (workflow(MAIN, marked("echo", "step", gpus="1")), "tiphys.dev/gpus is for a training"),
        (workflow(MAIN, marked("echo", "train", gpus="many")), "write a whole number in quotes"),
        (
            workflow(MAIN, marked("echo", "train", gpus="1", gpu_type="A100,H100", gpu_speed="H100")),
            "annotation tiphys.dev/gpu-speed is 'H100'; write types and numbers",
        ),
        (
            workflow(MAIN, marked("echo", "train", gpus="1", gpu_type="A100,H100", gpu_speed="H100=nan")),
            "speed.H100 cannot be nan",
        ),
        (workflow(MAIN, marked("echo", "step", gpu_speed="H100=2")), "tiphys.dev/gpu-speed is for a training"),
        (workflow(MAIN, {**marked("echo", "train"), "retryStrategy": {"expression": "x"}}), "no counterpart"),
        (workflow(MAIN, {**marked("echo", "train"), "retryStrategy": {}}), "without a fixed limit"),
        (
            workflow(MAIN, {**marked("echo", "train", checkpoint_folder="/c"), "container": {"image": "x"}}),
            "write the entry point of its image as command",
        ),
    ],
)
def test_an_argo_feature_without_counterpart_is_refused(manifest: Manifest, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        translate_workflow(manifest)


def test_a_step_on_a_volume_of_the_workflow_runs_in_each_submission() -> None:
    assert steps_of(workflow(MAIN, WITH_VOLUME, volumeClaimTemplates=CLAIMS))["one"].cache is False
    assert steps_of(workflow(MAIN, WITH_VOLUME, volumes=[{"name": "work", "emptyDir": {}}]))["one"].cache is True


def test_a_marked_template_that_is_no_container_is_refused() -> None:
    inner = {**marked("echo"), "dag": {"tasks": []}}
    del inner["container"]
    with pytest.raises(UsageError, match="is no container"):
        translate_workflow(workflow(MAIN, inner))


def test_the_workflow_given_is_not_changed() -> None:
    manifest = workflow({"name": "main", "steps": [[{"name": "A", "template": "echo"}]]}, marked("echo"))
    before = json.dumps(manifest, sort_keys=True)
    translate_workflow(manifest)
    assert json.dumps(manifest, sort_keys=True) == before
