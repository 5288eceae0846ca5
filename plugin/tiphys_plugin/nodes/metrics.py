"""Metrics of nodes by verdict and of their GPUs by use, read at each scrape; empty if the queues do not use nodes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tiphys_plugin.nodes.health import NodeHealth
from tiphys_plugin.nodes.node import ObservedNode


class NodesCollector(Collector):
    """Counts of nodes and GPUs. Node names are no labels, to bound the series; `tiphys nodes` lists the nodes."""

    def __init__(self, observed_nodes: Callable[[], Sequence[ObservedNode]]) -> None:
        self._observed_nodes = observed_nodes

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        nodes, gpus = self._families()
        if not (observed := self._observed_nodes()):
            return []
        verdicts = Counter(entry.verdict.state for entry in observed)
        for state in NodeHealth:
            nodes.add_metric([state.value], verdicts[state])
        inventory = [entry.node for entry in observed]
        usable = [node for node in inventory if not node.cordoned]
        gpus.add_metric(["others"], sum(node.foreign_gpus for node in inventory))
        gpus.add_metric(["cordoned"], sum(node.gpus for node in inventory if node.cordoned))
        gpus.add_metric(["usable"], sum(max(0, node.gpus - node.foreign_gpus) for node in usable))
        return [nodes, gpus]

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily("tiphys_nodes", "Nodes with GPUs, by verdict on their health.", labels=["verdict"]),
            GaugeMetricFamily(
                "tiphys_node_gpus",
                "GPUs of nodes: used by foreign pods, on nodes that get no new trainings, usable by trainings.",
                labels=["what"],
            ),
        )
