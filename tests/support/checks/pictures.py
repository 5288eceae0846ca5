"""Draws the pictures of docs/ that say what a reader would rather look at; `make golden` writes them.

``python -m support.checks.pictures`` writes them too. The plot of a simulation is made by `tiphys simulate` from the
files that docs/simulate.md shows, so that the page and its picture cannot differ.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from xml.sax.saxutils import escape

from hera_pipelines.cli import main
from support.checks.storeys import ROOT, STYLE

IMAGES = ROOT / "docs" / "images"
_LINE = 15
_ARROWS = """
  .ground { fill: #ffffff }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.4; marker-end: url(#head) } .head { fill: #57606a }
  .dashed { stroke-dasharray: 5 4 } .kept { fill: #4e79a7 } .lost { fill: #e15759 } .held { fill: #bac8d8 }
  .event { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1c2128 } .arrow { stroke: #9198a1 } .head { fill: #9198a1 } .held { fill: #3d4b5c }
  }
"""
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)
_EVENTS = (
    (290, 30, "a request needs the GPUs:"),
    (290, 46, "SIGTERM, it saves, exits 75"),
    (540, 30, "the node dies:"),
    (540, 46, "back-off, another node"),
    (715, 62, "the Workflow is lost"),
    (820, 30, "tiphys resume,"),
    (820, 46, "or by itself"),
    (960, 62, "done"),
)
Points = Sequence[tuple[float, float]]


def text(x: float, y: float, words: str, kind: str = "note", anchor: str = "start") -> str:
    """One line of text; `y` is its base line."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def area(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'


def box(x: float, y: float, width: float, height: float, name: str, *notes: str, kind: str = "box") -> str:
    """A rectangle with a name and lines below it."""
    lines = [text(x + 10, y + 20 + _LINE * number, note) for number, note in enumerate(notes, 1)]
    return "\n".join([area(x, y, width, height, kind), text(x + 10, y + 20, name, "name"), *lines])


def arrow(points: Points, kind: str = "arrow") -> str:
    """A line through points, with a head at its end."""
    return f'<path class="{kind}" d="M {" L ".join(f"{x} {y}" for x, y in points)}"/>'


def _picture(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    style = f"<style>{STYLE.rstrip()}{_ARROWS}</style>"
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([opening, style, _HEAD, ground, *parts, "</svg>\n"])


def components() -> str:
    """Which process talks to which."""
    parts = [
        box(10, 20, 170, 170, "desk", "run, resume, why,", "ui in a browser", "", "reads, plans, claims"),
        box(260, 20, 500, 56, "Argo's workflow controller", "walks the DAG, creates pods and task sets, retries"),
        box(260, 130, 500, 60, "Kubernetes API server", "Workflows, task sets, pods, the GPU ledger, Leases"),
        box(820, 20, 170, 70, "outside", "Alertmanager,", "notifications of buckets"),
        box(220, 270, 170, 90, "pod of a training", "launcher, program with", "tiphys.checkpoint", "or tiphys-exec"),
        box(430, 270, 150, 90, "sidecar or agent", "takes plugin nodes", "from Argo's task sets"),
        box(640, 270, 150, 90, "plugin service", "admit, conclude,", "finalize; shares", "GPUs by queues"),
        box(820, 270, 170, 90, "controller", "records steps, resumes;", "alerts, triggers,", "janitor"),
        box(10, 440, 980, 100, "store: each object is created once", kind="panel"),
        box(20, 470, 470, 60, "data/", "checkpoints, outputs, crash reports, progress: evidence"),
        box(510, 470, 470, 60, "control/", "runs, submissions, attempts and their ends: what Tiphys acts on"),
        arrow([(180, 160), (260, 160)]), text(220, 153, "submits", anchor="middle"),
        arrow([(510, 76), (510, 130)]), text(518, 108, "watches, writes"),
        arrow([(305, 190), (305, 270)]), text(313, 235, "starts and ends"),
        arrow([(505, 190), (505, 270)]), text(513, 235, "task sets"),
        arrow([(580, 315), (640, 315)]), text(610, 308, "HTTP", anchor="middle"),
        arrow([(715, 270), (715, 190)]), text(707, 235, "ledger, pods", anchor="end"),
        arrow([(850, 270), (850, 160), (760, 160)]), text(842, 180, "Workflows", anchor="end"),
        arrow([(940, 90), (940, 270)]), text(932, 180, "webhooks", anchor="end"),
        arrow([(95, 190), (95, 440)]), text(103, 320, "claims,"), text(103, 335, "records"),
        arrow([(305, 360), (305, 470)]), text(313, 405, "saves, restores"),
        arrow([(715, 360), (715, 470)]), text(723, 405, "claims, ends"),
        arrow([(905, 360), (905, 470)]), text(897, 405, "claims, ends", anchor="end"),
    ]  # fmt: skip
    return _picture(1000, 550, "Programs, plugin service, controller and desk meet in the store", parts)


def training() -> str:
    """Attempts of one training over time: preempted, on a node that is lost, without its Workflow, resumed."""
    lanes = ((96, "Workflow"), (146, "GPUs held"), (196, "training"), (256, "checkpoints"), (316, "records"))
    attempts = ((120, 300, 262), (380, 540, 500), (580, 730, 690), (810, 960, 960))
    """From, to, and until where the work is kept."""
    starts = ("", "step 250", "step 400", "step 500")
    saved = (
        (180, "100"),
        (240, "200"),
        (290, "250"),
        (440, "300"),
        (500, "400"),
        (640, "450"),
        (690, "500"),
        (870, "600"),
    )
    ends = ("preempted", "node lost", "fenced", "succeeded")
    parts = [text(10, y + 18, name, "name") for y, name in lanes]
    parts += [
        area(120, 96, 610, 24, "box"),
        text(130, 112, "digits, submission 1"),
        area(800, 96, 160, 24, "box"),
        text(810, 112, "submission 2"),
    ]
    for number, ((begin, end, kept), start, ending) in enumerate(zip(attempts, starts, ends, strict=True), 1):
        kept = end if number == 1 else kept
        parts += [area(begin, 146, end - begin, 24, "held"), area(begin, 196, kept - begin, 24, "kept")]
        parts += [area(kept, 196, end - kept, 24, "lost")] if end > kept else []
        parts += [
            text(begin, 316 + 18, f"claim {number}"),
            text(end, 316 + 36, f"end {number}: {ending}", anchor="end"),
        ]
        parts += [text(begin + 4, 162, f"attempt {number}" + (f", from {start}" if start else ""))]
    parts += [
        f'<circle class="kept" cx="{x}" cy="266" r="5"/>' + text(x, 290, step, anchor="middle") for x, step in saved
    ]
    parts += [arrow([(x, 262), (to, 222)], "arrow dashed") for x, to in ((294, 384), (504, 584), (694, 814))]
    parts += [text(x, y, words, "event", "middle") for x, y, words in _EVENTS]
    parts += [arrow([(x, top), (x, 92)]) for x, top in ((290, 52), (540, 52), (730, 68), (806, 52), (960, 68))]
    parts += [
        *(area(x, 380, 14, 12, kind) for x, kind in ((120, "kept"), (190, "lost"), (620, "held"))),
        *(text(x, 390, words) for x, words in ((140, "kept"), (210, "trained again"))),
        arrow([(310, 386), (345, 386)], "arrow dashed"),
        text(352, 390, "restores the newest checkpoint that is valid"),
        text(640, 390, "GPUs count as held until the pods are gone"),
    ]
    return _picture(1000, 405, "Four attempts of a training: each restores the newest valid checkpoint", parts)


def preemption() -> str:
    """Which trainings may be preempted for a request, and what happens then."""
    parts = [
        box(10, 10, 470, 250, "queue research: its trainings, by priority, then by age", kind="panel"),
        box(520, 10, 470, 250, "another queue of the cohort", kind="panel"),
        box(30, 50, 190, 44, "request", "priority 5, does not fit"),
        box(270, 50, 190, 44, "priority 9", "never for this request"),
        box(270, 110, 190, 44, "priority 2", "a lower priority"),
        box(270, 170, 190, 74, "priority 5, behind it", "more GPU time by a level,", "or started by backfill"),
        box(540, 50, 200, 74, "within its quota", "never for another queue"),
        box(540, 160, 200, 74, "beyond its quota", "borrows what research lacks"),
        arrow([(125, 94), (125, 132), (270, 132)]), text(135, 126, "preempts_lower_priority"),
        arrow([(85, 94), (85, 207), (270, 207)]),
        text(95, 186, "preempts_longer, or"), text(95, 201, "backfill: preemptible"),
        arrow([(50, 94), (50, 280), (640, 280), (640, 234)]),
        text(400, 296, "reclaims: only while the request stays within the quota of research"),
        text(760, 150, "Of those that have had their GPUs"), text(760, 165, "for min_runtime_seconds, the ones go"),
        text(760, 180, "that lose the fewest GPU-seconds"), text(760, 195, "since their last checkpoint; no more"),
        text(760, 210, "than needed, none if it is not enough."),
    ]  # fmt: skip
    steps = (
        ("1 chosen", "every 5 seconds;", "marked in the ledger"),
        ("2 SIGTERM", "the training saves and", "exits 75 in its grace period"),
        ("3 pods are gone", "until then its GPUs", "count as held"),
        ("4 reserved", "for the request, for", "two minutes"),
        ("5 next attempt", "waits in its queue, resumes;", "no retry is charged"),
    )
    for number, (name, *notes) in enumerate(steps):
        parts.append(box(10 + 202 * number, 320, 172, 66, name, *notes))
        parts += [arrow([(182 + 202 * number, 353), (212 + 202 * number, 353)])] if number < len(steps) - 1 else []
    return _picture(1000, 396, "A request preempts only what the rules of its queue name; victims save first", parts)


def simulation() -> str:
    """The plot that docs/simulate.md makes, from the files that it shows."""
    page = (ROOT / "docs" / "simulate.md").read_text()
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(StringIO()):
        for name, content in re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)```", page, re.MULTILINE | re.DOTALL):
            Path(name).write_text(content)
        command = ["simulate", "jobs.csv", "--queues", "queues.yaml", "--against", "proposed.yaml", "--plot", "lab.svg"]
        assert main(command) == 0
        return Path("lab.svg").read_text()


PICTURES: dict[str, Callable[[], str]] = {
    "components.svg": components,
    "training.svg": training,
    "preemption.svg": preemption,
    "simulation.svg": simulation,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
