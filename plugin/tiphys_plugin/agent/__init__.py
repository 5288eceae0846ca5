"""The shared agent: one process that answers the plugin steps of many workflows, in place of Argo's agent pods.

With ``disableAgentPodCreation`` Argo's controller only writes task sets, and any
process that may patch their status can answer them (Argo Workflows v4.1,
``config/config.go``). `task_sets`, `settings` and `fair_queue` decide without I/O
what may be written when, and `task_state` combines them. `patch` and
`plugin_calls` do the I/O, and `agent` has the threads and the clock.
"""

from tiphys_plugin.agent.agent import SharedAgent
from tiphys_plugin.agent.agent_process import run
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.settings import AgentSettings

__all__ = ["AgentMetrics", "AgentSettings", "SharedAgent", "run"]
