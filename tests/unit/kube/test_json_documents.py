"""JSON within bounds of depth and number of values, from text that anyone may have written."""

import json
import time

import pytest

from tiphys.errors import UsageError
from tiphys.kube.transport import decode_objects
from tiphys.protocol.json_documents import CUT, CUT_DEPTH, cut_deep_values, parse_json


def nested(levels, inner="1"):
    return "[" * levels + inner + "]" * levels


@pytest.mark.parametrize("document", [nested(5000), '{"a":' * 300 + "1" + "}" * 300])
def test_document_that_is_nested_too_deeply_is_refused_with_its_name(document):
    with pytest.raises(UsageError, match=r"das Läufchen is not JSON that can be read: it is nested too deeply"):
        parse_json(document, "das Läufchen")


@pytest.mark.parametrize("document", ["", "{", "1" * 5000, '"\ud800"', b"\xff", "NaN,"])
def test_document_that_is_no_json_is_refused(document):
    with pytest.raises(UsageError, match=r"the body is not JSON"):
        parse_json(document)


def test_document_of_too_many_values_is_refused_before_it_is_parsed():
    with pytest.raises(UsageError, match="more than 3 values"):
        parse_json("[1,2,3,4", max_values=3)
    assert parse_json("[1,2]", max_values=3) == [1, 2]


def test_values_below_the_depth_are_cut_and_brackets_in_texts_are_not_counted():
    text = '"]]}}[[{{\\\\\\""'
    document = f'{{"deep": {nested(CUT_DEPTH + 50, text)}, "flat": [{text}]}}'
    cut = json.loads(cut_deep_values(document.encode()))
    assert cut["flat"] == json.loads(f"[{text}]")
    assert CUT in json.dumps(cut["deep"])


@pytest.mark.parametrize("document", [b"[1]", b'{"items": [1, null]}', b"7"])
def test_reply_that_holds_no_objects_is_returned_as_it_is(document):
    deep = nested(CUT_DEPTH + 100).encode()
    assert decode_objects(document) == json.loads(document)
    assert decode_objects(b"[" + deep + b"," + document + b"]")[1] == json.loads(document)


def test_text_that_is_cut_off_behind_a_backslash_costs_time_in_proportion_to_its_size():
    def seconds(size):
        document = b'["' + b'\\"' * size + b"\\"
        began = time.process_time()
        cut_deep_values(document)
        return time.process_time() - began

    # Quadratic, the longer one costs minutes.
    assert min(seconds(1_000_000) for _ in range(2)) < 60
