"""The shared agent: one process that answers the plugin steps of many workflows, in the place of Argo's agent pods.

With ``disableAgentPodCreation`` Argo's controller only writes task sets, and
whoever may patch their status answers them (Argo Workflows v4.1,
``config/config.go``). What may be written when is decided without I/O in
`taskset`, `nodes` and `turns`; `board` keeps all of it together; `write` and
`ask` do the I/O, and `loop` is threads and time.
"""

from tiphys_plugin.agent.agent import Agent
from tiphys_plugin.agent.agent_process import run
from tiphys_plugin.agent.metrics import AgentMetrics
from tiphys_plugin.agent.settings import AgentSettings

__all__ = ["Agent", "AgentMetrics", "AgentSettings", "run"]
