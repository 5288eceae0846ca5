"""A decorated function runs in its container as it does here: the script is executed."""

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from hera.workflows import Artifact, Parameter, RunnerScriptConstructor
from hera.workflows.models import ValueFrom

from hera_pipelines import step, train
from hera_pipelines.authoring.functions.decorators import StepFunction
from hera_pipelines.authoring.loading import load_pipeline
from hera_pipelines.local.arguments import replace_tags
from tiphys.errors import UsageError

Folder = Annotated[Path, Artifact(name="folder")]
Text = Annotated[str, Artifact(name="text")]
Loss = Annotated[float, Parameter(name="val-loss")]


def run(
    function: StepFunction[..., Any], folder: Path, parameters: Mapping[str, str] | None = None, **env: str
) -> None:
    """Execute the script of ``function`` as a container would, in ``folder``."""
    template = function.script._build_template()
    assert template.script
    values = {f"inputs.parameters.{name}": value for name, value in (parameters or {}).items()}
    (folder / "script.py").write_text(replace_tags(template.script.source, values))
    subprocess.run([sys.executable, "script.py"], cwd=folder, env=env, check=True, capture_output=True, timeout=120)


@step()
def measure(lr: float, name: str, flags: list[int], out: str) -> Loss:
    import pathlib

    pathlib.Path(out).write_text(repr((lr, name, flags)))
    return lr / 2


def test_parameters_arrive_as_values_and_the_result_is_written(tmp_path: Path) -> None:
    given = {"lr": "0.5", "name": "it's", "flags": "[1, 2]", "out": str(tmp_path / "seen")}

    run(measure, tmp_path, given, TIPHYS_OUTPUT_VAL_LOSS=str(tmp_path / "deep" / "loss"))

    assert (tmp_path / "seen").read_text() == repr((0.5, "it's", [1, 2]))
    assert (tmp_path / "deep" / "loss").read_text() == "0.25"


@step()
def echo(text: str, named: Annotated[str, Parameter(name="by-name")], rest: list[str], out: str) -> None:
    import pathlib

    pathlib.Path(out).write_bytes(repr((text, named, rest)).encode())


@pytest.mark.parametrize(
    "text", ["it's", "ends'", "'''", '"', 'a"', "back\\", "\\n", "two\nlines", "漢 😀 \u2028", "", "<&>"]
)
def test_any_text_arrives_as_it_is(text: str, tmp_path: Path) -> None:
    given = {"text": text, "by-name": text, "rest": json.dumps([text]), "out": str(tmp_path / "seen")}

    run(echo, tmp_path, given)

    assert (tmp_path / "seen").read_text() == repr((text, text, [text]))


@pytest.mark.parametrize("text", ["1", "null", "[1]", '"quoted"'])
def test_a_parameter_declared_as_text_is_not_read_as_json(text: str, tmp_path: Path) -> None:
    run(echo, tmp_path, {"text": text, "by-name": text, "rest": "[]", "out": str(tmp_path / "seen")})

    assert (tmp_path / "seen").read_text() == repr((text, text, []))


@step()
def both(kind: str) -> tuple[Text, Loss]:
    return f"a {kind}", 0.5


def test_several_results_are_written_in_the_order_of_the_annotation(tmp_path: Path) -> None:
    run(both, tmp_path, {"kind": "cat"}, TIPHYS_OUTPUT_TEXT="text", TIPHYS_OUTPUT_VAL_LOSS="loss")

    assert (tmp_path / "text").read_text() == "a cat"
    assert json.loads((tmp_path / "loss").read_text()) == 0.5


@step()
def copy(data: Folder, more: bool = False) -> Folder:
    import pathlib

    target = pathlib.Path("made")
    target.mkdir()
    (target / "file").write_text(data.joinpath("file").read_text() + "!")
    return target


