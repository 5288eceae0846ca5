"""What becomes of a program: a real process each, as a container would behave.

| it | node | exit code |
|---|---|---|
| exits n | Failed | n |
| is killed by signal n | Failed | 128+n |
| cannot be started | Failed | 127 |
| handles SIGTERM after deletion | Failed (Succeeded if it exits 0) | its own |
| ignores SIGTERM | Failed after the grace period | 137 |
| runs past its deadline | Failed | its own |
| needs an input that is missing | Error | none |
| does not write a required output | Error | its own |
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.processes.process import lives
from support.stories.local_engine import Bench, call, dag, shell, workflow

from hera_pipelines.compile.retries import step_retry_strategy
from hera_pipelines.local.pods import init_process
from tiphys.errors import ObjectMissingError
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.store import DirectoryStore

WAIT_FOR_TERM = "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, code=tmp_path)


def only(source: str, *inputs: str, **rest: Any) -> dict[str, Any]:
    return workflow(dag(call("run")), shell(source, "run", *inputs, **rest))


def python(source: str, **rest: Any) -> dict[str, Any]:
    template = {"name": "run", "script": {"image": "i", "command": ["python"], "source": source}, **rest}
    return workflow(dag(call("run")), template)


def when_it_says(bench: Bench, word: str, act: Any) -> None:
    """Do ``act`` with the pod's name once its program has written ``word``."""

    def react(change: Any) -> None:
        if change.kind == "Pod" and change.phase == "Running":
            import threading

            threading.Thread(target=wait, daemon=True).start()

    def wait() -> None:
        while not any(word in log for log in bench.logs("run")):
            time.sleep(0.01)
        [path] = (bench.state / "logs").glob("*.log")
        act(path.stem)

    bench.reactions.append(react)


@pytest.mark.parametrize(
    ("source", "code"),
    [("exit 3", 3), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("exit 75", 75), ("no-such-program", 127)],
)
def test_exit_codes_are_those_of_a_container(bench: Bench, source: str, code: int) -> None:
    assert bench.run(only(source)) == "Failed"
    assert bench.last("wf.run").message == f"main: Error (exit code {code})"
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert (pod.phase, pod.exit_code, pod.node) == ("Failed", code, "wf.run")


def test_a_pod_shows_the_gpus_that_it_requests(bench: Bench) -> None:
    template = only("exit 0")
    [program] = [one[kind] for one in template["spec"]["templates"] for kind in ("container", "script") if kind in one]
    program["resources"] = {"limits": {"nvidia.com/gpu": "2"}}
    assert bench.run(template) == "Succeeded"
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert pod.resources["nvidia.com/gpu"] == 2


@pytest.mark.parametrize("argument", ["x" * 200_000, "nul \0 byte"])
def test_a_command_that_the_system_refuses_is_an_error_of_its_node(bench: Bench, argument: str) -> None:
    template = {"name": "run", "container": {"image": "i", "command": ["echo", argument]}}
    assert bench.run(workflow(dag(call("run")), template)) == "Error"
    assert bench.last("wf.run").message.startswith("main: Error: cannot start 'echo': ")
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert pod.phase == "Failed"


def test_last_words_are_few_and_short_and_steer_no_terminal(bench: Bench) -> None:
    words = "'y' * 3_000_000 + '\\n\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07end\\n'"
    bench.run(python(f"import sys; sys.stdout.write({words}); sys.exit(1)"))
    first, last = bench.last("wf.run").log_tail
    assert first == "y" * 500
    assert last == "red end"


def test_a_daemon_ends_with_the_program_that_left_it_behind(bench: Bench, tmp_path: Path) -> None:
    source = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & while ! [ -s {tmp_path}/pid ]; do :; done"
    assert bench.run(only(source)) == "Succeeded"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_last_words_need_not_be_text(bench: Bench) -> None:
    bench.run(python("import os, sys; os.write(1, b'\\xff\\xfe\\x00 broken\\nlast'); sys.exit(1)"))
    assert bench.last("wf.run").log_tail == ("\ufffd\ufffd broken", "last")


def test_an_output_parameter_that_is_no_text_is_an_error_that_says_so(bench: Bench) -> None:
    outputs = {"parameters": [{"name": "loss", "valueFrom": {"path": "/tmp/loss"}}]}
    assert bench.run(python("open('/tmp/loss', 'wb').write(b'\\xff\\xfe')", outputs=outputs)) == "Error"
    assert "output parameter loss is not UTF-8 text; declare it as an artifact" in bench.last("wf.run").message


