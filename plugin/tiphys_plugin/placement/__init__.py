"""Which nodes the GPUs of a request come from: best fit or least fragmentation, gangs near together.

Everything here is a pure function of declared nodes and of what is used of
them. The service asks for whole GPUs; shares of GPUs, CPUs and memory of hosts
are there so that clusters which use them can be rehearsed by the same code.
"""

from tiphys_plugin.placement.fragmentation import Fragmentation, typical
from tiphys_plugin.placement.free import Free
from tiphys_plugin.placement.inventory import Inventory
from tiphys_plugin.placement.node import Node
from tiphys_plugin.placement.place import place
from tiphys_plugin.placement.policies import Policy, best_fit
from tiphys_plugin.placement.request import WHOLE_GPU, Ask, Gang, Placement
from tiphys_plugin.placement.shortage import Shortage, Unplaceable

__all__ = [
    "WHOLE_GPU",
    "Ask",
    "Fragmentation",
    "Free",
    "Gang",
    "Inventory",
    "Node",
    "Placement",
    "Policy",
    "Shortage",
    "Unplaceable",
    "best_fit",
    "place",
    "typical",
]
