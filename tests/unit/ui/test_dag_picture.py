"""Where the tasks of a pipeline stand in its picture."""

import random
import re

from hera_pipelines.ui.dag_picture import BOX_HEIGHT, BOX_WIDTH, place_tasks

SEED = 20_261_123


def test_a_task_stands_right_of_what_it_needs() -> None:
    picture = place_tasks({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]})
    boxes = {box.name: box for box in picture.boxes}
    assert boxes["a"].x < boxes["b"].x == boxes["c"].x < boxes["d"].x
    assert boxes["a"].y == boxes["d"].y == (boxes["b"].y + boxes["c"].y) // 2
    assert len(picture.curves) == 4


def test_a_line_leads_from_the_middle_of_one_box_to_the_middle_of_the_next() -> None:
    picture = place_tasks({"a": [], "b": ["a"], "c": ["a"], "d": ["b"], "e": ["a", "d"]})
    boxes = {box.name: box for box in picture.boxes}
    ends = {tuple(map(int, re.match(r"M(\d+) (\d+)C.* (\d+) (\d+)$", curve).groups())) for curve in picture.curves}  # type: ignore[union-attr]
    assert ends == {
        (boxes[one].x + BOX_WIDTH, boxes[one].y + BOX_HEIGHT // 2, boxes[other].x, boxes[other].y + BOX_HEIGHT // 2)
        for one, other in ("ab", "ac", "bd", "ae", "de")
    }


def test_no_two_boxes_touch_and_all_lie_in_the_picture() -> None:
    draw = random.Random(SEED)
    for _ in range(200):
        names = [f"t{number}" for number in range(draw.randrange(1, 40))]
        needs = {
            name: sorted(draw.sample(names[:index], min(index, draw.randrange(4)))) for index, name in enumerate(names)
        }
        picture = place_tasks(needs)
        for number, box in enumerate(picture.boxes):
            assert 0 <= box.x <= picture.width - BOX_WIDTH
            assert 0 <= box.y <= picture.height - BOX_HEIGHT
            for other in picture.boxes[:number]:
                assert abs(box.x - other.x) >= BOX_WIDTH or abs(box.y - other.y) >= BOX_HEIGHT


def test_a_pipeline_without_tasks_has_an_empty_picture() -> None:
    assert place_tasks({}).boxes == ()
