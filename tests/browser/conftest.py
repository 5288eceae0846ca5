"""Real Chromium for the pages of ``tiphys ui``; see ``make test-ui``. Without one these tests are skipped."""

import os
import shutil
from collections.abc import Iterator

import pytest

ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]
"""For root, and for containers with a small /dev/shm."""
PATIENCE_MILLISECONDS = 120_000
"""A deadline, never a duration: playwright's own is half a minute, and the machine may be busy."""
CHROMIUM = os.environ.get("TIPHYS_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-ui` installs playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; install it, or name one by TIPHYS_CHROMIUM")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MILLISECONDS)
        yield browser
        browser.close()
