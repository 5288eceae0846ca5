"""Judges what a simulation leaves, by its history and its bucket alone: `python checker.py FOLDER`.

It reads JSON and bytes with code of its own and imports nothing of Tiphys, so that no misunderstanding is shared. The
folder holds ``history.jsonl``, with an event in each line, and the objects of the bucket below ``bucket/``.

| law | what breaks it |
|---|---|
| acknowledged | a checkpoint that a program was told of and that the next attempt does not start from |
| commit | a manifest without its shards, or of an attempt that could have seen its end |
| retention | the deletion of what is pinned, of what an attempt starts from, of one of the newest checkpoints |
| quota | more GPUs in pods than the queue has |
| submission | two Workflows of a submission or run at once, a pod of one that is not bound; two answers to one key |
| end | a run without its end, an attempt without one, a result that differs from an undisturbed training |
| object | an object that no record explains |

An attempt that is cut off may commit after its end was recorded, if it looked before: no store can exclude that.
Such a commit is *late*. It is counted, and it is not acknowledged in the sense of the first law.
"""

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

KEY_PATTERNS = (
    r"control/format\.json",
    r"control/idempotency-keys/[^/]+",
    r"control/newest/\d{5}/\d{8}-(?P<listed>.+)",
    r"control/open/(?P<opened>.+)\.(?P<open_number>\d{9})\.\d{13}",
    r"control/runs/(?P<run>[^/]+)/run\.json",
    r"control/runs/(?P<run>[^/]+)/workflows/[0-9a-f]{64}\.json",
    r"control/runs/(?P<run>[^/]+)/submissions/(?P<submission>\d{9})(?P<part>\.bound|\.end|)\.json",
    r"control/runs/(?P<run>[^/]+)/submissions/(?P<joined>\d{9})\.key-[0-9a-f]{64}",
    r"control/runs/(?P<run>[^/]+)/attempts/(?P<step>[^/]+)/(?P<attempt>\d{9})(?P<part>\.end|)\.json",
    r"control/runs/(?P<run>[^/]+)/done/(?P<step>[^/]+)/(?P<done>\d{9})-[0-9a-f]{64}",
    r"control/runs/(?P<run>[^/]+)/reused/\d{9}/[^/]+",
    r"control/runs/(?P<run>[^/]+)/(auto-resumes|events|reports)/[^/]+",
    r"data/runs/(?P<run>[^/]+)/outputs/(?P<step>[^/]+)/(?P<of>\d{9})/.+",
    r"data/runs/(?P<run>[^/]+)/incarnations/(?P<step>[^/]+)/(?P<of>\d{9})/.+",
    r"data/runs/(?P<run>[^/]+)/(events|output|progress)/.+",
    r"data/lineages/(?P<run>[^/]+)/(?P<step>[^/]+)/manifests/(?P<count>\d{9}-\d{15})\.json",
    r"data/lineages/(?P<run>[^/]+)/(?P<step>[^/]+)/shards/(?P<shard>\d{9}-\d{15})/.+",
    r"data/lineages/(?P<run>[^/]+)/(?P<step>[^/]+)/pins/(?P<count>\d{9}-\d{15})/(?P<pin>.+)\.json",
    r"data/lineages/(?P<run>[^/]+)/(?P<step>[^/]+)/tombstones/(?P<tomb>\d{9}-\d{15})/?.*",
    r"data/lineages/(?P<run>[^/]+)/(?P<step>[^/]+)/(training-progress|step-times)/.+",
)
_FOUND_BY_MARKERS = re.compile(r"control/runs/(.+)/(?:run|submissions/(\d{9}))\.json")
_KEYS = [re.compile(pattern, re.DOTALL) for pattern in KEY_PATTERNS]
_MOST_ATTEMPT, _MOST_STEP = 10**9 - 1, 10**15 - 1
GPUS_OF_QUEUE = 8
TRAINING_STEPS = 60


