"""Every place in which Argo puts a value is found, and told whether it is an expression."""

from typing import Any

import pytest

from tiphys.protocol.compiled_workflow import find_placeholders


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"value": "a {{x}} b {{ y }}"}, [("x", False), (" y ", False)]),
        ({"value": "{{=x + 1}}"}, [("=x + 1", True)]),
        ({"value": "{{x\ny}}"}, [("x\ny", False)]),
        ({"valueFrom": {"expression": "tasks.a.status"}}, [("tasks.a.status", True)]),
        ({"fromExpression": "{{not a tag}}"}, [("{{not a tag}}", True)]),
        ({"args": [["{{a}}"], {"deep": "{{b}}"}]}, [("a", False), ("b", False)]),
        ({"value": "tasks.a.status", "limit": 3, "none": None}, []),
        ({"{{key}}": "text"}, []),
    ],
)
def test_placeholders_are_found(part: Any, found: list[tuple[str, bool]]) -> None:
    assert [tuple(placeholder) for placeholder in find_placeholders(part)] == found
