"""What an author lets change between a run and what goes on with it."""

from dataclasses import asdict, dataclass
from typing import Literal

from tiphys.protocol.drift import DriftPolicy, overridden

Action = Literal["allow", "warn", "fork", "refuse"]


@dataclass(frozen=True)
class Drift:
    """What `tiphys resume RUN PIPELINE.py` and `tiphys fork` do about what has changed; see docs/resuming.md.

    ``allow`` says nothing, ``warn`` tells it, ``fork`` lets it happen in a run of
    another name only, ``refuse`` never. None leaves the default.

    Attributes:
        image: Image of a container; by default ``warn``.
        template: Command, arguments, environment, resources, volumes and settings of a step; by default ``warn``.
        code: Source of a function, and the commit that was compiled; by default ``warn``.
        parameters: Values of parameters; by default ``fork``.
        data: Where input artifacts come from; by default ``fork``.
        versions: Python and frameworks, against those that wrote the newest checkpoint; by default ``warn``.
        world_size: GPUs and pods of a training; by default ``warn``.
    """

    image: Action | None = None
    template: Action | None = None
    code: Action | None = None
    parameters: Action | None = None
    data: Action | None = None
    versions: Action | None = None
    world_size: Action | None = None

    def policy(self) -> DriftPolicy:
        """The policy as it is stored with a run.

        Raises:
            UsageError: one of them is no action.
        """
        return overridden(DriftPolicy(), {name: action for name, action in asdict(self).items() if action is not None})
