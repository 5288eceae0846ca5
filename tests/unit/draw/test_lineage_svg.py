"""The picture holds everything that happened, and any viewer can read it."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from hera_pipelines.draw.lineage_graph import AttemptEnding, CheckpointPosition, Dot, Lane, LineageGraph
from hera_pipelines.draw.lineage_svg import render_lineage_svg
from tiphys.lineage.tree import CheckpointStatus

SVG = "{http://www.w3.org/2000/svg}"


def lane(
    attempt: int,
    steps: list[int],
    origin: tuple[int, int] | None = None,
    ending: AttemptEnding = AttemptEnding.FAILED,
    message: str = "",
    statuses: dict[int, CheckpointStatus] | None = None,
) -> Lane:
    dots = tuple(
        Dot(
            CheckpointPosition(attempt, step),
            (statuses or {}).get(step, CheckpointStatus.COMMITTED),
            f"loss {step}",
            (f"{step} bytes",),
        )
        for step in steps
    )
    return Lane(attempt, 1, CheckpointPosition(*origin) if origin else None, ending, message, dots)


def lineage(*lanes: Lane, step: str = "train") -> LineageGraph:
    return LineageGraph("digits-7xk2p", step, lanes)


def draw(*lineages: LineageGraph, title: str = "Lineage") -> ElementTree.Element:
    return ElementTree.fromstring(render_lineage_svg(title, lineages))


def ids(root: ElementTree.Element) -> set[str]:
    return {found for element in root.iter() if (found := element.get("id"))}


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def circles(root: ElementTree.Element, node: str) -> list[str | None]:
    group = next(element for element in root.iter(f"{SVG}g") if element.get("id") == node)
    return [circle.get("class") for circle in group.iter(f"{SVG}circle")]


def test_every_attempt_and_checkpoint_of_a_short_lineage_is_in_the_picture() -> None:
    root = draw(lineage(lane(1, [10, 20]), lane(2, [20, 30], origin=(1, 10), ending=AttemptEnding.DONE)))
    assert ids(root) == {"train-attempt-1", "train-attempt-2", "train-1-10", "train-1-20", "train-2-20", "train-2-30"}


def test_lineages_of_a_run_are_drawn_below_each_other() -> None:
    root = draw(lineage(lane(1, [10]), step="first"), lineage(lane(1, [10]), step="second"))
    tops = [float(re.findall(r"[\d.]+", g.get("transform", ""))[1]) for g in root.findall(f"{SVG}g")[:2]]
    assert {"first-1-10", "second-1-10"} <= ids(root)
    assert tops[1] - tops[0] > 60


@pytest.mark.parametrize("status", list(CheckpointStatus))
def test_a_status_has_a_form_of_its_own_and_a_place_in_the_legend(status: CheckpointStatus) -> None:
    root = draw(lineage(lane(1, [10], statuses={10: status})))
    assert circles(root, "train-1-10") == [status.value]
    assert status.value in texts(root)


def test_the_legend_names_no_status_that_does_not_occur() -> None:
    assert "quarantined" not in texts(draw(lineage(lane(1, [10]))))


def test_an_attempt_leaves_the_checkpoint_it_started_from() -> None:
    root = draw(lineage(lane(1, [10, 20]), lane(2, [20], origin=(1, 10))))
    origin = next(g for g in root.iter(f"{SVG}g") if g.get("id") == "train-1-10")
    x, y = re.findall(r"[\d.]+", origin.get("transform", ""))
    second = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "line"][1]
    assert second.startswith(f"M {float(x):g} {float(y):g} V ")


def test_the_same_global_step_of_two_attempts_shares_a_column() -> None:
    root = draw(lineage(lane(1, [10, 20]), lane(2, [20], origin=(1, 10))))
    columns = {
        g.get("id"): re.findall(r"[\d.]+", g.get("transform", ""))[0]
        for g in root.iter(f"{SVG}g")
        if g.get("id") in ("train-1-20", "train-2-20", "train-1-10")
    }
    assert columns["train-1-20"] == columns["train-2-20"] != columns["train-1-10"]


def test_a_long_lineage_collapses_but_keeps_what_matters() -> None:
    first = lane(1, list(range(10, 1010, 10)), statuses={500: CheckpointStatus.QUARANTINED})
    root = draw(lineage(first, lane(2, [1010], origin=(1, 990))))
    assert {"train-1-10", "train-1-500", "train-1-990", "train-1-1000", "train-2-1010"} <= ids(root)
    assert "train-1-250" not in ids(root)
    assert [text for text in texts(root) if text.startswith("+")] == ["+48", "+48"]
    assert float(root.get("width", "0")) < 1200


def test_five_hundred_attempts_are_one_legible_page() -> None:
    root = ElementTree.fromstring(render_lineage_svg("Lineage", [long_lineage(500)]))
    width, height = (float(root.get(name) or 0) for name in ("width", "height"))
    assert width <= 2000
    assert height <= 1300
    shown = texts(root)
    assert {"attempt 1", "attempt 300", "attempt 500"} <= set(shown)
    groups = [re.fullmatch(r"attempts (\d+)–(\d+)", text) for text in shown]
    folded = sum(int(group[2]) - int(group[1]) + 1 for group in groups if group)
    assert folded + sum(bool(re.fullmatch(r"attempt \d+", text)) for text in shown) == 500
    assert any(text.startswith("done") for text in shown)
    assert any("preemption 1" in text and "GPU out of memory" in text for text in shown)
    assert circles(root, "train-300-2998") == ["quarantined"]


def long_lineage(attempts: int) -> LineageGraph:
    """Attempts that each go on where the one before stopped; one has a damaged checkpoint, and the last is done."""
    lanes = []
    for number in range(1, attempts + 1):
        statuses = {2998: CheckpointStatus.QUARANTINED} if number == 300 else {}
        origin = (number - 1, (number - 1) * 10 - (2 if number == 301 else 0) - 1) if number > 1 else None
        steps = [number * 10 - 9, number * 10 - 5, *([2998] if number == 300 else []), number * 10 - 1]
        ending = AttemptEnding.DONE if number == attempts else AttemptEnding.FAILED
        cause = "" if number == attempts else "preemption" if number % 5 else "GPU out of memory"
        one = lane(number, sorted(steps), origin, ending, f"{cause}: its node was taken away", statuses)
        lanes.append(dataclasses.replace(one, cause=cause))
    return LineageGraph("digits-7xk2p", "train", tuple(lanes))


def test_an_origin_that_retention_removed_is_drawn_as_removed() -> None:
    root = draw(lineage(lane(1, [30]), lane(2, [40], origin=(1, 10))))
    assert circles(root, "train-1-10") == ["removed"]


def test_names_and_messages_are_escaped_and_control_characters_replaced() -> None:
    hostile = '<script>alert("&")</script>\x00\x1b[31m'
    root = draw(lineage(lane(1, [10], message=hostile), step="fit"), title=hostile)
    assert not list(root.iter(f"{SVG}script"))
    assert root.findtext(f"{SVG}title") == '<script>alert("&")</script>␀␛[31m'


def test_a_long_message_is_cut_in_the_row_and_whole_in_its_tooltip() -> None:
    message = "infrastructure: " + "x" * 200
    root = draw(lineage(lane(1, [10], message=message)))
    shown = next(text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("infrastructure"))
    assert len(shown.text or "") < 60
    assert shown.findtext(f"{SVG}title") == message


def test_the_picture_fetches_nothing_from_elsewhere() -> None:
    document = render_lineage_svg("Lineage", [lineage(lane(1, [10]))])
    assert "href" not in document
    assert "url(" not in document


def test_a_run_without_attempts_says_so() -> None:
    assert "no attempt yet" in texts(draw(lineage()))


def test_a_viewer_in_dark_mode_gets_other_colours() -> None:
    light, _, dark = render_lineage_svg("Lineage", []).partition("prefers-color-scheme: dark")
    paper = re.compile(r"\.paper \{ fill: (#\w{6})")
    assert paper.findall(light) != paper.findall(dark)
    assert len(paper.findall(dark)) == 1
