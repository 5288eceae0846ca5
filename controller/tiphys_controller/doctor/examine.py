"""All checks, in the order in which a person should read them."""

from tiphys_controller.doctor import checks_argo as argo
from tiphys_controller.doctor import checks_install as installation
from tiphys_controller.doctor import checks_install as surroundings
from tiphys_controller.doctor.checks_namespace import check_namespace
from tiphys_controller.doctor.finding import Finding
from tiphys_controller.doctor.observed import Observed, mode_of

_CHECKS = (
    # What costs everybody time at each step comes first, and nothing but a look at a clock would show it.
    argo.requeue_time,
    surroundings.server,
    argo.kinds,
    argo.version,
    argo.executor_plugins,
    argo.agent_pods,
    installation.kinds,
    installation.components,
)
_LAST = (argo.exit_codes, surroundings.clocks)


def examine(observed: Observed) -> list[Finding]:
    """Everything that there is to say about a cluster."""
    mode = mode_of(observed.tiphys.found)
    return [
        *(finding for check in _CHECKS for finding in check(observed)),
        *(finding for namespace in observed.namespaces for finding in check_namespace(namespace, mode)),
        *(finding for check in _LAST for finding in check(observed)),
    ]
