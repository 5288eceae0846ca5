"""How many members an elastic gang asks for: what of the author's wish stands in a request."""

from typing import Any

from tiphys.protocol.policy import GpuRequest


def asked_for(gpu: GpuRequest, members: int | None = None) -> dict[str, Any]:
    """The fields of a `LeaseRequest` that the author of the step decides.

    An elastic gang asks for the fewest members that it can do with, and says how
    many it would take. With ``members`` it is the request of one that has so many.
    """
    fields = gpu.model_dump()
    if gpu.min_members is None:
        return fields
    asked = members or gpu.min_members
    each = gpu.gpus // gpu.members
    return {**fields, "gpus": each * asked, "members": asked, "max_members": gpu.members}
