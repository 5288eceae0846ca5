"""The story on a real cluster with Argo Workflows, which this suite neither builds nor installs.

It runs only when it is asked for, by ``make test-argo``: a kubeconfig that
happens to be set must not make a test run write to somebody's cluster. What it
has to be told is in `settings`.
"""

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support.checks.argo_versions import ModeOutcome, add_outcomes, read_versions, write_versions
from tiphys_controller.doctor import observe_cluster
from tiphys_controller.doctor.checks_argo import is_supported
from tiphys_controller.doctor.observed import ArgoVersion, PluginMode, read_argo_version

from tiphys.errors import TiphysError
from tiphys.kube import connect_to_cluster
from tiphys.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, NAMESPACES
from tiphys.store import open_store

from .settings import Mode, Settings, from_environment
from .world import World, command

_HERE = Path(__file__).parent
_LONGEST_SECONDS = 1800
_CRDS = ("workflows.argoproj.io", "workflowtasksets.argoproj.io")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(_HERE)]
    for item in ours:
        item.add_marker(pytest.mark.argo)
        item.add_marker(pytest.mark.timeout(_LONGEST_SECONDS))
    if "argo" not in config.option.markexpr:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the test for the mode that the cluster is in. A test that was skipped before it began is not counted."""
    report = yield
    modes = getattr(item, "funcargs", {}).get("modes")
    if modes and (report.when == "call" or report.failed):
        modes.outcomes[ModeOutcome(str(modes.now), item.path.stem, report.outcome)] += 1
    return report


@pytest.fixture(scope="session")
def settings() -> Settings:
    return from_environment()


@pytest.fixture(autouse=True)
def own_aws_settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the fixture that hides the AWS settings of a person: here they lead to the run store."""
    for name, value in settings.aws.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def connected(settings: Settings) -> World:
    """The cluster; skips with one sentence if there is none, or it has no Argo."""
    if not settings.kubeconfig:
        pytest.skip("KUBECONFIG names no cluster with Argo Workflows")
    if not settings.image:
        pytest.skip("TIPHYS_ARGO_IMAGE names no image for the training programs")
    try:
        api = connect_to_cluster(Path(settings.kubeconfig))
        missing = [name for name in _CRDS if api.get(CUSTOM_RESOURCE_DEFINITIONS, None, name) is None]
        found = api.get(NAMESPACES, None, settings.namespace)
    except TiphysError as error:
        pytest.skip(f"the cluster of KUBECONFIG does not answer: {error}")
    if missing:
        pytest.skip(f"the cluster of KUBECONFIG has no Argo Workflows: {' and '.join(missing)} are not defined")
    if found is None:
        pytest.skip(f"the cluster has no namespace {settings.namespace}; name one as TIPHYS_ARGO_NAMESPACE")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.aws.items():
            patch.setenv(name, value)
        store = open_store(settings.store, must_exist=True)
    return World(api, store, settings)


@pytest.fixture(scope="session")
def modes(connected: World) -> Iterator["Modes"]:
    switch = Modes(connected.settings, _argo_version(connected))
    yield switch
    switch.to(connected.settings.mode)
    if connected.settings.record:
        assert switch.version, "Argo's controller does not show its version; label its Deployment"
        file = Path(connected.settings.record)
        write_versions(file, add_outcomes(read_versions(file), str(switch.version), switch.outcomes))


def _argo_version(connected: World) -> ArgoVersion | None:
    found = observe_cluster(connected.api, [connected.settings.namespace]).argo.found
    return read_argo_version(found[0]) if found else None


@pytest.fixture
def world(connected: World, modes: "Modes") -> World:
    """The cluster, in the mode that it was given in."""
    modes.to(connected.settings.mode)
    return connected


@pytest.fixture(params=list(Mode), ids=str)
def world_in_each_mode(request: pytest.FixtureRequest, connected: World, modes: "Modes") -> World:
    """The cluster, in sidecar mode and with the shared agent."""
    modes.to(request.param)
    return connected


@pytest.fixture
def world_in_sidecar_mode(connected: World, modes: "Modes") -> World:
    """The cluster, with an agent pod for each Workflow."""
    modes.to(Mode.SIDECAR)
    return connected


class Modes:
    """Switches between sidecars and the shared agent, no more often than needed."""

    def __init__(self, settings: Settings, version: ArgoVersion | None) -> None:
        self._settings = settings
        self.version = version
        self.now = settings.mode
        self.outcomes: Counter[ModeOutcome] = Counter()

    def to(self, mode: Mode) -> None:
        """Bring the cluster to ``mode``; skips the test if nobody said how."""
        if mode is self.now:
            return
        if self.version and not is_supported(self.version, PluginMode(mode)):
            pytest.skip(f"Argo {self.version} has no {mode} mode")
        if not self._settings.switch:
            pytest.skip(f"the cluster is in {self.now} mode, and TIPHYS_ARGO_SWITCH does not say how to change that")
        command([*self._settings.switch.split(), str(mode)])
        self.now = mode
