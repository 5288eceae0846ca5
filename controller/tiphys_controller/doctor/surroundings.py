"""Checks of the cluster as such: does the API server answer, do the clocks of the nodes agree? Each is pure."""

from tiphys_controller.doctor.finding import Finding, failed, ok, unknown, warning
from tiphys_controller.doctor.observed import Clock, Observed, Unknown

_WARN_SECONDS = 60.0
_FAIL_SECONDS = 600.0
"""S3 refuses requests that are signed 900 s off, and the clock goes on drifting."""


def server(observed: Observed) -> list[Finding]:
    """The API server, by its version."""
    if isinstance(observed.version, Unknown):
        return [unknown("api-server", observed.version.reason)]
    return [ok("api-server", f"{observed.server} answers, Kubernetes {observed.version}")]


def clocks(observed: Observed) -> list[Finding]:
    """Storage refuses what a machine with a wrong clock signs, and the times of records mislead people."""
    if isinstance(observed.clocks, Unknown):
        return [unknown("clocks", observed.clocks.reason)]
    if not observed.clocks:
        return [unknown("clocks", "no node has renewed its Lease")]
    wrong = sorted((one for one in observed.clocks if abs(one.ahead_seconds) >= _WARN_SECONDS), key=_distance)
    if wrong:
        return [_wrong(one) for one in wrong]
    return [ok("clocks", f"the clocks of {len(observed.clocks)} nodes agree with the API server's within a minute")]


def _wrong(clock: Clock) -> Finding:
    where = "ahead of" if clock.ahead_seconds > 0 else "behind"
    sentence = f"the clock of node {clock.node} is {abs(clock.ahead_seconds):,.0f} s {where} the API server's"
    remedy = f"set up time synchronisation on {clock.node} (chronyc tracking, timedatectl timesync-status)"
    if abs(clock.ahead_seconds) < _FAIL_SECONDS:
        return warning("clocks", f"{sentence}; S3 refuses requests from 900 s on", remedy)
    return failed(
        "clocks", f"{sentence}: S3 refuses what its pods sign", f"{remedy}; until then: kubectl cordon {clock.node}"
    )


def _distance(clock: Clock) -> float:
    return -abs(clock.ahead_seconds)
