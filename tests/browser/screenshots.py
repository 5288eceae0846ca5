"""Writes the pictures of the pages for the documentation: ``make screenshots``. They show the store of the demo.

Neither the folder of the demo nor the checkout of whoever takes the pictures is in them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from browser.conftest import ARGUMENTS, CHROMIUM
from playwright.sync_api import sync_playwright

from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.run_index import RunIndex
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOTS = {"run-page.png": ("/runs/digits", 1400), "runs-page.png": ("/", 420)}
"""Path of the page and height of the picture by file."""
_REPLACE = """([before, after]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(before, after);
}"""


class _StoreInBucket(DirectoryStore):
    """The store of the demo, under a name that a reader could have."""

    @property
    def url(self) -> str:
        return "s3://ml-runs/tiphys"


def main() -> None:
    """Run the demo, and photograph its store."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", f"{folder}/demo"]
        subprocess.run(command, check=True, env={**os.environ, "GIT_DIR": os.devnull})
        store = _StoreInBucket(Path(folder, "demo", "store"))
        index = RunIndex(store)
        index.refresh()
        with AppServer(build_app(store, index=index)) as server, sync_playwright() as running:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            for name, (path, height) in SHOTS.items():
                page = browser.new_page(viewport={"width": 1280, "height": height})
                page.goto(server.url + path)
                page.evaluate(_REPLACE, [folder, "/mnt/ml"])
                text = page.inner_text("body")
                assert not [word for word in (folder, str(Path.home()), "-dirty") if word in text]
                page.screenshot(path=IMAGES / name)
            browser.close()


if __name__ == "__main__":
    main()
