"""Compiles a training step on several nodes into one object of another controller.

Argo runs one pod for a step. So the step's container becomes the pod template
of an object that creates several pods, such as a Job. The run template becomes a
``resource`` template: Argo creates the object and watches it.
"""

from hera_pipelines.compile.gang.template import check_gang, gang_template

__all__ = ["check_gang", "gang_template"]