def test_artifacts_are_paths_and_folders_are_copied(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("digits")

    run(copy, tmp_path, {"more": "true"}, TIPHYS_INPUT_FOLDER=str(tmp_path / "in"), TIPHYS_OUTPUT_FOLDER="out")

    assert (tmp_path / "out" / "file").read_text() == "digits!"


@train(image="python:3.12")
def quiet() -> None:
    raise SystemExit(75)


@step()
def join(left: Text, right: Text, out: str) -> None:
    import pathlib

    pathlib.Path(out).write_text(left.read_text() + right.read_text())  # type: ignore[attr-defined]


def test_inputs_that_share_an_annotation_arrive_apart(tmp_path: Path) -> None:
    for name in ("left", "right"):
        (tmp_path / name).write_text(name)
    paths = {f"TIPHYS_INPUT_{name.upper()}": str(tmp_path / name) for name in ("left", "right")}

    run(join, tmp_path, {"out": str(tmp_path / "seen")}, **paths)

    assert (tmp_path / "seen").read_text() == "leftright"


def test_the_exit_code_is_the_functions(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(quiet, tmp_path)

    assert caught.value.returncode == 75


def test_returned_outputs_are_declared_where_the_script_writes_them() -> None:
    outputs = both.script._build_template().outputs

    assert outputs
    assert outputs.artifacts
    assert outputs.parameters
    assert outputs.artifacts[0].path == "/tmp/tiphys/outputs/text"
    assert outputs.parameters[0].value_from == ValueFrom(path="/tmp/tiphys/outputs/val-loss")
    source = both.script._build_template().script
    assert source
    assert "_keep('TIPHYS_OUTPUT_TEXT', '/tmp/tiphys/outputs/text', result[0])" in source.source


def test_a_function_without_results_is_just_called() -> None:
    template = quiet.script._build_template()

    assert template.script
    assert "_keep" not in template.script.source
    assert "    globals()['quiet']()\n" in template.script.source


def test_a_constructor_of_the_author_is_respected() -> None:
    @step(constructor=RunnerScriptConstructor())
    def fit(lr: float) -> None: ...

    assert fit.script.args == ["-m", "hera.workflows.runner", "-e", f"{__name__}:fit"]


def test_results_without_a_name_are_refused() -> None:
    def half(x: int) -> tuple[Text, int]:
        return "a", x

    def nameless(x: int) -> Annotated[str, Artifact()]:
        return str(x)

    for function in (half, nameless):
        with pytest.raises(UsageError, match="each value that it returns needs a name"):
            step()(function)


def test_an_async_function_is_refused() -> None:
    @step()
    async def later() -> None: ...

    with pytest.raises(UsageError, match="only plain functions"):
        later.script._build_template()


Day = Annotated[date, Parameter(name="day")]
Note = Annotated[str | None, Parameter(name="note")]
Place = Annotated[Path, Parameter(name="place")]
Scores = Annotated[set[Decimal], Parameter(name="scores")]


@step()
def note(kind: str | None, days: list[date]) -> tuple[Day, Note, Place, Scores]:
    import decimal
    import pathlib

    return days[0], kind, pathlib.Path("data") / "a b", {decimal.Decimal("1.10")}  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["null", "<none>", ""])
def test_an_output_that_json_lacks_is_written_as_the_next_step_reads_it(kind: str, tmp_path: Path) -> None:
    outputs = {name: name.lower() for name in ("DAY", "NOTE", "PLACE", "SCORES")}
    environ = {f"TIPHYS_OUTPUT_{name}": file for name, file in outputs.items()}

    run(note, tmp_path, {"kind": kind, "days": '["2026-01-02"]'}, **environ)

    written = {file: (tmp_path / file).read_text() for file in outputs.values()}
    assert written == {"day": "2026-01-02", "note": kind, "place": "data/a b", "scores": '["1.10"]'}


def test_a_value_that_is_none_ends_the_script_with_its_parameter(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(note, tmp_path, {"kind": "a", "days": "tomorrow"})

    assert caught.value.returncode == 1
    assert caught.value.stderr == b"parameter days: 'tomorrow' is no JSON list\n"


@step()
def shifting(count: int) -> tuple[Text, Loss]:
    return [str(count)] * count  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 3])
def test_other_than_the_declared_number_of_values_is_an_error_of_the_function(count: int, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(shifting, tmp_path, {"count": str(count)})

    assert f"the function returned {count} values, and its annotation names 2 outputs".encode() in caught.value.stderr


SCALE = 2


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return 2 * function(*args)

    return call


def test_a_name_of_the_function_around_it_is_refused_with_the_line() -> None:
    enclosed = 3

    def closure(n: int) -> None:
        def inner() -> int:
            return n * enclosed

        inner()

    line = inspect.getsourcelines(closure)[1] + 2
    message = f"step 'closure', line {line}: the function uses 'enclosed' of the function around it; define it at the"
    with pytest.raises(UsageError, match=message):
        step()(closure)


def test_names_that_a_script_has_are_accepted(tmp_path: Path) -> None:
    def fit(n: int = SCALE) -> None:
        import math

        local: Callable[..., Any] = print
        text = """one
      two
zero"""

        def share(value: str) -> None:
            global _shared
            _shared = value  # type: ignore[name-defined]

        class Row:
            n: int = 3

        share(text)
        assert globals()["_shared"] == "one\n      two\nzero"
        assert (local, Row.__annotations__["n"]) == (print, int)

        def scaled(by: float) -> float:
            return by * n if by else scaled(1)

        for each in range(n):
            _ = (os.sep, json.dumps(scaled(each)), math.pi, __name__)

    run(step()(fit), tmp_path, {"n": "2"})


Where = Annotated[Path | None, Parameter(name="where")]


@step()
def nowhere() -> Where:
    return None


def test_no_path_is_an_output_too(tmp_path: Path) -> None:
    run(nowhere, tmp_path, TIPHYS_OUTPUT_WHERE="where")

    assert (tmp_path / "where").read_text() == "<none>"


def test_a_decorator_over_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has @doubled and @step.*; write the one that makes it a step first"):

        @doubled
        @step()
        def over(n: int) -> None:
            _ = n


@pytest.mark.parametrize("values", ['"a",', '"a", 0.5, 1'])
def test_a_return_with_another_number_of_values_is_refused(values: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.py"
    file.write_text(f"""
from typing import Annotated
from hera.workflows import Artifact
from hera_pipelines import step
@step(image="x:1")
def fit() -> tuple[Annotated[str, Artifact(name="a")], Annotated[float, Artifact(name="b")]]:
    return {values}
""")

    count = 1 if values.endswith(",") else 3
    with pytest.raises(
        UsageError,
        match=f"pipeline.py:5: step 'fit', line 7: the function returns {count} values, and its annotation names 2",
    ):
        load_pipeline(file)


@step()
def brace(name: str, out: str) -> None:
    """Has {{ in its documentation, and {{=1}} as well."""
    import pathlib

    width = 4
    texts = ["{{ name }}", "{{", "{{{", f"{{{name}}}", f"{name:{width}}{{", f"{name!r}{{{{x}}}}", r"\{{", '"""{{\n']
    pathlib.Path(out).write_text(repr((texts, b"{{\xff", {"a": {"b": 1}}, {(): {}})))


def test_braces_in_a_function_are_no_tags_of_argo(tmp_path: Path) -> None:
    given = {"name": "ü", "out": str(tmp_path / "seen")}
    run(brace, tmp_path, given)
    here = tmp_path / "here"
    brace.function("ü", str(here))

    assert (tmp_path / "seen").read_text() == here.read_text()
    template = brace.script._build_template()
    assert template.script
    assert template.script.source.count("{{") == len(given)
