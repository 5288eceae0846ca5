"""Pipelines as Hera's tutorials write them: with the import and the decorator changed, they run here or are refused.

What is refused is refused by name and with its remedy. The expected outputs are those that Hera's own Workflow gives.
"""

from pathlib import Path

import pytest

from hera_pipelines import load_pipeline
from hera_pipelines.authoring.loading import AnyPipeline
from tiphys.errors import UsageError

from .conftest import invoke

IMPORTS = """\
from pathlib import Path
from typing import Annotated

from hera.shared import global_config
from hera.workflows import (
    DAG, Artifact, Container, Env, ExistingVolume, Parameter, Resources, RetryStrategy, SecretEnv, Steps, script,
)
from hera_pipelines import CronPipeline, Pipeline, Step, plain, step, train

global_config.image = "python:3.12"
"""
STARTS = {
    "hello world": """
@step()
def hello(s: str):
    print(f"Hello, {s}!")

with Pipeline(generate_name="hello-", arguments={"s": "world"}) as w:
    hello(s=w.get_parameter("s"))
""",
    "diamond": """
@step()
def echo(message):
    print(message)

with Pipeline(generate_name="diamond-", entrypoint="diamond") as w:
    with DAG(name="diamond"):
        a = echo(name="a", arguments={"message": "A"})
        b = echo(name="b", arguments={"message": "B"})
        c = echo(name="c", arguments={"message": "C"})
        d = echo(name="d", arguments={"message": "D"})
        a >> [b, c] >> d
""",
    "fan-out and fan-in": """
@step()
def generate() -> Annotated[list, Parameter(name="numbers")]:
    return list(range(3))

@step()
def double(number: int) -> Annotated[int, Parameter(name="value")]:
    return 2 * number

@step()
def total(values: list) -> Annotated[int, Parameter(name="sum")]:
    return sum(int(value) for value in values)

with Pipeline("fans") as w:
    numbers = generate()
    doubled = double(number="{{item}}", with_param=numbers.get_parameter("numbers"))
    total(values=doubled.get_parameter("value"))
""",
    "steps": """
@step()
def flip():
    print("heads")

@step()
def echo(m: str):
    print(m)

with Pipeline("steps", entrypoint="s") as w:
    with Steps(name="s") as s:
        f = flip()
        with s.parallel():
            echo(name="a", arguments={"m": f.result}, when=f"{f.result} == heads")
            echo(name="b", arguments={"m": "{{item}}"}, with_items=["x", "y"])
        echo(name="c", arguments={"m": "end"})
""",
    "a container as entry point": """
with Pipeline("one", entrypoint="say", arguments={"who": "you"}) as w:
    Step(
        name="say", image="alpine:3", command=["sh", "-c"], args=["echo hi {{inputs.parameters.who}}"],
        inputs=[Parameter(name="who")],
    )
""",
    "what a program prints": """
@step()
def flip():
    print("heads")

@plain()
def heads():
    print("it was heads")

with Pipeline("coin", entrypoint="d") as w:
    with DAG(name="d"):
        f = flip()
        h = heads()
        f >> h
        h.when = f"{f.result} == heads"
""",
    "artifacts": """
@step(outputs=[Artifact(name="text", path="/tmp/text")])
def write():
    with open("/tmp/text", "w") as file:
        file.write("hello")

@step(inputs=[Artifact(name="text", path="/tmp/read")])
def read():
    print(open("/tmp/read").read())

with Pipeline("files", entrypoint="d") as w:
    with DAG(name="d"):
        w_ = write()
        r = read(arguments=[w_.get_artifact("text").with_name("text")])
        w_ >> r
""",
    "annotated outputs": """
@step()
def split(text: Annotated[str, Parameter(name="text")] = "a b") -> tuple[
    Annotated[int, Parameter(name="count")], Annotated[Path, Artifact(name="words")]
]:
    Path("words").write_text(text)
    return len(text.split()), Path("words")

@step()
def show(count: int, words: Annotated[Path, Artifact(name="words")]):
    print(count, words.read_text())

with Pipeline("annotated") as w:
    made = split()
    show(count=made.get_parameter("count"), words=made.get_artifact("words"))
""",
    "containers with variables and resources": """
say = Step(
    name="say", image="alpine:3", command=["sh", "-c"], args=["echo $GREETING {{inputs.parameters.who}}"],
    inputs=[Parameter(name="who")], env=[Env(name="GREETING", value="hi")],
    resources=Resources(cpu_request=1, memory_limit="1Gi"), retry_strategy=RetryStrategy(limit=3),
)

with Pipeline("containers", entrypoint="d") as w:
    with DAG(name="d"):
        say(arguments={"who": "you"})
""",
    "exit handler": """
@plain()
def bye():
    print("bye {{workflow.status}}")

@step()
def hello():
    print("hello")

with Pipeline("exits", entrypoint="d") as w:
    with DAG(name="at-exit") as handler:
        bye()
    w.on_exit = handler
    with DAG(name="d"):
        hello()
""",
    "schedule": """
@step()
def hello():
    print("hello")

with CronPipeline(name="nightly", schedules=["0 2 * * *"], entrypoint="d") as w:
    with DAG(name="d"):
        hello()
""",
    "a volume and secrets": """
say = Step(
    name="say", image="alpine:3", command=["true"], env=[SecretEnv(name="KEY", secret_name="s", secret_key="k")],
    volumes=[ExistingVolume(name="data", claim_name="data", mount_path="/data")],
)
with Pipeline("volumes", entrypoint="d") as w:
    with DAG(name="d"):
        say()
""",
}
REFUSED = {
    "a plain container as entry point": (
        """
with Pipeline("one", entrypoint="cowsay") as w:
    Container(name="cowsay", image="cowsay", command=["cowsay"])
""",
        "no task of the entry DAG is a step of Tiphys; decorate one with @step() or @train()",
    ),
    "no step": (
        """
@script()
def echo():
    print(1)

with Pipeline("none", entrypoint="d") as w:
    with DAG(name="d"):
        echo()
""",
        "no task of the entry DAG is a step of Tiphys; decorate one with @step() or @train()",
    ),
    "capital letters": (
        """
@step()
def echo():
    print(1)

with Pipeline("capitals", entrypoint="d") as w:
    with DAG(name="d"):
        echo(name="A")
""",
        "task 'A' cannot name a step: its results are stored under it, so use lower-case letters",
    ),
    "a template called in the Workflow itself": (
        """
@step()
def hello(s: str):
    print(s)

with Pipeline(generate_name="hello-", entrypoint="hello", arguments={"s": "world"}) as w:
    hello()
""",
        "pipeline 'hello' calls tasks directly, which form its entry DAG, and names the entry point 'hello'",
    ),
    "a step as exit handler": (
        """
@step()
def hello():
    print(1)

with Pipeline("exits", entrypoint="d") as w:
    with DAG(name="at-exit") as handler:
        hello()
    w.on_exit = handler
    with DAG(name="d"):
        hello()
""",
        "only tasks of the entry DAG 'd' can be steps",
    ),
    "a function as exit handler": (
        """
@plain()
def bye():
    print(1)

@step()
def hello():
    print(1)

with Pipeline("exits", entrypoint="d") as w:
    w.on_exit = bye
    with DAG(name="d"):
        hello()
""",
        "pipeline 'exits': its on_exit is the function 'bye'; call it in `with DAG(name='at-exit') as handler:`",
    ),
    "a function as exit handler of a task": (
        """
@step()
def hello():
    print(1)

with Pipeline("exits", entrypoint="d") as w:
    with DAG(name="d"):
        hello().on_exit = hello
""",
        "task 'hello': its on_exit is the function 'hello'",
    ),
    "retries of the whole Workflow": (
        """
@step()
def hello():
    print(1)

with Pipeline("retries", retry_strategy=RetryStrategy(limit=1)) as w:
    hello()
""",
        "retryStrategy at workflow level also repeats the plugin's answers; use Retries(…) on the steps",
    ),
}