MODEL = {"name": "model", "path": "/tmp/model", "s3": {"key": "kept"}, "archive": {"none": {}}}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (r"os.close(os.open(b'/tmp/model/\xff', os.O_CREAT, 0o600))", r"'\xff' has a name that is not UTF-8"),
        ("os.symlink('weights', '/tmp/model/latest')", "'latest -> weights' is a link"),
    ],
)
def test_an_output_that_no_store_can_keep_ends_the_step_once(bench: Bench, source: str, said: str) -> None:
    source = f"import os; os.mkdir('/tmp/model'); open('/tmp/model/weights', 'w').close(); {source}"
    manifest = python(source, outputs={"artifacts": [MODEL]}, retryStrategy=step_retry_strategy(RetryPolicy()))
    assert bench.run(manifest) == "Error"
    [message] = {change.message for change in bench.changes if change.node == "wf.run(0)" and change.message}
    assert said in message
    assert not any(change.node == "wf.run(1)" for change in bench.changes)
    assert list(bench.store.list("kept")) == []


def test_modes_and_empty_folders_of_an_output_are_not_lost_in_silence(bench: Bench) -> None:
    source = "mkdir -p /tmp/model/logs; echo x > /tmp/model/run.sh; chmod 755 /tmp/model/run.sh; echo w > /tmp/model/w"
    assert bench.run(only(source, outputs={"artifacts": [MODEL]})) == "Succeeded"
    [message] = [change.message for change in bench.changes if "bytes of outputs" in change.message]
    assert "'/tmp/model/logs' is an empty folder; '/tmp/model/run.sh' is executable; the next step" in message
    assert "model/w'" not in message


def test_a_command_that_does_not_exist_is_named(bench: Bench) -> None:
    template = {"name": "run", "container": {"image": "i", "command": ["no-such-program"]}}
    assert bench.run(workflow(dag(call("run")), template)) == "Failed"
    assert bench.last("wf.run").message == "main: Error (exit code 127)"
    assert bench.last("wf.run").log_tail == ("cannot start 'no-such-program': No such file or directory",)


def test_the_last_lines_of_a_failed_program_are_its_message(bench: Bench) -> None:
    bench.run(only("for i in $(seq 30); do echo line $i; done; echo broken >&2; exit 1"))
    tail = bench.last("wf.run").log_tail
    assert (len(tail), tail[0], tail[-1]) == (20, "line 12", "broken")


@pytest.mark.parametrize(
    ("policy", "message"), [({}, ""), ({"terminationMessagePolicy": "FallbackToLogsOnError"}, "CUDA out of memory")]
)
def test_the_end_of_a_log_is_the_message_of_a_container_that_asks_for_it(
    bench: Bench, policy: dict[str, str], message: str
) -> None:
    manifest = python("raise SystemExit('CUDA out of memory')")
    manifest["spec"]["templates"][1]["script"] |= policy
    bench.run(manifest)
    [found] = bench.cluster.workflows()
    [pod] = bench.cluster.workflow_pods(found["metadata"]["uid"])
    assert pod.termination_message == message


def test_a_deleted_pod_gets_sigterm_and_keeps_its_exit_code(bench: Bench) -> None:
    when_it_says(bench, "ready", bench.engine.delete_pod)
    assert bench.run(only(WAIT_FOR_TERM)) == "Failed"
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert (pod.exit_code, pod.reason, bench.last("wf.run").message) == (75, "Deleted", "pod deleted")


def test_sigterm_at_any_moment_of_its_start_ends_a_program() -> None:
    init = [sys.executable, "-I", "-S", init_process.__file__, str(os.getpid()), ""]
    for delay_ms in range(60):
        process = subprocess.Popen([*init, "sleep", "600"], start_new_session=True)
        try:
            time.sleep(delay_ms / 1000)
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(timeout=60) in (-signal.SIGTERM, 128 + signal.SIGTERM), f"after {delay_ms} ms"
        finally:
            process.send_signal(signal.SIGHUP)
            process.wait(timeout=60)