class Verdict:
    """What the checker found. ``violations`` are pairs of a law and a sentence."""

    def __init__(self):
        self.violations = []
        self.acknowledged = 0
        self.lost = 0
        self.late = 0
        self.left = 0
        """Shards of a last save that failed."""
        self.strays = 0
        """Workflows of submissions that are bound to an earlier one, which is over; they may start no pod."""
        self.faults = Counter()

    def broken(self, law, sentence):
        if (law, sentence) not in self.violations:
            self.violations.append((law, sentence))


def parse(key):
    """Fields of a key; None for one that nothing writes."""
    for pattern in _KEYS:
        if match := pattern.fullmatch(key):
            return {name: value for name, value in match.groupdict().items() if value is not None}
    return None


def _led_to(fields):
    """Run and number of the submission that a key leads to, without a number for the run itself; None for others."""
    if "listed" in fields:
        return fields["listed"], ""
    return (fields["opened"], fields["open_number"]) if "opened" in fields else None


def counted_down(text):
    """Attempt and step of a name that counts down."""
    attempt, step = text.split("-")
    return _MOST_ATTEMPT - int(attempt), _MOST_STEP - int(step)


def counted_up(text):
    """Attempt and step of a name that counts up."""
    attempt, step = text.split("-")
    return int(attempt), int(step)


class Lineage:
    """What the history shows of the checkpoints of one training."""

    def __init__(self):
        self.starts = {}
        """What each claimed attempt starts from: attempt and step, or None."""
        self.claimed_at = {}
        self.claimed_by = {}
        """Uid of the Workflow that claimed each attempt."""
        self.ended_at = {}
        self.restored = set()
        self.manifests = {}
        """Present manifests, by attempt and step, each with its late mark."""
        self.shards = defaultdict(dict)
        """Present shards of each checkpoint, by key: size and SHA-256."""
        self.stored_at = {}
        """When each process last stored a shard of each checkpoint."""
        self.acknowledged = {}
        """Whether each checkpoint that a program was told of was late."""
        self.pins = Counter()
        self.pin_names = set()

    def chain(self):
        """The highest step that counts of each attempt, from the newest backwards; None for all of it."""
        attempt, ceiling, found = max(self.starts, default=None), None, {}
        while attempt is not None and attempt in self.starts and attempt not in found:
            found[attempt] = ceiling
            start = self.starts[attempt]
            attempt, ceiling = start if start else (None, None)
        return found

    def counts(self, checkpoint, chain):
        attempt, step = checkpoint
        return attempt in chain and (chain[attempt] is None or step <= chain[attempt])


