"""What it costs a training to go for another: what it has done since its last commit, the save, and the way back."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Of trainings that are asked to leave, in seconds.

    ``waits_for_save`` False: none is asked, each is ended at once and goes back to its last commit, as where
    nobody knows of checkpoints.
    """

    checkpoint_every_seconds: float = 600.0
    """Training between two commits that nobody asked for."""
    save_seconds: float = 30.0
    """From being asked to being gone, with all that was done until then committed."""
    restart_seconds: float = 60.0
    """From having GPUs again to training again: images, processes, and reading the checkpoint."""
    waits_for_save: bool = True
    look_every_seconds: float = 0.0
    """How often a service looks who has to go, and who waits asks; 0: at once."""


@dataclass(frozen=True)
class Try:
    """An attempt from the moment it has its GPUs: first the way back, then training until nothing of it is left."""

    started_seconds: float
    restart_seconds: float
    left_seconds: float
    """Training that was still to be done when it started."""

    @property
    def ends_seconds(self) -> float:
        """If nobody asks it to leave."""
        return self.started_seconds + self.restart_seconds + self.left_seconds

    def trained(self, now: float) -> float:
        """Seconds of training until ``now``."""
        return min(max(0.0, now - self.started_seconds - self.restart_seconds), self.left_seconds)

    def committed(self, now: float, costs: Costs) -> float:
        """Of these, what a checkpoint holds that nobody asked for."""
        every = costs.checkpoint_every_seconds
        return min(self.trained(now), every * math.floor(self.trained(now) / every))

    def saved_at(self, now: float, costs: Costs) -> float:
        """When the newest checkpoint was committed; its start, if there is none yet."""
        committed = self.committed(now, costs)
        return self.started_seconds + self.restart_seconds + committed if committed else self.started_seconds

    def asked(self, now: float, costs: Costs) -> "Departure":
        """What becomes of it if it is asked to leave at ``now``."""
        trained = self.trained(now)
        kept = trained if costs.waits_for_save else self.committed(now, costs)
        restarting = min(self.restart_seconds, now - self.started_seconds)
        return Departure(now + (costs.save_seconds if costs.waits_for_save else 0.0), kept, trained - kept, restarting)


@dataclass(frozen=True)
class Departure:
    """When it is gone, and of its time until then: training that is kept, that is lost, and the way back before."""

    gone_seconds: float
    kept_seconds: float
    lost_seconds: float
    restart_seconds: float
