"""Substitution for any text at all, held against Argo's way of doing it on JSON."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from hera_pipelines.local.arguments import substitute_variables
from hera_pipelines.local.expressions.expr import parse_expression
from tiphys.errors import UsageError

names = st.from_regex(r"[a-z]{1,6}(\.[a-z]{1,6}){0,3}", fullmatch=True)
pieces = st.one_of(
    st.text(max_size=8),
    names.map(lambda name: "{{" + name + "}}"),
    st.text(max_size=8).map(lambda text: "{{=" + text + "}}"),
    st.sampled_from(["{{", "}}", "{{{{a}}", '"', "\\", "\n", "{{=", "{{ a }}"]),
)
texts = st.lists(pieces, max_size=6).map("".join)
variables = st.dictionaries(names, st.text(max_size=12), max_size=6)


@given(texts, variables)
def test_lenient_substitution_never_raises(text: str, known: dict[str, str]) -> None:
    assert isinstance(substitute_variables(text, known), str)


@given(texts)
def test_without_variables_every_plain_text_stays_as_it_is(text: str) -> None:
    plain = text.replace("{{=", "{{")
    assert substitute_variables(plain, {}) == plain


@given(
    st.lists(
        st.one_of(
            st.text(max_size=8).filter(lambda t: "{" not in t and "}" not in t), names.map(lambda n: "{{" + n + "}}")
        )
    ),
    variables,
)
def test_walking_the_document_does_what_argo_does_on_its_json(parts: list[str], known: dict[str, str]) -> None:
    document = {"outer": {"inner": ["".join(parts)]}}
    assert substitute_variables(document, known) == _as_argo(document, known)


@given(st.text(max_size=30))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        parse_expression(text)
    except UsageError as error:
        assert repr(text) in str(error)


def _as_argo(document: object, known: dict[str, str]) -> object:
    """Argo's simpleReplace: on the JSON text, inserting what JSON would write between its quotes."""

    def replace(match: re.Match[str]) -> str:
        return json.dumps(known[match[1]])[1:-1] if match[1] in known else match[0]

    return json.loads(re.sub(r"\{\{([a-z.]+)\}\}", replace, json.dumps(document)))
