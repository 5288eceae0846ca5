"""Writes the pictures of the pages for the documentation: ``make screenshots``.

They show the store of the demo, and a small ledger. Neither the folder of the demo nor
the checkout of whoever takes the pictures is in them.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from browser.conftest import ARGUMENTS, CHROMIUM
from playwright.sync_api import sync_playwright
from support.ledger import ask
from tiphys_plugin import SqliteLedger, load_queues

from hera_pipelines.cli.commands.follow.page_gpus import LocalGpus
from hera_pipelines.cli.commands.follow.page_sources import AttemptLogReader, CommandActions
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.page_access import PageAccess
from hera_pipelines.ui.run_index import RunIndex
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOTS = {
    "run-page.png": ("/runs/digits", 1400),
    "runs-page.png": ("/", 420),
    "log-page.png": ("/runs/digits/logs/train?attempt=1", 620),
    "queues-page.png": ("/queues", 720),
}
"""Path of the page and height of the picture by file."""
TOKEN = "a token that signs in for the pictures"
QUEUES = """
queues:
  - {name: research, gpus: {A100: 16}, cohort: lab, reclaims: true}
  - {name: production, gpus: {A100: 8}, cohort: lab, preempts_lower_priority: true}
"""
HELD = (("research", "bert-large-4", 12, 0), ("research", "vision-7", 8, 0), ("production", "ranker-19", 2, 5))
AWAITED = (("production", "ranker-20", 6, 5), ("research", "vision-8", 4, 0))
"""Queue, run, GPUs and priority of each request, in the order of their arrival."""
_REPLACE = """([before, after]) => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(before, after);
}"""


class _StoreInBucket(DirectoryStore):
    """The store of the demo, under a name that a reader could have."""

    @property
    def url(self) -> str:
        return "s3://ml-runs/tiphys"


def _fill_ledger(folder: Path) -> LocalGpus:
    """A ledger in which some requests hold GPUs and some wait."""
    (folder / "queues.yaml").write_text(QUEUES)
    ledger = SqliteLedger(folder / "ledger.db", load_queues(folder / "queues.yaml"))
    for queue, run, gpus, priority in (*HELD, *AWAITED):
        ledger.request(ask(gpus, run, run=run, queue=queue, priority=priority))
    ledger.close()
    return LocalGpus(folder / "ledger.db", folder / "queues.yaml")


def main() -> None:
    """Run the demo, and photograph its store."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", f"{folder}/demo"]
        subprocess.run(command, check=True, env={**os.environ, "GIT_DIR": os.devnull})
        store = _StoreInBucket(Path(folder, "demo", "store"))
        index = RunIndex(store)
        index.refresh()
        actions = ActionRoutes(store, CommandActions(store, LocalWorkflows(Path(folder)), None), PageAccess(TOKEN))
        app = build_app(
            store,
            index=index,
            find_logs=AttemptLogReader(store, None),
            actions=actions,
            gpus=_fill_ledger(Path(folder)),
        )
        with AppServer(app) as server, sync_playwright() as running:
            browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page()
            page.goto(f"{server.url}/sign-in")
            page.fill("input[type=password]", TOKEN)
            page.click("button")
            for name, (path, height) in SHOTS.items():
                page.set_viewport_size({"width": 1280, "height": height})
                page.goto(server.url + path)
                page.evaluate(_REPLACE, [folder, "/mnt/ml"])
                text = page.inner_text("body")
                assert not [word for word in (folder, str(Path.home()), "-dirty") if word in text]
                page.screenshot(path=IMAGES / name)
            browser.close()


if __name__ == "__main__":
    main()
