"""JAX with Orbax's CheckpointManager, which saves beside the training. It knows nothing of Tiphys."""

from pathlib import Path

from printing import digest, say

say("start")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

STEPS, SAMPLES, BATCH = 60, 96, 8


def loss_of(weights, inputs, labels):
    hidden = jax.nn.relu(inputs @ weights["first"])
    return jnp.mean((hidden @ weights["second"] - labels) ** 2)


@jax.jit
def train_step(state, inputs, labels):
    gradients = jax.grad(loss_of)(state["weights"], inputs, labels)
    moments = jax.tree.map(lambda moment, gradient: 0.9 * moment + gradient, state["moments"], gradients)
    weights = jax.tree.map(lambda weight, moment: weight - 1e-4 * moment, state["weights"], moments)
    return {"weights": weights, "moments": moments}


def load(ids):
    say("load")
    inputs = np.stack([np.random.default_rng(number).standard_normal(256, dtype=np.float32) for number in ids])
    return inputs, inputs[:, :8]


def main():
    first, second = jax.random.split(jax.random.key(0))
    weights = {"first": jax.random.normal(first, (256, 512)), "second": jax.random.normal(second, (512, 8))}
    state = {"weights": weights, "moments": jax.tree.map(jnp.zeros_like, weights)}
    options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=5)
    folder = Path("ckpt").absolute()
    with ocp.CheckpointManager(folder, options=options) as manager:
        step = manager.latest_step() or 0
        if step:
            state = manager.restore(step, args=ocp.args.StandardRestore(state))
        say("resumed", step=step, weights=digest(state["weights"]), optimizer=digest(state["moments"]))
        seen = {step}
        while step < STEPS:
            epoch, batch = divmod(step, SAMPLES // BATCH)
            order = np.random.default_rng(epoch).permutation(SAMPLES)
            ids = order[batch * BATCH : (batch + 1) * BATCH]
            state = train_step(state, *load(ids))
            step += 1
            say(
                "step",
                step=step,
                ids=ids.tolist(),
                weights=digest(state["weights"]),
                optimizer=digest(state["moments"]),
            )
            manager.save(step, args=ocp.args.StandardSave(state))
            for number in {int(path.name) for path in folder.iterdir() if path.name.isdigit()} - seen:
                seen.add(number)
                say("saved", step=number)
            if step % (SAMPLES // BATCH) == 0:
                say("evaluation")
                loss_of(state["weights"], *load(range(SAMPLES)))
    say("finished", step=step)


if __name__ == "__main__":
    main()
