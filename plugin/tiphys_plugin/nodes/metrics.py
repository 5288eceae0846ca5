"""Nodes by verdict, and what their GPUs are used for, read at each scrape; nothing where nobody goes by nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tiphys_plugin.nodes.health import State
from tiphys_plugin.nodes.node import SeenNode


class NodesCollector(Collector):
    """No label takes the name of a node: `tiphys nodes` tells which they are."""

    def __init__(self, seen: Callable[[], Sequence[SeenNode]]) -> None:
        self._seen = seen

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        nodes, gpus = self._families()
        if not (seen := self._seen()):
            return []
        verdicts = Counter(one.verdict.state for one in seen)
        for state in State:
            nodes.add_metric([state.value], verdicts[state])
        usable = [one.node for one in seen if not one.node.cordoned]
        gpus.add_metric(["others"], sum(one.node.foreign_gpus for one in seen))
        gpus.add_metric(["cordoned"], sum(one.node.gpus for one in seen if one.node.cordoned))
        gpus.add_metric(["usable"], sum(max(0, one.gpus - one.foreign_gpus) for one in usable))
        return [nodes, gpus]

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily("tiphys_nodes", "Nodes with GPUs, by verdict on their health.", labels=["verdict"]),
            GaugeMetricFamily(
                "tiphys_node_gpus",
                "GPUs of nodes: used by pods of others, on nodes that get nothing new, usable by trainings.",
                labels=["what"],
            ),
        )
