import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hera.shared import global_config
from hypothesis import HealthCheck, settings
from support.servers.emulators import azure_container, azure_endpoint, gcs_bucket, gcs_endpoint, own_cloud_settings
from support.servers.s3 import bucket, own_aws_settings, s3_endpoint

from tiphys import faults

if TYPE_CHECKING:
    from tiphys.store import DirectoryStore

# Tests start hundreds of processes that import the same modules. Compiled once, beside the installed packages, these
# cost half as much: so that is done whatever the shell says of bytecode, and nothing of it appears in the working tree.
sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(sys.prefix) / "pycache")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# What a person set for a terminal, or a service of continuous integration for its log, changes tables and colours.
_COLOURS = ("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS")
for _name in (*_COLOURS, "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)

# A shell has the programs that it starts in the background ignore Ctrl-C, and nohup has them ignore a closed terminal;
# they hand that on to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test takes the power away, and a disk takes its time. What a SIGKILL leaves behind does not depend on it.
os.fsync = lambda descriptor: None

# The same examples on every machine, and as long as it takes: a slow moment is no wrong answer.
settings.register_profile(
    "tiphys", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("tiphys"), derandomize=False, max_examples=100, print_blob=True)
settings.load_profile("tiphys")

_folder_numbers = count()

__all__ = [
    "azure_container",
    "azure_endpoint",
    "bucket",
    "gcs_bucket",
    "gcs_endpoint",
    "own_aws_settings",
    "own_cloud_settings",
    "s3_endpoint",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Ten thousand collected tests are no garbage, and looking for some among them again and again takes its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def process_is_as_imported() -> Iterator[None]:
    """No test meets what one before it has left in this process.

    The n-th passage of a fault point is the n-th of this test. A command that ran here has set up logging, and an
    author's file has set Hera's settings, for itself and for all that follows. One fixture, as thousands of tests pay
    for each.
    """
    faults._calls = Counter()
    before = dict(vars(global_config))
    yield
    # Most test files need none, and its import takes as long as that of pytest and hypothesis together.
    if stories := sys.modules.get("support.stories.plugin"):
        stories.close_worlds()
    structlog.reset_defaults()
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(None)
    vars(global_config).clear()
    vars(global_config).update(before)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of pytest's, which looks through the folders of all tests before to find a number for the next."""
    folder = tmp_path_factory.getbasetemp() / f"{request.function.__name__[:30]}-{next(_folder_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> "DirectoryStore":
    from tiphys.store import DirectoryStore  # only here, as the process that hands out the tests needs none

    return DirectoryStore(tmp_path / "store")