class Checker:
    """Reads one history and one bucket."""

    def __init__(self, history, objects):
        self.verdict = Verdict()
        self._history = history
        self._objects = objects
        self._lineages = defaultdict(Lineage)
        self._fence_looks = {}
        """When each process last began to look at the attempts of a step."""
        self._pods = {}
        self._workflows = {}
        """Uid of the Workflow of each run and submission."""
        self._bound = {}
        self._living = set()
        self._running = {}
        self._forcing = set()
        """Commands that take a run over although its Workflow may run."""
        self._answers = {}
        self._found_by = defaultdict(set)
        """Present keys that lead to each run, and to each submission of which no end is known."""
        self._created = set()
        self._last_claims = {}
        """Number of the last claimed submission of each run."""

    def check(self):
        handlers = {
            "create": self._create,
            "delete": self._delete,
            "list": self._list,
            "acknowledged": self._acknowledge,
            "restored": self._restore,
            "pinned": self._pin,
            "unpinning": self._unpin,
            "pod started": self._start_pod,
            "pod ended": lambda index, event: self._pods.pop(event["pod"], None),
            "forced": self._force,
            "workflow created": self._create_workflow,
            "workflow ended": self._end_workflow,
            "workflow deleted": self._end_workflow,
            "start answered": self._answer,
            "resume answered": self._answer,
            "fault": lambda index, event: self.verdict.faults.update([event["kind"]]),
        }
        for index, event in enumerate(self._history):
            if handler := handlers.get(event["event"]):
                handler(index, event)
        self._check_objects()
        self._check_ends()
        return self.verdict

    def _create(self, index, event):
        fields = parse(event["key"])
        if fields is None:
            return
        self._created.add(event["key"])
        if match := _FOUND_BY_MARKERS.fullmatch(event["key"]):  # the marker comes first
            self._last_claims[match[1]] = max(match[2] or "", self._last_claims.get(match[1], ""))
            self._check_found((match[1], match[2] or ""))
        if place := _led_to(fields):
            self._found_by[place].add(event["key"])
        lineage = self._lineages[fields["run"], fields["step"]] if "step" in fields else None
        if fields.get("part") == ".bound":
            self._bound[fields["run"], int(fields["submission"])] = json.loads(event["body"])["uid"]
        if "attempt" in fields:
            number = int(fields["attempt"])
            if fields["part"]:
                lineage.ended_at.setdefault(number, index)
                self._end(event, fields, number)
            else:
                self._claim(index, event, fields, lineage, number)
        elif "shard" in fields:
            lineage.shards[counted_up(fields["shard"])][event["key"]] = (event["size"], event["sha256"])
            lineage.stored_at[event["by"], counted_up(fields["shard"])] = index
        elif "/manifests/" in event["key"]:
            self._commit(index, event, fields, lineage)

    def _claim(self, index, event, fields, lineage, number):
        """The next attempt must begin where the one before was told that it had come to."""
        claim = json.loads(event["body"])
        start, lineage.claimed_by[number] = claim.get("starts_from"), claim.get("uid")
        name = f"attempt {number} of {fields['run']}"
        if number > 1 and fields["step"] == "fit" and (number - 1) not in lineage.ended_at:
            self.verdict.broken("end", f"{name} began before the end of the one before it")
        before = lineage.chain()
        if start and not lineage.counts((start["attempt"], start["global_step"]), before):
            self.verdict.broken("commit", f"{name} starts from {start}, which does not count")
        in_time = [checkpoint for checkpoint, late in lineage.acknowledged.items() if not late]
        told = [checkpoint[1] for checkpoint in in_time if lineage.counts(checkpoint, before)]
        lineage.starts[number] = (start["attempt"], start["global_step"]) if start else None
        lineage.claimed_at[number] = index
        floor = max(told, default=0)
        if (start["global_step"] if start else 0) < floor:
            self.verdict.lost += 1
            where = f"step {start['global_step']}" if start else "the beginning"
            self.verdict.broken("acknowledged", f"{name} starts from {where}, and step {floor} was told")

    def _end(self, event, fields, number):
        attempt, end = (fields["run"], fields["step"], number), json.loads(event["body"])
        # The service has to see that nothing runs, unless a later submission has taken over.
        newest = 0 if end.get("stopped") else int(self._last_claims.get(fields["run"]) or 0)
        is_fence = end["outcome"] == "fenced" and (end.get("submission", 0) < newest or "plugin" not in event["by"])
        if not is_fence and attempt in [pod[1:] for pod in self._pods.values()]:
            self.verdict.broken("end", f"attempt {attempt} was ended while a pod of it ran")

    def _commit(self, index, event, fields, lineage):
        checkpoint = counted_down(fields["count"])
        attempt, name = checkpoint[0], f"checkpoint {checkpoint} of {fields['run']}"
        if attempt not in lineage.claimed_at:
            self.verdict.broken("commit", f"{name} is of an attempt that was never claimed")
        later_claims = [at for other, at in lineage.claimed_at.items() if other > attempt]
        fence = min([lineage.ended_at.get(attempt, index), *later_claims])
        # Retention of the next attempt may have swept the shards of one that is late.
        for shard in json.loads(event["body"])["shards"] if fence == index else ():
            if lineage.shards[checkpoint].get(shard["key"]) != (shard["size"], shard["sha256"]):
                self.verdict.broken("commit", f"{name} was committed before its shard {shard['key']}")
        looked = self._fence_looks.get((event["by"], fields["run"], fields["step"]), -1)
        if fence < index and fence < looked:
            self.verdict.broken("commit", f"{name} was committed although its attempt could see its end")
        if looked < lineage.stored_at.get((event["by"], checkpoint), -1):
            self.verdict.broken("commit", f"{name} was committed without a look at its fence after its upload")
        lineage.manifests[checkpoint] = fence < index
        self.verdict.late += fence < index

    def _delete(self, index, event):
        fields = parse(event["key"])
        if fields and (place := _led_to(fields)):
            self._found_by[place].discard(event["key"])
            self._check_found(place)
            return
        if fields is None or "step" not in fields or "/lineages/" not in event["key"]:
            if fields is None or "/events/" not in event["key"]:
                self.verdict.broken("retention", f"{event['key']} was deleted")
            return
        lineage = self._lineages[fields["run"], fields["step"]]
        if "shard" in fields:
            checkpoint = counted_up(fields["shard"])
            if checkpoint in lineage.manifests and event["key"] in lineage.shards[checkpoint]:
                self.verdict.broken("retention", f"{event['key']} was deleted before its manifest")
            if lineage.pins[checkpoint] > 0:
                name = f"checkpoint {checkpoint} of {fields['run']}"
                self.verdict.broken("retention", f"{name} was deleted although it was pinned")
            lineage.shards[checkpoint].pop(event["key"], None)
        elif "/manifests/" in event["key"]:
            self._delete_manifest(fields, lineage)

    def _delete_manifest(self, fields, lineage):
        checkpoint = counted_down(fields["count"])
        name = f"checkpoint {checkpoint} of {fields['run']}"
        late = lineage.manifests.pop(checkpoint, False)
        chain, newest = lineage.chain(), max(lineage.starts, default=0)
        if lineage.starts.get(newest) == checkpoint and newest not in lineage.restored | set(lineage.ended_at):
            self.verdict.broken("retention", f"{name} was deleted although attempt {newest} starts from it")
        left = [found for found in lineage.manifests if lineage.counts(found, chain) and found > checkpoint]
        if not late and lineage.counts(checkpoint, chain) and len(left) < 2:
            self.verdict.broken("retention", f"{name} was deleted, and {len(left)} newer ones were left")

    def _list(self, index, event):
        match = re.fullmatch(r"control/runs/([^/]+)/attempts/([^/]+)/", event["prefix"])
        if match and event["page"] == 0:
            self._fence_looks[event["by"], match[1], match[2]] = index

    def _acknowledge(self, index, event):
        lineage = self._lineages[event["run"], event["step"]]
        checkpoint = (event["attempt"], event["global_step"])
        self.verdict.acknowledged += 1
        if checkpoint not in lineage.manifests and checkpoint not in lineage.acknowledged:
            newer = [found for found in lineage.manifests if found > checkpoint]
            if len(newer) < 2:
                self.verdict.lost += 1
                self.verdict.broken("acknowledged", f"{checkpoint} of {event['run']} was told, and is not there")
        lineage.acknowledged.setdefault(checkpoint, lineage.manifests.get(checkpoint, False))

    def _restore(self, index, event):
        lineage = self._lineages[event["run"], event["step"]]
        lineage.restored.add(event["attempt"])
        start = lineage.starts.get(event["attempt"])
        if event["at"] < (start[1] if start else 0):
            self.verdict.lost += 1
            name = f"attempt {event['attempt']} of {event['run']}"
            self.verdict.broken("acknowledged", f"{name} restored step {event['at']} of {start}")

    def _pin(self, index, event):
        run, _, step = event["lineage"].partition("/")
        lineage, checkpoint = self._lineages[run, step], (event["attempt"], event["global_step"])
        lineage.pins[checkpoint] += 1
        lineage.pin_names.add(event["name"])
        if checkpoint not in lineage.manifests:
            self.verdict.broken("retention", f"{checkpoint} of {run} was pinned after its deletion")

    def _unpin(self, index, event):
        run, _, step = event["lineage"].partition("/")
        self._lineages[run, step].pins[event["attempt"], event["global_step"]] -= 1

    def _start_pod(self, index, event):
        claimant = self._lineages[event["run"], event["step"]].claimed_by.get(event["attempt"])
        if claimant != event["uid"]:
            name = f"attempt {event['attempt']} of {event['step']} of {event['run']}"
            self.verdict.broken("submission", f"{event['uid']} starts a pod of {name}, which {claimant} claimed")
        if event["uid"] not in self._bound.values():
            self.verdict.broken("submission", f"{event['uid']} starts a pod, and no submission is bound to it")
        self._pods[event["pod"]] = (event["gpus"], event["run"], event["step"], event["attempt"])
        if (held := sum(gpus for gpus, *_ in self._pods.values())) > GPUS_OF_QUEUE:
            self.verdict.broken("quota", f"{held} GPUs are in use at {event['t']} s, and the queue has {GPUS_OF_QUEUE}")

    def _create_workflow(self, index, event):
        submission = (event["run"], event["submission"])
        if self._workflows.get(submission) in self._living:
            self.verdict.broken("submission", f"submission {submission} has a second Workflow {event['uid']}")
        self._living.add(event["uid"])
        if submission in self._bound:
            self.verdict.strays += 1
            return
        self._workflows[submission] = event["uid"]
        if event["run"] in self._running and event["by"] not in self._forcing:
            self.verdict.broken("submission", f"Workflow {event['name']} was created while another of its run ran")
        self._running[event["run"]] = event["uid"]

    def _force(self, index, event):
        """A person takes the run over, whatever runs of it."""
        self._forcing.add(event["by"])
        self._running.pop(event["run"], None)

    def _end_workflow(self, index, event):
        self._living.discard(event["uid"])
        self._running = {run: uid for run, uid in self._running.items() if uid != event["uid"]}

    def _answer(self, index, event):
        answer = event.get("uid") or event.get("submission")
        if self._answers.setdefault((event["event"], event["key"]), (event["run"], answer)) != (event["run"], answer):
            self.verdict.broken("submission", f"{event['event']} under key {event['key']} in two ways")

    def _record(self, key):
        return json.loads(self._objects[key]) if key in self._objects else None

    def _check_found(self, place):
        """A recorded run is listed, and so is its last submission if that was claimed and has no end."""
        run, number = place
        claim = f"control/runs/{run}/submissions/{number}" if number else f"control/runs/{run}/run"
        is_over = number and (f"{claim}.end.json" in self._created or number < self._last_claims.get(run, ""))
        if f"{claim}.json" in self._created and not is_over and not self._found_by[place]:
            self.verdict.broken("object", f"nothing leads to {claim}.json")

    def _check_objects(self):
        for key, data in self._objects.items():
            fields = parse(key)
            if fields and (match := _FOUND_BY_MARKERS.fullmatch(key)):
                self._check_found((match[1], match[2] or ""))
            if fields is None:
                self.verdict.broken("object", f"nothing writes {key}")
                continue
            if (reason := self._unexplained(key, fields, data)) is not None:
                self.verdict.broken("object", f"{key}: {reason}")

    def _unexplained(self, key, fields, data):
        run = fields.get("run")
        if run and f"control/runs/{run}/run.json" not in self._objects:
            return "its run is not recorded"
        if "/lineages/" in key:
            return self._unexplained_checkpoint(key, fields, data)
        if fields.get("part") and key.replace(fields["part"] + ".json", ".json") not in self._objects:
            return "its claim is gone"
        if "joined" in fields and f"{key.partition('.key-')[0]}.json" not in self._objects:
            return "its claim is gone"
        if ".bound" in key and self._workflows.get((run, int(fields["submission"]))) != json.loads(data)["uid"]:
            return "it is bound to a Workflow that its submission never had"
        if "attempt" in fields and not fields["part"]:
            number = json.loads(data)["submission"]
            if f"control/runs/{run}/submissions/{number:09d}.json" not in self._objects:
                return "its submission was never claimed"
        claim = f"control/runs/{run}/attempts/{fields.get('step')}/{fields.get('of') or fields.get('done')}"
        if "done" in fields and (self._record(f"{claim}.end.json") or {"outcome": ""})["outcome"] != "done":
            return "its attempt is not done"
        if "of" in fields and f"{claim}.json" not in self._objects:
            return "its attempt was never claimed"
        return None

    def _unexplained_checkpoint(self, key, fields, data):
        manifests = self._lineages[fields["run"], fields["step"]].manifests
        if "shard" in fields and counted_up(fields["shard"]) not in manifests:
            # Retention cannot tell the shards of a last save that failed from those of one that is under way.
            is_last = counted_up(fields["shard"]) > max(manifests, default=(0, 0))
            self.verdict.left += is_last
            return None if is_last else "no manifest names it"
        if "tomb" in fields and counted_down(fields["tomb"]) not in manifests:
            return "it marks a checkpoint that is gone"
        # A pin that came too late, and whose command was killed or lost the store, stays.
        told = fields.get("pin") in self._lineages[fields["run"], fields["step"]].pin_names
        if told and counted_down(fields["count"]) not in manifests:
            return "its checkpoint is gone"
        return self._damage(json.loads(data)) if "/manifests/" in key else None

    def _damage(self, manifest):
        document = {name: value for name, value in manifest.items() if name != "seal"}
        for shard in document["shards"]:
            data = self._objects.get(shard["key"])
            if data is None or len(data) != shard["size"] or hashlib.sha256(data).hexdigest() != shard["sha256"]:
                return f"its shard {shard['key']} is missing or damaged"
        return None

    def _check_ends(self):
        settings = next((event for event in self._history if event["event"] == "settings"), {"keys": []})
        if not any(event["event"] == "over" and event["settled"] for event in self._history):
            self.verdict.broken("end", "not every run came to its end, although nothing failed any more")
        runs = {run for (kind, _), (run, _) in self._answers.items() if kind == "start answered"}
        if len(runs) != len(settings["keys"]):
            self.verdict.broken("submission", f"{len(settings['keys'])} keys began {len(runs)} runs")
        for run in sorted(runs):
            for step in ("prep", "fit"):
                self._check_step(run, step)
            submissions = [number for name, number in self._workflows if name == run]
            end = self._record(f"control/runs/{run}/submissions/{max(submissions, default=1):09d}.end.json")
            # One that was stopped when its steps were done stays stopped: a resume finds nothing missing.
            if end is None or (end["status"] != "Succeeded" and "Stopped with strategy" not in end["message"]):
                self.verdict.broken("end", f"the last submission of {run} did not succeed")

    def _check_step(self, run, step):
        prefix = f"control/runs/{run}/attempts/{step}/"
        keys = [key for key in self._objects if key.startswith(prefix)]
        ends = {key: json.loads(self._objects[key]) for key in keys if key.endswith(".end.json")}
        for key in keys:
            if not key.endswith(".end.json") and key.replace(".json", ".end.json") not in ends:
                self.verdict.broken("end", f"{key} has no end")
        done = [end["attempt"] for end in ends.values() if end["outcome"] == "done"]
        if len(done) != 1:
            self.verdict.broken("end", f"{step} of {run} is done {len(done)} times")
        elif step == "fit":
            model = self._objects.get(f"data/runs/{run}/outputs/fit/{done[0]:09d}/artifacts/model")
            if model != undisturbed_result(run).encode():
                self.verdict.broken("end", f"the result of {run} differs from that of an undisturbed training")


def undisturbed_result(run):
    """What a training of the run leaves that nothing disturbs."""
    chain = hashlib.sha256(run.encode()).digest()
    for step in range(1, TRAINING_STEPS + 1):
        chain = hashlib.sha256(chain + str(step).encode()).digest()
    return chain.hex()


def check(history, objects):
    """The verdict on one history, a list of events, and one bucket, bytes by key."""
    return Checker(history, objects).check()


def read_folder(folder):
    """History and bucket of a folder."""
    history = [json.loads(line) for line in (Path(folder) / "history.jsonl").read_text().splitlines()]
    root = Path(folder) / "bucket"
    return history, {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def main(folder):
    """Judge a folder and say what is wrong."""
    verdict = check(*read_folder(folder))
    lines = [f"{law}: {sentence}" for law, sentence in verdict.violations]
    lines.append(f"{verdict.lost} of {verdict.acknowledged} acknowledged checkpoints lost, {verdict.late} late commits")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(bool(verdict.violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