def test_a_pod_ended_through_the_cluster_ends_like_a_deleted_one(bench: Bench) -> None:
    def tell(name: str) -> None:
        [seen] = [one for one in bench.cluster.workflow_pods(uid(bench)) if one.name == name]
        bench.cluster.delete_pod(seen)

    when_it_says(bench, "ready", tell)
    assert bench.run(only(WAIT_FOR_TERM, podSpecPatch='{"terminationGracePeriodSeconds": 90}')) == "Failed"
    [pod] = bench.cluster.workflow_pods(uid(bench))
    assert (pod.exit_code, pod.reason, pod.ending) == (75, "Deleted", True)


def uid(bench: Bench) -> str:
    return str(bench.cluster.workflow("default", "wf")["metadata"]["uid"])


def test_a_handler_that_exits_0_makes_the_node_succeed_without_outputs(bench: Bench) -> None:
    when_it_says(bench, "ready", bench.engine.delete_pod)
    source = WAIT_FOR_TERM.replace("75", "0").replace("echo ready", "echo x > /out; echo ready")
    key = {"name": "m", "path": "/out", "s3": {"key": "kept"}, "archive": {"none": {}}}
    assert bench.run(only(source, outputs={"artifacts": [key]})) == "Succeeded"
    with pytest.raises(ObjectMissingError):
        bench.store.read("kept")


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(bench: Bench) -> None:
    when_it_says(bench, "ready", bench.engine.delete_pod)
    source = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    started = time.monotonic()
    bench.run(only(source, podSpecPatch='{"terminationGracePeriodSeconds": 0.3}'))
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert pod.exit_code == 137
    assert time.monotonic() - started >= 0.3


def test_processes_left_behind_by_a_program_end_with_it(bench: Bench) -> None:
    bench.run(only("sleep 600 & echo pid=$!; exit 1"))
    pid = int(bench.logs("run")[0].strip().removeprefix("pid="))
    _wait_for(lambda: not lives(pid))  # the kernel may take a moment


def test_a_deadline_ends_the_program_and_says_so(bench: Bench) -> None:
    # Of real seconds, in which the shell has to come to its trap.
    assert bench.run(only(WAIT_FOR_TERM, activeDeadlineSeconds=3)) == "Failed"
    assert bench.last("wf.run").message == "Pod was active on the node longer than the specified deadline"
    [pod] = bench.cluster.workflow_pods(bench.cluster.workflow("default", "wf")["metadata"]["uid"])
    assert (pod.exit_code, pod.reason) == (75, "DeadlineExceeded")


def test_python_is_the_interpreter_of_tiphys(bench: Bench) -> None:
    assert bench.run(python("import sys, tiphys; print(sys.executable)")) == "Succeeded"
    assert bench.logs("run") == [f"{sys.executable}\n"]


