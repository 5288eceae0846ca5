"""Which item of a fan-out is this node?

The index that Argo shows shifts when a resumed workflow lacks some items, so an
item is known by its value. Equal values are interchangeable: the first node to
ask takes ordinal 0, the next one 1, and each keeps it for its submission.
"""

from itertools import count

from tiphys.protocol.operations import StepOperation, instance_of
from tiphys.protocol.policy import StepSpec
from tiphys.records import ItemBound, item_step
from tiphys.store import Store, claim, find_record
from tiphys_plugin.identity import Binding


def step_id(store: Store, binding: Binding, spec: StepSpec, operation: StepOperation) -> str:
    """The step id of the node that asks; the name of the step if it is not fanned out."""
    if not spec.fan_out:
        return spec.name
    instance = instance_of(operation.node)
    candidates = (item_step(spec.name, operation.item, ordinal) for ordinal in count())
    return next(step for step in candidates if _bound_to(store, binding, step, instance) == instance)


def _bound_to(store: Store, binding: Binding, step: str, instance: str) -> str:
    key = binding.layout.item(binding.submission, step)
    held = find_record(store, key, ItemBound)
    if held is None:
        wanted = ItemBound(
            run=binding.run,
            submission=binding.submission,
            step=step,
            instance=instance,
            label=instance.removeprefix(f"{binding.workflow}."),
        )
        held = claim(store, key, wanted).record
    return held.instance