LOGS = {
    "hello world": {"hello": "Hello, world!"},
    "diamond": {"a": "A", "d": "D"},
    "fan-out and fan-in": {"total": ""},
    "steps": {"a": "heads", "b[1]": "y", "c": "end"},
    "a container as entry point": {"say": "hi you"},
    "what a program prints": {"flip": "heads"},
    "annotated outputs": {"show": "2 a b"},
    "containers with variables and resources": {"say": "hi you"},
    "exit handler": {"hello": "hello"},
}
"""What a step of a tutorial prints, when it runs here. The others need files of the container or a cluster."""


def load(folder: Path, text: str) -> AnyPipeline:
    path = folder / "pipeline.py"
    path.write_text(IMPORTS + text)
    return load_pipeline(path)


@pytest.mark.parametrize("name", STARTS)
def test_a_tutorial_compiles(name: str, tmp_path: Path) -> None:
    compiled = load(tmp_path, STARTS[name]).compile(store="s3://ml-runs/tiphys")
    assert compiled["kind"] == ("CronWorkflow" if name == "schedule" else "Workflow")


@pytest.mark.parametrize("name", REFUSED)
def test_a_tutorial_without_counterpart_is_refused_with_its_remedy(name: str, tmp_path: Path) -> None:
    text, words = REFUSED[name]
    with pytest.raises(UsageError) as refused:
        load(tmp_path, text).compile(store="s3://ml-runs/tiphys")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "name", ["fan-out and fan-in", *(pytest.param(name, marks=pytest.mark.heavy) for name in LOGS if "fan" not in name)]
)
def test_a_tutorial_runs_here(name: str, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(IMPORTS + STARTS[name])
    ran = invoke(["run", "pipeline.py", "--run", "r"], tmp_path)
    assert ran.code == 0, ran.err
    assert "Traceback" not in ran.err
    for step, text in LOGS[name].items():
        shown = invoke(["logs", f"r/{step}"], tmp_path)
        assert text in shown.out, shown.err
    assert "run r succeeded" in ran.err
