"""Trainers that write a folder as libraries do: ``python -m support.programs.folder_shapes SHAPE DIR STEPS PAUSE``.

Each shape writes in the order in which its library was read to write, with a
pause within each file, and loads as its users do. A load of a torn file, or of
files of two steps, exits with 9. It says ``starts N`` and ``saved N``.

| shape | order, as read in |
|---|---|
| hf | transformers 5: model, optimizer, rng, trainer_state.json; older ones are deleted |
| lightning, top1 | Lightning 2.6, save_last=True: the step's file, then last.ckpt; top1 keeps an older best one |
| dcp | PyTorch 2.9: shards, .metadata.tmp, renamed to .metadata |
| orbax | Orbax 0.12: N.orbax-checkpoint-tmp, renamed to N |
| keras | Keras 3: a zip for each epoch |
| tensorflow | TensorFlow 2: data, index, then checkpoint, by a rename |
| deepspeed, link | DeepSpeed: the folder, then latest; as a link |
| megatron | Megatron: iter_N, then latest_checkpointed_iteration.txt |
| detectron2 | detectron2: model_N.pth, then last_checkpoint |
| sb3 | Stable-Baselines3: the policy, then its replay buffer |
| best | a numbered file, then the best one |
| last | Ultralytics: weights/last.pt and weights/best.pt in place, results.csv grows |
| one | one file that is overwritten |
"""

import hashlib
import io
import re
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

PAUSE = 0.01


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def content(step: int) -> bytes:
    return f"{step} {hashlib.sha256(str(step).encode()).hexdigest()}".encode() * 40 + b"END"


