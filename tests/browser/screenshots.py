"""Writes the pictures of the pages for the documentation: ``make screenshots``. They show the store of the demo."""

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


def main() -> None:
    """Run the demo, and photograph its store."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", f"{folder}/demo"], check=True)
        store = DirectoryStore(Path(folder, "demo", "store"))
        index = RunIndex(store)
        index.refresh()
        with AppServer(build_app(store, index=index)) as server, sync_playwright() as running:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            for name, (path, height) in SHOTS.items():
                page = browser.new_page(viewport={"width": 1280, "height": height})
                page.goto(server.url + path)
                page.evaluate("document.querySelector('.store').textContent = 's3://ml-runs/tiphys'")
                page.screenshot(path=IMAGES / name)
            browser.close()


if __name__ == "__main__":
    main()
