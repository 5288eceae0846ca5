"""The paths of a step on a machine with one file system for all.

| path | in a namespace | replaced in the program's texts |
|---|---|---|
| declared, does not exist here | the step's own | the step's own |
| declared, exists here | the step's own; what lies here is hidden | the step's own |
| declared, named in no text | the step's own | refused |
| beside a declared one, exists here | this machine's | this machine's |
| beside a declared one, new | the step's own, and reported | this machine's |
| would hide the store or Python | replaced in the texts | replaced in the texts |

Every attempt, item of a fan-out, run and member of a gang has its own; a volume is shared.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes.polling import until
from support.processes.process import lives
from support.stories.local_engine import Bench, Manifest, call, dag, shell, workflow

from hera_pipelines.local.pods import init_process, mount_namespace, pod_paths
from hera_pipelines.local.pods.pod_paths import (
    NAMESPACE_VARIABLE,
    Mount,
    PathMapping,
    declared_paths,
    find_conflict,
    folder_views,
    namespace_refusal,
    plan_mounts,
    write_plan,
)
from tiphys.protocol.environment import LOG_PREFIX

NOBODY = 65534
needs_namespace = pytest.mark.skipif(bool(namespace_refusal()), reason=f"no namespace here: {namespace_refusal()}")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "code").mkdir()
    return Bench(tmp_path / "engine", code=tmp_path / "code")


@pytest.fixture(params=["namespace", "replaced"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a path becomes the step's own."""
    if request.param == "replaced":
        monkeypatch.setenv(NAMESPACE_VARIABLE, "off")
    elif refusal := namespace_refusal():
        pytest.skip(f"no namespace here: {refusal}")
    return str(request.param)


