"""Queue files: what they may say, and what is answered to one that is wrong."""

from itertools import islice
from pathlib import Path

import pytest
from tiphys_plugin import Queues, load_queues
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.scheduler.fair_share import attained_level, level_ends

from tiphys.errors import UsageError


def test_documented_form_is_read(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_text(
        "queues:\n"
        "  - name: research\n    gpus: {A100: 8, '*': 4}\n"
        "  - {name: nightly, gpus: {'*': 2}}\n"
        "inventory:\n  A100: {count: 16, memory_mb: 81920}\n"
    )
    queues = load_queues(path)
    assert queues.names == ("research", "nightly")
    assert queues.find("research").gpus == {"A100": 8, "*": 4}
    assert queues.find("none") is None
    assert queues.inventory["A100"].count == 16


def test_the_example_of_the_documentation_is_read(tmp_path):
    text = (Path(__file__).parents[4] / "docs/queues.md").read_text()
    path = tmp_path / "queues.yaml"
    path.write_text(text.split("```yaml\n")[1].split("```")[0])
    research, nightly = load_queues(path).queues
    assert (research.max_with_borrowing("A100"), research.guaranteed_quota("A100"), research.weight) == (12, 2, 2)
    assert (nightly.cohort, nightly.stopped) == ("lab", True)


def test_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_bytes(b"queues: \xff")
    with pytest.raises(UsageError, match=r"queues\.yaml is not UTF-8 text .* at byte 8"):
        load_queues(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file: Input should be"),
        ("[1, 2]", "the file: Input should be"),
        ("queues: [", "not valid YAML"),
        ("queues:\n  - {name: a, gpus: {A100: 8, A100: 1}}", "line 2, column 31, is not valid YAML: the key 'A100' is"),
        ("queues: []\nplacement: best-fit\nqueues: []", "line 3, column 1, is not valid YAML: the key 'queues' is"),
        ("queues: [{name: a, gpus: {}, cohort: c}]\nflavors: &f []\nflavors: *f", "the key 'flavors' is there twice"),
        ("queues:\n  - name: a\n    gpus: {}\n    cohort: ''", "line 4: queues.0.cohort: '' is no name; give 1 to 253"),
        ("queues:\n  - {name: a, gpus: {}}\n  - {name: ' ', gpus: {}}", "line 3: queues.1.name: ' ' is no name"),
        ("queues: [{name: 'a\\nb', gpus: {}}]".replace("'", '"'), "is no name"),
        ("queues: [{name: a, gpus: {'': 4}}]", "names the GPU type ''"),
        ("queues: [{name: a, gpus: {A100: '8'}}]", "queues.0.gpus.A100: Input should be a valid integer"),
        ("queues: [{name: a, gpus: {A100: yes}}]", "queues.0.gpus.A100: Input should be a valid integer"),
        ("queues: []\nnodes: [{name: '', gpus: 0}]", "nodes.0.name: '' is no name"),
        (
            "queues: []\nnodes: [{name: n, gpus: 0, memory_mb: 80GB}]",
            "nodes.0.memory_mb: Input should be a valid integer",
        ),
        ("queues: []\ncluster_nodes: {memory_label: a b}", "cluster_nodes.memory_label: String should match"),
        ("queues: []\ncluster_nodes: {selector: {pool: a b}}", "cluster_nodes.selector.pool: String should match"),
        ("queues: []\nflavors: [{name: f, gpu_type: T4, node_labels: {/x: y}}]", "flavors.0.node_labels./x"),
        ("queues: [{name: a, gpus: {A100: -1}}]", "queues.0.gpus.A100: Input should be greater than or equal to 0"),
        ("queues: [{name: a}]", "queues.0.gpus: Field required"),
        ("queues: [{name: a, gpu: {A100: 8}}]", "queues.0 has no key 'gpu'; did you mean 'gpus'?"),
        ("queue: []", "the file has no key 'queue'; did you mean 'queues'? It has: queues, "),
        ("queues: [{name: a, gpus: {}}, {name: a, gpus: {}}]", "queue 'a' is declared twice"),
        ("queues: [{name: a, gpus: {nvidia.com/gpu: 4}}]", "queue 'a' names the GPU type 'nvidia.com/gpu', which no"),
        ("queues: []\ninventory: {a b: {count: 4}}", "the inventory names the GPU type 'a b'"),
        ("queues: []\nflavors: [{name: f, gpu_type: nvidia.com/gpu}]", "flavor 'f' has the gpu_type 'nvidia.com/gpu'"),
        ("queues: []\ninventory: {A100: 4}", "inventory.A100: Input should be"),
        ("queues: [{name: a, gpus: {A100: 4}, borrowing_limit: {A100: 2}}]", "has a borrowing_limit and no cohort"),
        ("queues: [{name: a, gpus: {A100: 4}, cohort: c, lending_limit: {T4: 2}}]", "limits T4 in its lending_limit"),
        ("queues: [{name: a, gpus: {A100: 4}, cohort: c, lending_limit: {A100: 5}}]", "lends 5 of its 4 A100"),
        ("queues: [{name: a, gpus: {A100: 4}, weight: 0}]", "queues.0.weight: Input should be greater than 0"),
        ("queues: [{name: a, gpus: {A100: 4}, weight: .nan}]", "queues.0.weight: Input should be a finite number"),
        ("queues: [{name: a, gpus: {A100: 4}, weight: .inf}]", "queues.0.weight: Input should be a finite number"),
        ("queues: [{name: a, gpus: {}, namespaces: []}]", "queues.0.namespaces: Tuple should have at least 1 item"),
        ("queues: [{name: a, gpus: {}, namespaces: ['team-*']}]", "queues.0.namespaces.0: String should match pattern"),
        ("queues: [{name: a, gpus: {}, max_priority: high}]", "queues.0.max_priority: Input should be a valid integer"),
        ("queues: [{name: a, gpus: {}, order: shortest}]", "queues.0.order: Input should be 'arrival' or 'attained'"),
        (
            "queues: [{name: a, gpus: {}, order: attained, attained_gpu_hours: [4, 1]}]",
            "do not rise",
        ),
        (
            "queues: [{name: a, gpus: {}, order: attained, attained_gpu_hours: [4, 4]}]",
            "do not rise",
        ),
        ("queues: [{name: a, gpus: {}, order: attained, attained_gpu_hours: []}]", "should have at least 1 item"),
        ("queues: [{name: a, gpus: {}, attained_gpu_hours: [3]}]", "has attained_gpu_hours and goes by arrival"),
        ("queues: [{name: a, gpus: {}, preempts_longer: true}]", "has preempts_longer and goes by arrival"),
        ("queues: []\nusage_half_life_hours: 0", "usage_half_life_hours: Input should be greater than 0"),
    ],
)
def test_mistake_is_named_with_its_field_and_an_example(tmp_path, text, says):
    path = tmp_path / "queues.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_queues(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_merged_keys_are_no_repeated_keys(tmp_path):
    path = tmp_path / "queues.yaml"
    path.write_text(
        "queues:\n"
        "  - &a {name: a, gpus: {A100: 8}, weight: 2}\n"
        "  - &b {<<: *a, name: b, weight: 3}\n"
        "  - {<<: *b, name: c}\n"
    )
    assert [(one.name, one.weight) for one in load_queues(path).queues] == [("a", 2), ("b", 3), ("c", 3)]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml cannot be read: No such file"):
        load_queues(tmp_path / "none.yaml")