def test_the_environment_is_the_templates_and_little_else(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DESK", "1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    env = {"LR": "0.1", "TIPHYS_STORE": "s3://ml-runs/tiphys"}
    bench.run(only("env", env=env))
    seen = dict(line.split("=", 1) for line in bench.logs("run")[0].splitlines())
    assert "SECRET_OF_THE_DESK" not in seen
    assert (seen["LR"], seen["AWS_REGION"], seen["TIPHYS_STORE"]) == ("0.1", "eu-west-1", bench.store.url)


def test_programs_find_the_files_of_the_pipeline_and_write_only_their_own(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import model; print(model.NAME); open('written', 'w').close()")
    (tmp_path / "model.py").write_text("NAME = 'resnet'")
    template = {"name": "run", "container": {"image": "i", "command": ["python", "train.py"]}}
    assert bench.run(workflow(dag(call("run")), template)) == "Succeeded"
    assert bench.logs("run") == ["resnet\n"]
    assert not (tmp_path / "written").exists()


def test_a_patch_can_add_variables_and_a_broken_one_fails_the_node(bench: Bench) -> None:
    patch = '{"containers": [{"name": "main", "env": [{"name": "ADDED", "value": "yes"}], "resources": {}}]}'
    bench.run(only("echo $ADDED", podSpecPatch=patch))
    assert bench.logs("run") == ["yes\n"]


def test_files_and_folders_travel_between_steps_under_their_keys(bench: Bench) -> None:
    out = {"artifacts": [_keyed("model", "/tmp/model", "k/model"), _keyed("note", "/tmp/note.txt", "k/note")]}
    take = {"artifacts": [{"name": "model", "path": "/in/m"}, {"name": "note", "path": "/in/n"}]}
    references = [{"name": n, "from": f"{{{{tasks.make.outputs.artifacts.{n}}}}}"} for n in ("model", "note")]
    make = shell("mkdir -p /tmp/model/deep; echo w > /tmp/model/deep/w; echo hi > /tmp/note.txt", "make", outputs=out)
    use = shell("cat /in/m/deep/w {{inputs.artifacts.note.path}}", "use", inputs=take)
    task = {**call("use", depends="make"), "arguments": {"artifacts": references}}
    assert bench.run(workflow(dag(call("make"), task), make, use)) == "Succeeded"
    assert bench.logs("use") == ["w\nhi\n"]
    assert bench.store.read("k/model/deep/w") == b"w\n"


def test_artifacts_without_a_key_travel_too(bench: Bench) -> None:
    make = shell("echo hi > /tmp/x", "make", outputs={"artifacts": [{"name": "x", "path": "/tmp/x"}]})
    use = shell("cat /tmp/y", "use", inputs={"artifacts": [{"name": "y", "path": "/tmp/y"}]})
    task = {
        **call("use", depends="make"),
        "arguments": {"artifacts": [{"name": "y", "from": "{{tasks.make.outputs.artifacts.x}}"}]},
    }
    assert bench.run(workflow(dag(call("make"), task), make, use)) == "Succeeded"
    assert bench.logs("use") == ["hi\n"]


def test_raw_artifacts_are_written_as_they_are(bench: Bench) -> None:
    raw = {"name": "r", "path": "/tmp/r", "raw": {"data": "text\n"}}
    bench.run(only("cat /tmp/r", inputs={"artifacts": [raw]}))
    assert bench.logs("run") == ["text\n"]


def test_outputs_of_a_failed_program_are_kept(bench: Bench) -> None:
    out = {"artifacts": [_keyed("m", "/tmp/m", "partial")]}
    assert bench.run(only("echo half > /tmp/m; exit 1", outputs=out)) == "Failed"
    assert bench.store.read("partial") == b"half\n"


def test_a_missing_input_is_an_error_before_the_program_starts(bench: Bench) -> None:
    take = {"artifacts": [{"name": "d", "path": "/d", "s3": {"key": "gone"}}]}
    assert bench.run(only("cat /d", inputs=take)) == "Error"
    message = bench.last("wf.run").message
    assert message.startswith("init: Error (exit code 64)")
    assert "key does not exist: gone" in message


def test_a_missing_optional_input_is_not(bench: Bench) -> None:
    take = {"artifacts": [{"name": "d", "path": "/d", "s3": {"key": "gone"}, "optional": True}]}
    assert bench.run(only("test ! -e /d", inputs=take)) == "Succeeded"


@pytest.mark.parametrize(("optional", "phase"), [(True, "Succeeded"), (False, "Error")])
def test_an_output_that_was_not_written(bench: Bench, optional: bool, phase: str) -> None:
    out = {"artifacts": [{**_keyed("m", "/tmp/m", "k"), "optional": optional}]}
    assert bench.run(only("true /tmp/m", outputs=out)) == phase


@pytest.mark.parametrize(
    ("code", "phase", "message"),
    [
        (3, "Failed", "main: Error (exit code 3)"),
        (0, "Error", "wait: Error (exit code 64): output parameter rows: no such file or directory: /tmp/rows"),
    ],
)
def test_an_output_that_a_failed_program_did_not_write_hides_not_how_it_ended(
    bench: Bench, code: int, phase: str, message: str
) -> None:
    out = {"parameters": [{"name": "rows", "valueFrom": {"path": "/tmp/rows"}}]}
    assert bench.run(only(f"exit {code}", outputs=out)) == phase
    assert bench.last("wf.run").message == message


def test_an_output_never_replaces_an_object(bench: Bench) -> None:
    bench.store.create("k", b"first")
    out = {"artifacts": [_keyed("m", "/tmp/m", "k")]}
    assert bench.run(only("echo second > /tmp/m", outputs=out)) == "Error"
    assert bench.store.read("k") == b"first"


def test_output_parameters_are_read_from_files_or_their_default(bench: Bench) -> None:
    parameters = [
        {"name": "acc", "valueFrom": {"path": "/tmp/acc"}},
        {"name": "none", "valueFrom": {"path": "/tmp/none", "default": "-"}},
    ]
    make = shell("echo 0.9 > /tmp/acc; : /tmp/none", "make", outputs={"parameters": parameters})
    arguments = {n: f"{{{{tasks.make.outputs.parameters.{n}}}}}" for n in ("acc", "none")}
    use = shell("echo {{inputs.parameters.acc}} {{inputs.parameters.none}}", "use", "acc", "none")
    bench.run(workflow(dag(call("make"), call("use", parameters=arguments, depends="make")), make, use))
    assert bench.logs("use") == ["0.9 -\n"]


def test_the_printed_text_of_a_program_is_its_result(bench: Bench) -> None:
    use = shell("echo got {{inputs.parameters.r}}", "use", "r")
    tasks = dag(call("make"), call("use", parameters={"r": "{{tasks.make.outputs.result}}"}, depends="make"))
    bench.run(workflow(tasks, shell("echo 42; echo noise >&2", "make"), use))
    assert bench.logs("use") == ["got 42\n"]
    assert bench.logs("make") == ["noise\n42\n"]


def test_a_claim_is_shared_between_pods_and_an_empty_folder_is_not(bench: Bench) -> None:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    mounts = [{"name": "data", "mountPath": "/data"}, {"name": "scratch", "mountPath": "/scratch"}]
    write = shell("echo d > /data/x; echo s > /scratch/x", "write")
    read = shell("cat /data/x; ls /scratch", "read")
    for template in (write, read):
        template["container"]["volumeMounts"] = mounts
    manifest = workflow(dag(call("write"), call("read", depends="write")), write, read, volumes=volumes)
    assert bench.run(manifest) == "Succeeded"
    assert bench.logs("read") == ["d\n"]


def test_keys_outside_the_store_stand_for_the_rest_of_the_bucket(tmp_path: Path) -> None:
    class Prefixed(DirectoryStore):
        def from_artifact_key(self, key: str) -> str | None:
            return key.removeprefix("tiphys/") if key.startswith("tiphys/") else None

    from hera_pipelines.local.pods.artifacts import ArtifactBucket

    bucket = ArtifactBucket(Prefixed(tmp_path / "store"), tmp_path / "rest")
    (tmp_path / "f").write_text("x")
    for key in ("tiphys/in", "other/out"):
        bucket.save({"name": "f", "s3": {"key": key}}, tmp_path / "f")
        bucket.fetch({"name": "f", "s3": {"key": key}}, tmp_path / key)
        assert (tmp_path / key).read_text() == "x"
    assert (tmp_path / "store" / "in").exists()
    assert (tmp_path / "rest" / "other" / "out").exists()


@pytest.mark.parametrize(("code", "kept"), [(0, False), (1, True)])
def test_only_the_files_of_a_failed_attempt_are_kept(bench: Bench, code: int, kept: bool) -> None:
    bench.run(only(f"echo x > here; exit {code}"))
    assert any((pod / "work" / "here").exists() for pod in (bench.state / "pods").glob("*")) is kept


def _keyed(name: str, path: str, key: str) -> dict[str, Any]:
    return {"name": name, "path": path, "s3": {"key": key}, "archive": {"none": {}}}


def test_the_engine_dies_and_takes_its_programs_with_it(tmp_path: Path) -> None:
    import subprocess

    program = (
        "import sys; from pathlib import Path\n"
        "from support.stories.local_engine import Bench, call, dag, shell, workflow\n"
        "source = 'sleep 600 & echo $! $$; wait'\n"
        f"bench = Bench(Path({str(tmp_path)!r}), code=Path({str(tmp_path)!r}))\n"
        "bench.run(workflow(dag(call('run')), shell(source, 'run')))"
    )
    paths = os.pathsep.join(str(path) for path in (Path(__file__).parents[3], *filter(None, sys.path)))
    engine = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths})
    try:
        pids = _wait_for(
            lambda: [int(p) for log in (tmp_path / "state/logs").glob("*") for p in log.read_text().split()]
        )
        assert len(pids) == 2
        assert all(lives(pid) for pid in pids)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    _wait_for(lambda: not any(lives(pid) for pid in pids))


def _wait_for(condition: Any) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen within 120 s")
