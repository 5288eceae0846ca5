"""A pipeline of functions, compiled and run here: what one returns, the next one takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Answer, invoke

Command = Callable[..., Answer]


@pytest.fixture
def tiphys(tmp_path: Path) -> Command:
    return lambda *arguments: invoke([*arguments, "--store", "store"], tmp_path)


PIPELINE = """
from pathlib import Path
from typing import Annotated

from hera.workflows import Artifact, Parameter
from hera_pipelines import Checkpoints, Pipeline, Retries, plain, step, train

Data = Annotated[Path, Artifact(name="data")]
Loss = Annotated[float, Parameter(name="loss")]


@step()
def preprocess(source: str) -> Data:
    import pathlib

    target = pathlib.Path("made")
    target.mkdir()
    (target / "digits").write_text(source)
    return target


@train(image="python:3.12", checkpoints=Checkpoints(every="1 step"), retries=Retries(backoff=0.01))
def fit(data: Data, lr: float) -> tuple[Loss, Annotated[dict, Artifact(name="card")]]:
    import os

    from tiphys import checkpoint

    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "started": []})
        state["started"].append(os.environ["TIPHYS_ATTEMPT"])
        if state["step"] == 0 and lr == 0.5:
            session.save(1, {**state, "step": 1}).wait()
            os._exit(75)
    return lr * len((data / "digits").read_text()), state


@step()
def report(losses: list, cards: str) -> Annotated[str, Parameter(name="best")]:
    return f"{min(float(loss) for loss in losses)} of {cards}"


@plain()
def announce(best: str) -> None:
    assert best == "1.0 of two", best


with Pipeline("functions", arguments=Parameter(name="source", value="four")) as pipeline:
    data = preprocess(source=pipeline.get_parameter("source"))
    sweep = fit(data, name="sweep", with_items=[{"lr": 0.25}, {"lr": 0.5}])
    announce(best=report(losses=sweep.get_parameter("loss"), cards="two"))
"""

UNNAMED = """
from pathlib import Path
from typing import Annotated

from hera.workflows import Artifact
from hera_pipelines import Pipeline, Retries, train

Done = Annotated[str, Artifact(name="done")]


@train(image="python:3.12", retries=Retries(backoff=0.01))
def protected() -> Done:
    import os

    from tiphys import checkpoint

    with checkpoint.session() as session:
        state = session.restore(default={"step": 0})
        if state["step"] == 0:
            session.save(7, {"step": 7}).wait()
            os._exit(75)
    return str(state["step"])


@train(image="python:3.12")
def stateless() -> Done:
    return "ended"


@train(image="python:3.12", checkpoints=None)
def forgetful() -> Done:
    from tiphys import checkpoint

    with checkpoint.session() as session:
        return str(session.restore(default=1))


with Pipeline("unnamed") as pipeline:
    protected()
    stateless()
    forgetful()
"""


@pytest.mark.heavy
def test_training_is_protected_without_options_and_one_that_keeps_nothing_succeeds(
    tiphys: Command, tmp_path: Path
) -> None:
    (tmp_path / "unnamed.py").write_text(UNNAMED)

    done = tiphys("run", "unnamed.py", "--run", "first")

    assert done.code == 0, done.err
    results = {
        path.parents[2].name: path.read_text() for path in (tmp_path / "store").glob("**/outputs/*/*/artifacts/done")
    }
    assert results == {"protected": "7", "stateless": "ended", "forgetful": "1"}
    shown = tiphys("get", "first").out
    assert "no commit" not in shown
    for command in ("get", "report", "verify", "lineage", "plan", "gc"):
        assert (said := tiphys(command, "first")).code == 0, said.err
    assert "step 'forgetful' keeps no checkpoints" in tiphys("logs", "first/forgetful").out
    assert "keeps no checkpoints" not in tiphys("logs", "first/stateless").out


PIPED = """
import sys
from pathlib import Path

from hera_pipelines import Pipeline, Retries, Train

fit = Train(
    name="fit",
    image="i",
    command=["sh", "-c", f"{sys.executable} {Path(__file__).parent}/train.py | cat"],
    retries=Retries(user_error=1, backoff="0.01s"),
)
with Pipeline("piped") as pipeline:
    fit()
"""

CRASHES_ONCE = """
import os
from tiphys import checkpoint

with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    session.save(state["step"] + 1, {"step": state["step"] + 1}).wait()
    if os.environ["TIPHYS_ATTEMPT"] == "1":
        raise ValueError("Verlust ist NaN")
"""


def test_crash_behind_a_pipe_is_retried_by_its_cause(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "piped.py").write_text(PIPED)
    (tmp_path / "train.py").write_text(CRASHES_ONCE)

    done = tiphys("run", "piped.py", "--run", "first")

    assert done.code == 0, done.err
    shown = json.loads(tiphys("get", "first", "-o", "json").out)
    first, second = shown["steps"][0]["attempts"]
    assert (first["outcome"], first["cause"], first["exit_code"]) == ("failed", "user_error", 0)
    assert first["message"].startswith("ValueError: Verlust ist NaN; the exit code 0 hides it")
    assert (second["outcome"], second["starts_from"]) == ("done", "1-1")


def test_functions_hand_on_values_files_and_checkpoints(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(PIPELINE)

    done = tiphys("run", "functions.py", "--run", "first")

    assert done.code == 0, done.err
    assert done.out == "first\n"
    assert "announce: Succeeded" in done.err
    shown = json.loads(tiphys("get", "first", "-o", "json").out)
    [best] = [
        output["value"] for step in shown["steps"] for output in step.get("outputs", []) if output["name"] == "best"
    ]
    assert best == "1.0 of two"
    outputs = tmp_path / "store" / "data" / "runs" / "first" / "outputs"
    cards = {card.read_text() for card in outputs.glob("sweep.*/*/artifacts/card")}
    assert cards == {'{"step": 0, "started": ["1"]}', '{"step": 1, "started": ["1", "2"]}'}


BRACES = """
from typing import Annotated

from hera.workflows import Parameter
from hera_pipelines import Pipeline, plain, step, train

Text = Annotated[str, Parameter(name="text")]
Document = Annotated[dict, Parameter(name="document")]
TEXT = 'a {{ and }} {{{\\n"q" \\'s\\' \\\\n \\\\ {"a": {"b": "{{x}}"}}\\ttab ü 漢 \\u2028 end '
DOCUMENT = {"{{workflow.name}}": [TEXT, "{{=1 + 1}}", {"a": {"b": {}}}]}


def check(text, document):
    assert text == TEXT, text
    assert document == DOCUMENT, document


@step()
def make() -> tuple[Text, Document]:
    return TEXT, DOCUMENT


@step()
def recorded(text: str, document: dict) -> None:
    check(text, document)


@train(image="python:3.12", nodes=2)
def gang(text: str, document: dict) -> None:
    check(text, document)


@plain()
def unrecorded(text: str, document: dict) -> None:
    check(text, document)


with Pipeline("braces") as pipeline:
    made = make()
    for use in (recorded, gang, unrecorded):
        use(text=made.get_parameter("text"), document=made.get_parameter("document"))
"""


def test_braces_quotes_and_lines_of_a_value_reach_the_next_function(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "braces.py").write_text(BRACES)

    done = tiphys("run", "braces.py")

    assert done.code == 0, done.err
