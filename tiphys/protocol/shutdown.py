"""How Argo says that somebody wanted the end: it writes so at the nodes that it ends, and in two ways.

Source: Argo Workflows ``workflow/controller/exec_control.go`` for pods (``workflow
shutdown with strategy:  Stop``), ``operator.go`` for plugin steps, retries and the
Workflow itself (``Stopped with strategy 'Stop'``).
"""

import re

_SAID = re.compile(r"(shutdown|Stopped) with strategy")


def tells_of_shutdown(message: str) -> bool:
    """Whether a message of a node, or one that is made of such, says that ``spec.shutdown`` was the reason."""
    return bool(_SAID.search(message))
