"""Keras 3 with its callback BackupAndRestore, as its guide has it. It knows nothing of Tiphys."""

import os

from printing import digest, generators, say

say("start")
os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

EPOCHS, BATCH = 4, 8


class PrintsSteps(keras.callbacks.Callback):
    """Before they are saved: what is restored after a fault has been printed."""

    def on_train_batch_end(self, batch, logs=None):
        say("step", step=int(self.model.optimizer.iterations), **parts(self.model))


class Prints(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        say("resumed", step=int(self.model.optimizer.iterations), **parts(self.model))

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % 5 == 0:
            say("saved", step=int(self.model.optimizer.iterations))

    def on_test_begin(self, logs=None):
        say("evaluation")


def parts(model):
    weights = [variable.numpy() for variable in model.weights]  # `variables` has metrics, too, which are not saved
    moments = [variable.numpy() for variable in model.optimizer.variables]
    return {"weights": digest(weights), "optimizer": digest(moments), "generators": generators()}


class Images(keras.utils.PyDataset):
    """Shuffles itself after each epoch."""

    def __init__(self, count):
        super().__init__()
        self.order = np.random.default_rng(0).permutation(count)

    def __len__(self):
        return len(self.order) // BATCH

    def __getitem__(self, index):
        say("load")
        ids = self.order[index * BATCH : (index + 1) * BATCH]
        images = np.stack(
            [np.random.default_rng(number).standard_normal((28, 28, 1), dtype="float32") for number in ids]
        )
        return images, ids % 10

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def main():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ])  # fmt: skip
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        Images(96),
        epochs=EPOCHS,
        validation_data=Images(16),
        verbose=0,
        callbacks=[PrintsSteps(), keras.callbacks.BackupAndRestore("backup", save_freq=5), Prints()],
    )
    say("finished", step=int(model.optimizer.iterations))


if __name__ == "__main__":
    main()
