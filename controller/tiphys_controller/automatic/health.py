"""Can what looks like a failure be believed? A controller that sees badly must not act on what it does not see. Pure.

Recoveries of healthy runs come from there: an API server that times out, a
list that is not complete, a store that is out of reach, or an outage that takes
everything at once and is somebody else's to repair first.
"""

from typing import NamedTuple

from tiphys_controller.automatic.limits import Limits


class Health(NamedTuple):
    """What the controller knows of its own sight."""

    blind: str = ""
    """Why the watches do not show all that there is; empty if they do."""
    calm_seconds: float = float("inf")
    """Since when API server and store have answered everything."""
    failed: int = 0
    """Runs that were seen to have ended without success a short time ago: within the times of `Limits`."""
    vanished: int = 0
    """Those of them whose Workflow is gone."""
    running: int = 0


def distrust(health: Health, limits: Limits, *, vanished: bool) -> str:
    """Why nothing is to be concluded now; empty if something may be. ``vanished``: the run's Workflow is gone."""
    if health.blind:
        return f"not all Workflows are seen at the moment: {health.blind}"
    if health.calm_seconds < limits.calm_seconds:
        return "API server or store did not answer a moment ago"
    if vanished and _is_mass(health.vanished, health, limits):
        return (
            f"{health.vanished} Workflows are gone at once, while {health.running} go on: was the API server restored?"
        )
    if _is_mass(health.failed, health, limits):
        return f"{health.failed} runs failed at once, while {health.running} go on: whatever it is may not be over"
    return ""


def _is_mass(count: int, health: Health, limits: Limits) -> bool:
    return count >= limits.mass and count > health.running
