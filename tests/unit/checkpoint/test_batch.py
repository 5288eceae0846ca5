"""The share of its batch that a program is advised to take."""

import pytest

from tiphys import checkpoint
from tiphys.errors import UsageError


def test_the_whole_batch_unless_told_otherwise():
    assert checkpoint.batch_scale({}) == checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": ""}) == 1.0
    assert checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": "0.25"}) == 0.25


@pytest.mark.parametrize("text", ["half", "0", "-1", "2", "nan"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UsageError, match=r"TIPHYS_BATCH_SCALE=.* is not valid"):
        checkpoint.batch_scale({"TIPHYS_BATCH_SCALE": text})
