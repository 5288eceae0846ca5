"""Four processes on one ledger file: together they never hold more than the quota, and nobody fails."""

import subprocess
import sys
from pathlib import Path

from support.ledger import ask, queues
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

QUOTA, PROCESSES, ROUNDS = 8, 4, 60

# Each process keeps asking and giving back, and looks at the total after every grant.
HAMMER = """
import random, sys
from pathlib import Path
from support.ledger import ask, queues
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

path, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ledger = SqliteLedger(path, queues(research={"A100": 8}))
chance = random.Random(me)
print("ready", flush=True)
sys.stdin.readline()
granted = most = 0
for n in range(rounds):
    request = ask(chance.choice([1, 3, 5]), uid=f"{me}-{n}")
    answer = ledger.request(request)
    most = max(most, sum(lease.request.gpus for lease in ledger.snapshot().leases))
    if isinstance(answer, Admitted):
        assert ledger.request(request).lease == answer.lease
        granted += 1
        ledger.release(answer.lease)
    else:
        ledger.withdraw(request.uid)
print(granted, most)
"""


def test_processes_never_hold_more_than_the_quota_together(tmp_path):
    path = tmp_path / "ledger.db"
    hammers = [start(path, str(n)) for n in range(PROCESSES)]
    for hammer in hammers:  # all together, or each would be done before the next one has started
        assert hammer.stdout is not None
        assert hammer.stdout.readline() == "ready\n"
    results = race(hammers)
    assert [hammer.returncode for hammer in hammers] == [0] * PROCESSES, results
    counts = [tuple(map(int, out.split())) for out, _ in results]
    # Who gets the file's lock is up to the system, so one of them may always come when GPUs are taken.
    assert 0 < sum(granted for granted, _ in counts) <= PROCESSES * ROUNDS
    assert max(most for _, most in counts) <= QUOTA
    ledger = SqliteLedger(path, queues(research={"A100": QUOTA}))
    assert ledger.snapshot().leases == ()
    assert isinstance(ledger.request(ask(QUOTA)), Admitted)
    ledger.close()


def start(path: Path, name: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{HAMMER}", str(path), name, str(ROUNDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def race(hammers: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    for hammer in hammers:
        assert hammer.stdin is not None
        hammer.stdin.write("go\n")
        hammer.stdin.flush()
    return [hammer.communicate(timeout=120) for hammer in hammers]
