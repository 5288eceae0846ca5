"""From a file to its pipeline, or to a sentence that says which line is to blame."""

import sys
from pathlib import Path

import pytest

from hera_pipelines import CronPipeline, load_pipeline
from tiphys.errors import UsageError

ONE = """
from hera_pipelines import Pipeline, step

@step()
def prep() -> None:
    print("prep")

with Pipeline("{name}") as {variable}:
    prep()
"""


def write(folder: Path, text: str, name: str = "digits.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_only_pipeline_of_a_file_is_found(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path, ONE.format(name="digits", variable="anything")))

    assert pipeline.pipeline_name == "digits"
    assert pipeline.to_dict()["kind"] == "Workflow"


def test_a_cron_pipeline_is_found_too(tmp_path: Path) -> None:
    text = ONE.format(name="nightly", variable="p").replace("import Pipeline", "import CronPipeline")
    text = text.replace('Pipeline("nightly")', 'CronPipeline("nightly", schedules=["0 2 * * *"])')

    assert isinstance(load_pipeline(write(tmp_path, text)), CronPipeline)


def test_a_second_name_for_one_pipeline_is_no_second_pipeline(tmp_path: Path) -> None:
    path = write(tmp_path, ONE.format(name="digits", variable="a") + "b = a\n")

    assert load_pipeline(path).pipeline_name == "digits"


@pytest.mark.parametrize("name", ["second", "two"])
def test_a_pipeline_among_several_is_chosen_by_variable_or_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, ONE.format(name="one", variable="first") + ONE.format(name="two", variable="second"))

    assert load_pipeline(path, name).pipeline_name == "two"


def test_neighbours_of_the_file_can_be_imported_only_by_it(tmp_path: Path) -> None:
    write(tmp_path, "NAME = 'digits'\n", "tiphys_test_neighbour.py")
    path = write(tmp_path, "import tiphys_test_neighbour\n" + ONE.format(name="digits", variable="p"))
    before = list(sys.path)

    load_pipeline(path)

    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "defines no pipeline at its top level"),
        (ONE.format(name="a", variable="x") + ONE.format(name="b", variable="y"), "several pipelines: x, y; say which"),
        ("import no_such_module_anywhere\n", "digits.py:1: ModuleNotFoundError: No module named"),
        ("x = 1\n\ny = x / 0\n", "digits.py:3: ZeroDivisionError"),
        ("x = (\n", "digits.py:1: SyntaxError"),
        ("from hera_pipelines import Retries\n\nRetries(unknown=-1).policy()\n", "digits.py:3: Retries: unknown"),
    ],
)
def test_a_file_without_a_clear_pipeline_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_pipeline(write(tmp_path, text))

    assert words in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pipeline 'other'; it has: first"):
        load_pipeline(write(tmp_path, ONE.format(name="one", variable="first")), "other")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.py does not exist"):
        load_pipeline(tmp_path / "nothing.py")
    with pytest.raises(UsageError, match="is a folder"):
        load_pipeline(tmp_path)
    with pytest.raises(UsageError, match="not a Python file"):
        load_pipeline(write(tmp_path, "{}", "digits.txt"))