@pytest.fixture(
    params=["/ckpt.{}", "/mnt/out dir {}/ü", "/tmp/{}/ckpt", "{}/kept/ckpt", "{}/link/ckpt", "{}/file/ckpt"]
)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A path of a container: it is not here, lies in a folder, exists, and lies behind a link, or a file."""
    if not request.param.startswith("{}"):
        return str(request.param).format(uuid4().hex)
    (tmp_path / "kept" / "ckpt").mkdir(parents=True)
    (tmp_path / "kept" / "ckpt" / "left.over").touch()
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "file").touch()
    return str(request.param).format(tmp_path)


def trainer(folder: str, source: str, **rest: Any) -> Manifest:
    """A shell that has the name of `tiphys-exec`, whose start takes long. ``source`` gets the folder as ``$1``."""
    command = ["sh", "-euc", f"shift; {source}", "tiphys-exec", "--dir", folder]
    return {"name": "fit", "container": {"image": "i", "command": command}, **rest}


def printed(bench: Bench) -> list[str]:
    """Lines of the programs, without those of `tiphys-exec`."""
    return [line for log in bench.logs("fit") for line in log.splitlines() if not line.startswith(LOG_PREFIX)]


def artifact(path: str, key: str) -> Manifest:
    return {"artifacts": [{"name": "model", "path": path, "s3": {"key": key}}]}


@pytest.mark.usefixtures("each_way")
def test_a_folder_of_tiphys_exec_is_empty_for_each_item_and_each_run(bench: Bench, path: str) -> None:
    source = 'mkdir -p "$1"; ls -A "$1"; cd "$1"; echo mine > x.tmp; mv x.tmp last.ckpt; echo "$PWD" >&2'
    outputs = {"artifacts": [{"name": "model", "path": f"{path}/last.ckpt"}]}
    # One kind of path shows that items and runs have their own.
    names, items = (("wf", "wf2"), [1, 2]) if path.startswith("/ckpt.") else (("wf",), [1])
    fan_out = workflow(dag({**call("fit"), "withItems": items}), trainer(path, source, outputs=outputs))
    pods = len(names) * len(items)
    for name in names:
        fan_out["metadata"]["name"] = name
        assert bench.run(fan_out) == "Succeeded"
    assert len(bench.logs("fit")) == pods
    assert not {"last.ckpt", "left.over"} & set(printed(bench))
    folder = Path(path)
    assert not folder.is_dir() or [entry.name for entry in folder.iterdir()] == ["left.over"], (
        "the machine's is untouched"
    )
    assert [bench.store.read(info.key) for info in bench.store.list("")] == [b"mine\n"] * pods


@pytest.mark.usefixtures("each_way")
def test_an_attempt_does_not_see_what_the_attempt_before_left(bench: Bench) -> None:
    path = f"/ckpt-{uuid4().hex}"
    again = trainer(path, 'mkdir -p "$1"; ls -A "$1"; touch "$1/left"; exit 1', retryStrategy={"limit": 1})
    assert bench.run(workflow(dag(call("fit")), again)) == "Failed"
    assert len(bench.logs("fit")) == 2
    assert printed(bench) == []


@needs_namespace
def test_a_program_finds_its_own_path_under_its_name(bench: Bench) -> None:
    path = f"/opt/{uuid4().hex}/ü.d"
    command = ["python", "-m", "tiphys.checkpoint.exec", "--dir", path, "--", "sh", "-euc"]
    container = {"image": "i", "command": command, "args": ['mkdir -p "$0"; cd "$0"; pwd', path]}
    assert bench.run(workflow(dag(call("fit")), {"name": "fit", "container": container})) == "Succeeded"
    assert printed(bench) == [path]


@needs_namespace
def test_an_output_that_no_text_names_is_found(bench: Bench) -> None:
    first, second = uuid4().hex, uuid4().hex
    source = f"mkdir -p /{first}/deep; P={second}; echo model > /{first}/deep/m; echo 0.5 > /tmp/$P"
    outputs = artifact(f"/{first}/deep/m", "k") | {
        "parameters": [{"name": "loss", "valueFrom": {"path": f"/tmp/{second}"}}]
    }
    use = call("use", parameters={"loss": "{{tasks.fit.outputs.parameters.loss}}"}, depends="fit")
    templates = shell(source, "fit", outputs=outputs), shell("echo {{inputs.parameters.loss}}", "use", "loss")
    assert bench.run(workflow(dag(call("fit"), use), *templates)) == "Succeeded"
    assert bench.store.read("k") == b"model\n"
    assert bench.logs("use") == ["0.5\n"]


@pytest.mark.usefixtures("each_way")
def test_a_volume_a_folder_below_it_and_an_output_below_that(bench: Bench) -> None:
    data = f"/data-{uuid4().hex}"
    fit = trainer(
        f"{data}/ckpt",
        'mkdir -p "$1"; echo w >> "$1/model"; cat "$1/model"',
        outputs=artifact(f"{data}/ckpt/model", "{{inputs.parameters.key}}"),
    )
    fit["inputs"] = {"parameters": [{"name": "key"}]}
    fit["container"]["volumeMounts"] = [{"name": "d", "mountPath": f"{data}/"}]
    claim = {"name": "d", "persistentVolumeClaim": {"claimName": "sets"}}
    tasks = dag(call("a", "fit", {"key": "a"}), call("b", "fit", {"key": "b"}, depends="a"))
    assert bench.run(workflow(tasks, fit, volumes=[claim])) == "Succeeded"
    assert (bench.store.read("a"), bench.store.read("b")) == (b"w\n", b"w\nw\n"), "a volume is shared"
    assert (bench.state / "volumes" / "sets" / "ckpt" / "model").read_text() == "w\nw\n"


@needs_namespace
def test_a_file_written_beside_a_declared_path_lands_on_the_machine_and_is_reported(
    bench: Bench, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "deep").mkdir(parents=True)
    (shared / "set.csv").write_text("rows\n")
    (shared / "link").symlink_to("set.csv")
    source = 'mkdir "$1"; cd "$1/.."; cat link; echo more >> set.csv; touch deep/new; echo lost > log.txt'
    assert bench.run(workflow(dag(call("fit")), trainer(f"{shared}/ckpt", source))) == "Succeeded"
    assert printed(bench) == ["rows"]
    assert (shared / "set.csv").read_text() == "rows\nmore\n"
    assert sorted(entry.name for entry in shared.iterdir()) == ["deep", "link", "set.csv"]
    assert (shared / "deep" / "new").exists()
    [message] = [change.message for change in bench.changes if "declares" in change.message]
    assert f"no field declares {shared}/log.txt, which the program wrote" in message


@needs_namespace
def test_no_mount_point_is_left_in_the_folder_of_a_failed_attempt(bench: Bench) -> None:
    path = f"/ckpt-{uuid4().hex}"
    assert bench.run(workflow(dag(call("fit")), trainer(path, 'mkdir "$1"; exit 3'))) == "Failed"
    [root] = (bench.state / "pods").glob("*/root")
    assert [f"/{entry.name}" for entry in root.iterdir()] == [path]


def test_a_machine_without_namespaces_says_so_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_paths, "_try_namespace", lambda: "unshare: Operation not permitted")
    items = {**call("fit"), "withItems": [1, 2]}
    assert bench.run(workflow(dag(items), trainer(f"/{uuid4().hex}", 'mkdir -p "$1"'))) == "Succeeded"
    said = [change.message for change in bench.changes if "no file system of its own" in change.message]
    assert len(set(said)) == 1
    assert "(unshare: Operation not permitted)" in said[0]


def test_a_volume_around_the_store_is_replaced_in_the_texts_or_refused(bench: Bench, tmp_path: Path) -> None:
    program = shell(f"echo x > {tmp_path}/x", "fit")
    program["container"]["volumeMounts"] = [{"name": "d", "mountPath": str(tmp_path)}]
    volumes = [{"name": "d", "persistentVolumeClaim": {"claimName": "sets"}}]
    assert bench.run(workflow(dag(call("fit")), program, volumes=volumes)) == "Succeeded"
    assert (bench.state / "volumes" / "sets" / "x").exists()
    assert any(f"{tmp_path} would hide" in change.message for change in bench.changes)
    program["container"]["args"] = ["true"]
    if not namespace_refusal():
        assert bench.run(workflow(dag(call("fit")), program, name="wf2", volumes=volumes)) == "Error"
        message = bench.last("wf2.fit").message
        assert f"volume d: {tmp_path} cannot be a path of the step alone ({tmp_path} would hide" in message


@pytest.mark.usefixtures("each_way")
def test_members_of_a_gang_have_their_own_paths_and_share_a_volume(bench: Bench) -> None:
    out, claim = f"/out-{uuid4().hex}", f"/claim-{uuid4().hex}"
    waits = f"while [ $(ls {claim} | wc -l) != 2 ]; do sleep 0.05; done"
    source = f"mkdir -p {out}; echo $RANK > {out}/$RANK; touch {claim}/$RANK; {waits}; ls {out}"
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    env = [
        {"name": "RANK", "valueFrom": index},
        {"name": "TIPHYS_FILES", "value": json.dumps({"outputs": {"artifacts/model": out}})},
    ]
    mounts = [{"name": "d", "mountPath": claim}]
    container = {
        "name": "main",
        "image": "x",
        "command": ["sh", "-c"],
        "args": [source],
        "env": env,
        "volumeMounts": mounts,
    }
    labels = {"tiphys.dev/gang": "gang", "tiphys.dev/attempt": "1"}
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": 30,
        "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "shared"}}],
    }
    job = {
        "kind": "Job",
        "metadata": {"name": "gang", "labels": labels},
        "spec": {"completions": 2, "template": {"metadata": {"labels": labels, "annotations": {}}, "spec": pod}},
    }
    template = {"name": "fit", "resource": {"action": "apply", "manifest": json.dumps(job)}}
    assert bench.run(workflow(dag(call("fit")), template)) == "Succeeded"
    assert bench.logs("fit") == ["0\n", "1\n"]


@pytest.mark.parametrize(
    ("program", "folders"),
    [
        ({"command": ["tiphys-exec", "--dir", "/c"], "args": ["--", "t", "--dir", "/other"]}, ["/c"]),
        ({"command": ["/tiphys/bin/tiphys-exec", "--dir=/c d/ü/"]}, ["/c d/ü"]),
        ({"command": ["python", "-P", "-m", "tiphys.checkpoint.exec", "--quiet", "5s", "--dir", "//c/./d"]}, ["/c/d"]),
        ({"command": ["sh", "-c"], "args": ['cd x && tiphys-exec --dir "/c d" -- python t.py "it\'s"']}, ["/c d"]),
        ({"command": ["sh", "-c"], "args": ["tiphys-exec --dir '/c' -- echo it's"]}, ["/c"]),
        ({"command": ["sh"], "source": "set -e\ntiphys-exec --quiet 1s \\\n  --dir /c \\\n -- t\n"}, ["/c"]),
        (
            {
                "command": ["sh", "-c"],
                "args": ["tiphys-exec --dir $OUT/c -- t"],
                "env": [{"name": "OUT", "value": "/o"}],
            },
            ["/o/c"],
        ),
        ({"command": ["tiphys-exec", "--dir", "$(OUT)"], "env": [{"name": "OUT", "value": "/o"}]}, ["/o"]),
        ({"command": ["tiphys-exec", "--dir", "ckpt", "--", "t"]}, []),
        ({"command": ["tiphys-exec", "--dir", "$UNKNOWN/c", "--", "t"]}, []),
        ({"command": ["train", "--dir", "/c"]}, []),
    ],
)
def test_the_folder_of_tiphys_exec_is_a_declared_path(program: Manifest, folders: list[str]) -> None:
    assert [path for _, path in declared_paths({"container": program})] == folders


def mapping(root: Path, *paths: str, **volumes: str) -> PathMapping:
    return PathMapping(root, {path: root / name for name, path in volumes.items()}, (*paths, *volumes.values()))


def planned(found: PathMapping) -> list[Mount]:
    return plan_mounts(found, folder_views(found))


def test_a_volume_over_a_folder_that_exists_is_one_mount(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    found = mapping(tmp_path / "root", volume=f"{tmp_path}/data")
    assert planned(found) == [Mount("/", "/"), Mount(f"{tmp_path}/root/volume", f"{tmp_path}/data")]


def test_entries_beside_a_declared_path_are_mounted_and_it_is_not(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "deep" / "er").mkdir(parents=True)
    (here / "other").mkdir()
    (here / "file").touch()
    found = mapping(tmp_path / "root", f"{here}/out", f"{here}/file", f"{here}/deep/out/er", f"{here}/out/below")
    assert folder_views(found) == [str(here), f"{here}/deep"]
    assert planned(found) == [
        Mount("/", "/"),
        Mount(f"{tmp_path}/root{here}", str(here)),
        Mount(f"{here}/other", f"{here}/other", True),
        Mount(f"{here}/deep/er", f"{here}/deep/er", True),
    ]


NAMES = st.lists(st.sampled_from(["a", "b", "c.d", "ü"]), min_size=1, max_size=4).map("/".join)


@given(here=st.sets(NAMES, max_size=4), own=st.sets(NAMES, min_size=1, max_size=3), volumes=st.sets(NAMES, max_size=2))
def test_a_mount_point_is_made_in_folders_of_the_step_only(here: set[str], own: set[str], volumes: set[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        for folder in here:
            Path(name, "here", folder).mkdir(parents=True, exist_ok=True)
        Path(name, "here").mkdir(exist_ok=True)
        shared = {f"v{number}": f"{name}/here/{path}" for number, path in enumerate(volumes - own)}
        found = mapping(Path(name, "root"), *(f"{name}/here/{path}" for path in own), **shared)
        mounted = planned(found)
        targets = {mount.target for mount in mounted}
        for mount in mounted[1:]:
            parents = [str(parent) for parent in Path(mount.target).parents]
            assert Path(mount.target).is_dir() or any(parent in folder_views(found) for parent in parents), mount
            assert not mount.is_machine or not any(Path(path).is_relative_to(mount.target) for path in found.paths)
        for path in own:  # the nearest mount around an own path is a folder of the step
            around = next(
                folder
                for folder in (path_ for path_ in map(str, Path(f"{name}/here/{path}/x").parents))
                if folder in targets
            )
            [mount] = [mount for mount in mounted if mount.target == around]
            assert mount.source.startswith(f"{name}/root"), (path, mount)


def test_a_path_around_what_the_step_needs_is_a_conflict() -> None:
    def conflict(*paths: str) -> tuple[str, str] | None:
        return find_conflict(mapping(Path("/r"), *paths), [Path("/usr/python")], [Path("/data/store")])

    assert conflict("/data") == ("/data", "/data/store")
    assert conflict("/ok", "/data/store/ckpt") == ("/data/store/ckpt", "/data/store")
    assert conflict("/usr/python") == ("/usr/python", "/usr/python")
    assert conflict("/usr/python/new", "/data/ckpt", "/dat") is None


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder of another user than root, who may not enter the folders of pytest."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="tiphys ü."))
    yield folder
    shutil.rmtree(folder)


def make_plan(folder: Path, *paths: str) -> Path:
    found = PathMapping(folder / "root", {}, paths)
    for path in (*folder_views(found), *(str(Path(path).parent) for path in paths)):
        Path(f"{folder}/root{path}").mkdir(parents=True, exist_ok=True)
    write_plan(planned(found), folder / "namespace", folder / "plan")
    return folder / "plan"


@needs_namespace
@pytest.mark.skipif(os.getuid() != 0, reason="other tests run as this user already")
def test_a_user_without_rights_has_a_namespace_too(public_folder: Path) -> None:
    path = f"/ckpt-{uuid4().hex}"
    plan = make_plan(public_folder, path, f"/tmp/{public_folder.name}/out/x")
    for entry in (public_folder, *public_folder.rglob("*")):
        os.chown(entry, NOBODY, NOBODY, follow_symlinks=False)
    source = f"id -u; id -g; mkdir {path}; echo mine > {path}/f; ls {path}; test -e /proc/self/fd; test -c /dev/null"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(write, 1)
            os.chdir(public_folder)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, as after an exec
            mount_namespace.enter_mount_namespace(str(plan))
            os.execv("/bin/sh", ["sh", "-euc", source])
        except BaseException as error:  # noqa: BLE001  a forked process of the tests must end here
            os.write(1, repr(error).encode())
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as output:
        said = output.read()
    _, status = os.waitpid(child, 0)
    if "unshare: Operation not permitted" in said:
        pytest.skip("this machine has no user namespaces")
    assert (said, status) == (f"{NOBODY}\n{NOBODY}\nf\n", 0)
    written = Path(f"{public_folder}/root{path}/f")
    assert (written.read_text(), written.stat().st_uid) == ("mine\n", NOBODY)
    assert not Path(path).exists()


def start_init(plan: Path, *command: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-I", "-S", init_process.__file__, str(os.getpid()), str(plan), *command]
    return subprocess.Popen(program, stderr=subprocess.PIPE, start_new_session=True, cwd=plan.parent)


@needs_namespace
def test_a_program_in_a_namespace_dies_with_its_init_process(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, f"/ckpt-{uuid4().hex}")
    with start_init(
        plan, "sh", "-c", f"echo $$ > {tmp_path}/pid.tmp; mv {tmp_path}/pid.tmp {tmp_path}/pid; exec sleep 600"
    ) as init:
        until((tmp_path / "pid").exists)
        program = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{program}/fd").is_dir()
        assert list(Path(f"/proc/{program}/fd").iterdir()), "a debugger of the same user can look into it"
        os.kill(init.pid, signal.SIGKILL)
        until(lambda: not lives(program))
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), "nothing is mounted on the machine"


@needs_namespace
def test_a_namespace_that_cannot_be_made_ends_the_program_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    write_plan([Mount("/", "/"), Mount(f"{tmp_path}/gone", str(tmp_path))], tmp_path / "namespace", tmp_path / "plan")
    with start_init(tmp_path / "plan", "true") as init:
        assert init.stderr is not None
        said = init.stderr.read().decode()
    assert init.returncode == 126
    assert (
        f"the paths of the step cannot be mounted: [Errno 2] mount: No such file or directory: {tmp_path}/gone"
        in said.replace("'", "")
    )
    assert "set TIPHYS_LOCAL_NAMESPACE=off" in said
