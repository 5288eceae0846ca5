"""What steps cost the shared agent on a cluster: ``python -m bench.cluster_bench``, with ``tests`` on PYTHONPATH.

After each round comes its baseline: for as many steps one PUT to storage and one patch of an object, in a row.

It needs a cluster whose API server and S3 server this machine reaches: that of
KUBECONFIG, or the project's own, which it starts. Everything but the load
itself is real. `bench.argo` measures mode ``sidecar``. The report goes to
``tests/bench/reports/cluster.json``.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench import processes
from bench.aims import Aim, Measured, verdicts
from bench.latency import Answers, one_round
from bench.machine import NoiseProbe, describe_noise, machine
from bench.place import Place, place
from bench.progress import say
from bench.requests import counted
from bench.samples import percentile, ratio, seconds, summary
from support.processes.agent import AgentProcess
from support.processes.polling import until

from tiphys.kube.resources import CONFIG_MAPS

REPORT = Path(__file__).parent / "reports" / "cluster.json"
ROUNDS = {1: 20, 50: 4, 200: 3, 500: 2}
"""Rounds by number of open steps."""
AIMS = {"over_plain_loop": Aim("≤", 1.5), "api_requests_per_step": Aim("≤", 0.5)}
"""Of quick runs, too, which have the same load."""
STEPS_OF_A_WORKFLOW = 50
REST_SECONDS = 20.0


def main() -> int:
    """Measure, write the report, print the line of numbers."""
    options = _parser().parse_args()
    probe = NoiseProbe()
    with place() as here:
        report: dict[str, Any] = {"machine": machine(), "settings": settings(here)}
        report["agent"] = agent_mode(here, options.quick)
    report["noise"] = probe.report()
    if not options.quick:
        REPORT.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    found = values(report)
    print(*verdicts(found, AIMS), describe_noise(report["noise"], report["machine"]["cores"]), sep="\n")  # noqa: T201  the result
    return 0


def agent_mode(here: Place, quick: bool) -> dict[str, Any]:
    """The shared agent as a process: at rest, under each load, and what it asks of the API server."""
    where = [f"--store={here.store.url}", f"--namespace={here.namespace}", f"--release-namespace={here.namespace}"]
    environment = {**here.store.environment, "KUBECONFIG": str(here.cluster.kubeconfig)}
    began = time.monotonic()
    with AgentProcess(where, environment) as agent, Answers(here) as answers:
        until(lambda: counted(agent.url).get("tiphys_agent_leader") == 1.0)
        result: dict[str, Any] = {"start_seconds": round(time.monotonic() - began, 1), "loads": {}}
        here.api.create(CONFIG_MAPS, here.namespace, {"metadata": {"name": "plain"}, "data": {}})
        one_round(here, answers, "warm-up", [1])
        before = processes.cost(agent.pid)
        time.sleep(2.0 if quick else REST_SECONDS)
        result["at_rest"] = processes.between(before, processes.cost(agent.pid))
        for count, rounds in ({200: 1} if quick else ROUNDS).items():
            result["loads"][str(count)] = _load(here, agent, answers, count, rounds)
        result["one_task_set_of_500"] = None if quick else _load(here, agent, answers, 500, 2, together=True)
    return result


def _load(
    here: Place, agent: AgentProcess, answers: Answers, count: int, rounds: int, together: bool = False
) -> dict[str, Any]:
    sizes = [count] if together else [STEPS_OF_A_WORKFLOW] * (count // STEPS_OF_A_WORKFLOW) or [count]
    requests, before, times = counted(agent.url), processes.cost(agent.pid), []
    bursts, loops = [], []
    for number in range(rounds):
        kind = "one" if together else "load"
        answered = one_round(here, answers, f"{kind}-{count}-{number}", sizes)
        times += answered
        bursts.append(max(answered) / 1000)
        loops.append(seconds(partial(_plain_steps, here, count)))
    cost = processes.between(before, processes.cost(agent.pid))
    asked = {name: value - requests.get(name, 0.0) for name, value in counted(agent.url).items()}
    total = sum(value for name, value in asked.items() if name.startswith("tiphys_agent_api_requests_total"))
    result = {
        "workflows": len(sizes),
        "rounds": rounds,
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "most_ms": round(max(times), 1),
        "plain_loop_seconds": summary(loops),
        "over_plain_loop": ratio(bursts, loops),
        "api_requests_per_step": round(total / len(times), 2),
        "patches_per_step": round(
            sum(v for k, v in asked.items() if k.startswith("tiphys_agent_patches_total")) / len(times), 3
        ),
        "process": cost,
    }
    say(f"{count} open steps in {len(sizes)} workflows: {json.dumps(result)}")
    return result


def _plain_steps(here: Place, count: int) -> None:
    """The least that answers to so many steps take: a PUT of a claim and a patch for each, one after the other."""
    client = here.store.client()
    for number in range(count):
        client.put_object(Bucket=here.store.bucket, Key=f"plain/{number}", Body=b"{}")
        here.api.patch(CONFIG_MAPS, here.namespace, "plain", {"data": {"step": str(time.monotonic())}})


def settings(here: Place) -> dict[str, Any]:
    version = here.api.get_path("/version")["gitVersion"]
    return {
        "kubernetes": version,
        "rounds": ROUNDS,
        "seed": "none: nothing is random",
        "steps_of_a_workflow": STEPS_OF_A_WORKFLOW,
        "load": "all task sets of a round are created at once; every step is admitted, none needs GPUs",
        "clock": "from the request that creates the task set to the watch event that holds the final answer",
    }


def values(report: dict[str, Any]) -> dict[str, Measured]:
    """Those of 200 open steps."""
    load = report["agent"]["loads"]["200"]
    return {name: load[name] for name in ("over_plain_loop", "api_requests_per_step", "p50_ms", "p99_ms")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 200 open steps only; writes no report")
    return parser


if __name__ == "__main__":
    sys.exit(main())