def write(path: Path, step: int, data: bytes | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content(step) if data is None else data
    with path.open("wb") as stream:
        stream.write(data[: len(data) // 2])
        stream.flush()
        time.sleep(PAUSE)
        stream.write(data[len(data) // 2 :])


def read(*paths: Path) -> int:
    """The step of these files; exits with 9 if they are torn or of two steps."""
    steps = set()
    for path in paths:
        if not path.exists():
            say(f"MISSING {path.name}")
            sys.exit(9)
        data = path.read_bytes()
        number = re.match(rb"\d+", data)
        if not number or data != content(int(number[0])):
            say(f"TORN {path}")
            sys.exit(9)
        steps.add(int(number[0]))
    if len(steps) > 1:
        say(f"MIXED {sorted(steps)}")
        sys.exit(9)
    return steps.pop()


def numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    found = ((re.findall(r"\d+", path.name), path) for path in folder.glob(pattern))
    return sorted((int(numbers[-1]), path) for numbers, path in found if numbers)


def save_hf(out: Path, step: int) -> None:
    place = out / f"checkpoint-{step}"
    for name in ("model.safetensors.bin", "optimizer.pt.bin", "rng_state.pth", "trainer_state.json"):
        write(place / name, step, b'{"global_step": %d}' % step if name.endswith("json") else None)
    for _, old in numbered(out, "checkpoint-*")[:-2]:
        shutil.rmtree(old)


def load_hf(out: Path) -> int:
    found = numbered(out, "checkpoint-*")
    return read(*(path for path in found[-1][1].iterdir() if path.suffix != ".json")) if found else 0


def save_lightning(out: Path, step: int) -> None:
    write(out / f"épo=0-step={step}.ckpt", step)
    write(out / "last.ckpt", step)


def save_top1(out: Path, step: int) -> None:
    if step <= 20:
        write(out / "epoch=0-step=10.ckpt", 10)
    write(out / "last.ckpt", step)


def load_last(out: Path) -> int:
    return read(out / "last.ckpt") if (out / "last.ckpt").exists() else 0


def save_dcp(out: Path, step: int) -> None:
    place = out / f"step_{step}"
    for rank in range(2):
        write(place / f"__{rank}_0.distcp", step)
    write(place / ".metadata.tmp", step)
    (place / ".metadata.tmp").rename(place / ".metadata")


def load_dcp(out: Path) -> int:
    found = numbered(out, "step_*")
    return read(*found[-1][1].iterdir()) if found else 0


def save_orbax(out: Path, step: int) -> None:
    place = out / f"{step}.orbax-checkpoint-tmp"
    write(place / "_CHECKPOINT_METADATA", step)
    write(place / "default.orbax-checkpoint-tmp" / "d" / "data", step)
    (place / "default.orbax-checkpoint-tmp").rename(place / "default")
    place.rename(out / str(step))


def load_orbax(out: Path) -> int:
    found = [(step, path) for step, path in numbered(out, "*") if path.name.isdecimal()]
    return read(found[-1][1] / "_CHECKPOINT_METADATA", found[-1][1] / "default/d/data") if found else 0


def save_keras(out: Path, step: int) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("model.weights.h5", content(step))
    write(out / f"{step:04d}-0.42.keras", step, stream.getvalue())


def load_keras(out: Path) -> int:
    found = sorted(out.glob("*.keras"))
    if not found:
        return 0
    try:
        data = zipfile.ZipFile(found[-1]).read("model.weights.h5")
    except zipfile.BadZipFile:
        say(f"TORN {found[-1]}")
        sys.exit(9)
    return int(data.split()[0])


def save_tensorflow(out: Path, step: int) -> None:
    for suffix in ("data-00000-of-00001", "index"):
        write(out / f"ckpt-{step}.{suffix}", step)
    (out / "checkpoint.tmp7").write_text(f'model_checkpoint_path: "ckpt-{step}"\nall_model_checkpoint_paths: "x"\n')
    (out / "checkpoint.tmp7").rename(out / "checkpoint")


def load_tensorflow(out: Path) -> int:
    if not (out / "checkpoint").exists():
        return 0
    name = re.findall(r'"(.*?)"', (out / "checkpoint").read_text())[0]
    return read(out / f"{name}.index", out / f"{name}.data-00000-of-00001")


def pointed(prefix: str, pointer: str, *, text: str = "{name}", link: bool = False, folder: bool = True):
    def target(out: Path, name: str) -> list[Path]:
        return [out / name / "mp_rank_00" / "w", out / name / "optim"] if folder else [out / name]

    def save(out: Path, step: int) -> None:
        name = prefix.format(step=step)
        for path in target(out, name):
            write(path, step)
        if link:
            (out / pointer).unlink(missing_ok=True)
            (out / pointer).symlink_to(out.absolute() / name)
        else:
            (out / pointer).write_text(text.format(name=name, step=step))

    def load(out: Path) -> int:
        if link:
            return read(*target(out, (out / pointer).resolve().name)) if (out / pointer).is_symlink() else 0
        if not (out / pointer).exists():
            return 0
        said = (out / pointer).read_text()
        return read(*target(out, prefix.format(step=int(said)) if said.isdecimal() else said))

    return save, load


def save_sb3(out: Path, step: int) -> None:
    write(out / f"rl_model_{step}_steps.zip.bin", step)
    write(out / f"rl_model_replay_buffer_{step}_steps.pkl", step)


def load_sb3(out: Path) -> int:
    found = numbered(out, "rl_model_*_steps.zip.bin")
    if not found:
        return 0
    step = max(int(re.findall(r"\d+", path.name)[0]) for _, path in found)
    return read(out / f"rl_model_{step}_steps.zip.bin", out / f"rl_model_replay_buffer_{step}_steps.pkl")


def save_best(out: Path, step: int) -> None:
    write(out / f"model_{step}.pt", step)
    write(out / "model_best.pt", step)


def load_best(out: Path) -> int:
    found = numbered(out, "model_*.pt")
    return read(found[-1][1]) if found else 0


def save_last(out: Path, step: int) -> None:
    with (out / "results.csv").open("a") as log:
        log.write(f"{step}\n")
    write(out / "weights" / "last.pt", step)
    write(out / "weights" / "best.pt", step)


def load_weights(out: Path) -> int:
    if not (out / "weights" / "last.pt").exists():
        return 0
    read(out / "weights" / "best.pt")
    return read(out / "weights" / "last.pt")


def save_one(out: Path, step: int) -> None:
    write(out / "state.bin", step)


def load_one(out: Path) -> int:
    return read(out / "state.bin") if (out / "state.bin").exists() else 0


SHAPES: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int]]] = {
    "hf": (save_hf, load_hf),
    "lightning": (save_lightning, load_last),
    "top1": (save_top1, load_last),
    "dcp": (save_dcp, load_dcp),
    "orbax": (save_orbax, load_orbax),
    "keras": (save_keras, load_keras),
    "tensorflow": (save_tensorflow, load_tensorflow),
    "deepspeed": pointed("global_step{step}", "latest"),
    "link": pointed("global_step{step}", "latest", link=True),
    "megatron": pointed("iter_{step:07d}", "latest_checkpointed_iteration.txt", text="{step}"),
    "detectron2": pointed("model_{step:07d}.pth", "last_checkpoint", folder=False),
    "sb3": (save_sb3, load_sb3),
    "best": (save_best, load_best),
    "last": (save_last, load_weights),
    "one": (save_one, load_one),
}
COUNTED = {"top1", "last", "one"}
"""Shapes without a step in a name, or with steps that stand still."""


def main(shape: str, out: Path, steps: int, pause: float) -> int:
    stops: list[int] = []
    save, load = SHAPES[shape]
    out.mkdir(parents=True, exist_ok=True)
    step = load(out)
    last = step + steps
    say(f"starts {step}")
    if "--handler" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    while step < last:
        time.sleep(pause)
        step += 1
        if step % 10 == 0 or stops:
            save(out, step)
            say(f"saved {step}")
        if stops:  # as many do: the default action, once the state is saved
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
