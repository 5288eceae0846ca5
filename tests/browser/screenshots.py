"""Writes the pictures of the pages for the documentation: ``make screenshots``.

They show the store of the demo, and a small ledger. Neither the folder of the demo nor
the checkout of whoever takes the pictures is in them.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from browser.conftest import ARGUMENTS, CHROMIUM
from playwright.sync_api import sync_playwright
from starlette.applications import Starlette
from support.builders.ledger import ask
from support.builders.lineage import claim_of, end_of, write_claim, write_end, write_run
from tiphys_plugin import SqliteLedger, load_queues

from hera_pipelines.cli.look.page_gpus import LocalGpus
from hera_pipelines.cli.look.page_sources import AttemptLogReader, CommandActions
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.ui.action_routes import ActionRoutes
from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.page_access import PageAccess
from hera_pipelines.ui.run_index import RunIndex
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import utc_now
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOTS = {
    "run-page.png": ("/runs/digits", 1400),
    "runs-page.png": ("/", 420),
    "log-page.png": ("/runs/digits/logs/train?attempt=1", 620),
}
"""Path of the page and height of the picture by file."""
QUEUE_SHOTS = {"queues-page.png": ("/queues", 1040)}
TOKEN = "a token that signs in for the pictures"
QUEUES = """
queues:
  - {name: research, gpus: {A100: 16}, cohort: lab, reclaims: true}
  - {name: production, gpus: {A100: 8}, cohort: lab, preempts_lower_priority: true}
"""
HOURS = {"bert-large-4": (15, 8), "vision-7": (9,), "ranker-19": (20, 6, 2)}
"""Hours ago at which the attempts of each run began, for the picture of the last day."""
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


def _write_history(folder: Path) -> DirectoryStore:
    """A store with the runs that hold GPUs, each with attempts of the last day."""
    store, now = _StoreInBucket(folder), utc_now()
    for queue, run, gpus, _ in HELD:
        write_run(store, run=run, gpu=GpuRequest(gpus=gpus, queue=queue))
        begun = [now - timedelta(hours=hours) for hours in HOURS[run]]
        for attempt, moment in enumerate(begun, 1):
            write_claim(store, claim_of(attempt, run=run).model_copy(update={"written_at": moment}))
        for attempt, after in enumerate([*begun[1:], now], 1):
            ended = {"run": run, "written_at": after - timedelta(minutes=40 if after < now else 0)}
            write_end(store, end_of(attempt).model_copy(update=ended))
    return store


def main() -> None:
    """Run the demo, and photograph its store; and the queues beside a store of their runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hera_pipelines.cli", "demo", "--dir", f"{folder}/demo"]
        subprocess.run(command, check=True, env={**os.environ, "GIT_DIR": os.devnull})
        store, gpus = _StoreInBucket(Path(folder, "demo", "store")), _fill_ledger(Path(folder))
        actions = ActionRoutes(store, CommandActions(store, LocalWorkflows(Path(folder)), None), PageAccess(TOKEN))
        find_logs = AttemptLogReader(store, None)
        demo = build_app(store, index=_read_index(store), find_logs=find_logs, actions=actions, gpus=gpus)
        history = _write_history(Path(folder, "history"))
        _photograph(demo, SHOTS, folder, TOKEN)
        _photograph(build_app(history, index=_read_index(history), gpus=gpus), QUEUE_SHOTS, folder)


def _read_index(store: DirectoryStore) -> RunIndex:
    index = RunIndex(store, reads_holds=True)
    index.refresh()
    return index


def _photograph(app: Starlette, shots: Mapping[str, tuple[str, int]], folder: str, token: str = "") -> None:
    with AppServer(app) as server, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        if token:
            page.goto(f"{server.url}/sign-in")
            page.fill("input[type=password]", token)
            page.click("button")
        for name, (path, height) in shots.items():
            page.set_viewport_size({"width": 1280, "height": height})
            page.goto(server.url + path)
            page.evaluate(_REPLACE, [folder, "/mnt/ml"])
            text = page.inner_text("body")
            assert not [word for word in (folder, str(Path.home()), "-dirty") if word in text]
            page.screenshot(path=IMAGES / name)
        browser.close()


if __name__ == "__main__":
    main()
