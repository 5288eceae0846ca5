"""Title and description for Argo's pages: the author's stay, the others are marked as ours."""

import pytest

from hera_pipelines.compile.workflow import add_description

TITLE, DESCRIPTION = "workflows.argoproj.io/title", "workflows.argoproj.io/description"


@pytest.mark.parametrize(
    ("given", "ours"),
    [({}, "title,description"), ({TITLE: "Mine"}, "description"), ({DESCRIPTION: "Mine"}, "title")],
)
def test_title_and_description_of_the_author_stay(given: dict[str, str], ours: str) -> None:
    described = add_description(given, "digits", "s3://ml-runs/tiphys")

    assert described | given == described
    assert described["tiphys.dev/narrated"] == ours
    assert {TITLE, DESCRIPTION} <= described.keys()


def test_annotations_are_unchanged_where_the_author_gave_both() -> None:
    given = {TITLE: "Mine", DESCRIPTION: "Mine, too"}
    assert add_description(given, "digits", "s3://ml-runs/tiphys") == given


def test_a_pipeline_without_a_store_says_nothing_of_one() -> None:
    assert add_description({}, "digits", "")[DESCRIPTION] == "Pipeline `digits`."
