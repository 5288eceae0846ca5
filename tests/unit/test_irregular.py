"""The samples that suites draw from are irregular whatever the seed, and are valid names all the same."""

import itertools

import pytest
from support.builders.irregular_samples import Irregular, WorkflowPlace, differing_in_one_part

from tiphys.records.names import check_run_name, check_step_id

SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_names_are_valid_and_related(seed: int) -> None:
    draw = Irregular(seed)
    first, second, third, *_ = runs = draw.run_names(7)
    assert [check_run_name(name) for name in runs] == list(runs)
    assert len(set(runs)) == 7
    assert "." in first and first.replace(".", "-") == second and third.startswith(f"{first}.")
    first, second, third = draw.step_names(3)
    assert [check_step_id(name) for name in (first, second, third)] == [first, second, third]
    assert second.startswith(first) and third.endswith(first)
    first, second = draw.namespaces(2)
    assert first == "default" and second.startswith(first)
    first, second = draw.parameters(2)
    assert first != second and first.lower() == second.lower() and not first.isascii()


@pytest.mark.parametrize("seed", SEEDS)
def test_values_differ_where_their_sizes_do_not(seed: int) -> None:
    draw = Irregular(seed)
    assert len({len(data) for data in draw.equal_sized_bytes(4)}) == 1
    assert len(set(draw.equal_sized_bytes(4))) == 4
    texts = draw.texts(6)
    assert len({len(text) for text in texts}) == 1
    assert len({len(text.encode()) for text in texts}) > 1
    secrets = draw.secrets(3)
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(secrets))


@pytest.mark.parametrize("seed", SEEDS)
def test_sample_workflows_differ_from_the_first_in_one_part(seed: int) -> None:
    first, *others = Irregular(seed).workflows()
    assert len(others) == len(WorkflowPlace._fields)
    for number, other in enumerate(others):
        assert [at for at, (mine, its) in enumerate(zip(first, other, strict=True)) if mine != its] == [number]


def test_a_seed_draws_the_same_samples_again() -> None:
    assert Irregular(7).workflows() == Irregular(7).workflows() != Irregular(8).workflows()


def test_a_part_that_both_share_is_refused() -> None:
    first = Irregular(7).workflows()[0]._replace(namespace="default", name="a")
    with pytest.raises(ValueError, match="as part 3"):
        list(differing_in_one_part(first, first._replace(namespace="ml", name="b", uid="c", submission=2)))