def test_level_is_given_by_the_gpu_hours_at_which_the_next_one_begins():
    queue = Queue(name="a", gpus={}, order="attained", attained_gpu_hours=(1, 8))
    hours = (0, 0.99, 1, 7.9, 8, 1000)
    assert [attained_level(queue, 3600 * one, 1000) for one in hours] == [0, 0, 1, 1, 2, 2]
    assert attained_level(Queue(name="a", gpus={}), 1e9, 1) == 0
    assert Queue.model_validate(queue.model_dump()) == queue


def test_beyond_the_last_level_each_time_slice_is_one():
    queue = Queue(name="a", gpus={}, order="attained", attained_gpu_hours=(1, 8))
    hours = (8, 8 + 2 * 47.9, 8 + 2 * 48, 8 + 2 * 96)
    assert [attained_level(queue, 3600 * one, 2) for one in hours] == [2, 2, 3, 4]
    assert [queue.yield_seconds(level, 2) for level in (2, 3, 40)] == [queue.yield_seconds(2, 2)] * 3
    reached = list(islice(level_ends(queue, 2), 4))
    assert reached == [3600 * one for one in (1, 8, 8 + 2 * 48, 8 + 2 * 96)]
    assert [attained_level(queue, one, 2) for one in reached] == [1, 2, 3, 4]


def test_the_flavors_of_the_documentation_are_read(tmp_path):
    text = (Path(__file__).parents[4] / "docs/queues.md").read_text()
    path = tmp_path / "queues.yaml"
    path.write_text(text.split("## Flavors")[1].split("```yaml\n")[1].split("```")[0])
    declared = load_queues(path)
    assert [one.name for one in declared.flavors] == ["a100-reserved", "a100-spot"]
    assert declared.find("research").flavor_order == ("a100-spot",)


def test_price_of_a_gpu_is_that_of_its_flavor_then_its_type_then_of_all_others():
    flavors = [{"name": "own", "gpu_type": "A100"}, {"name": "far", "gpu_type": "H100"}]
    prices = {"own": 2, "A100": 3, "H100": 4}
    document = {"queues": [{"name": "q", "gpus": {}}], "flavors": flavors, "gpu_prices": prices}
    priced = Queues.model_validate(document)
    found = {kind: priced.find_gpu_price(kind) for kind in ("own", "A100", "far", "T4", "")}
    assert found == {"own": 2, "A100": 3, "far": 4, "T4": None, "": None}
    other = Queues.model_validate({**document, "gpu_prices": {"*": 1}})
    assert other.find_gpu_price("") == 1
