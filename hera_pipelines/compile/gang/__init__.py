"""A training on several nodes: one object of another controller, which Argo creates and watches.

Argo runs one pod for a step. So the step's container becomes the pod template
of an object that makes several, and the step a ``resource`` template with it.
"""

from hera_pipelines.compile.gang.template import check_gang, gang_template

__all__ = ["check_gang", "gang_template"]
