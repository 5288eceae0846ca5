"""The loops of other libraries in docs/checkpoints.md train, save, and resume where they were.

A library that is not installed has a stand-in here, with what the examples call.
"""

import importlib
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, ref, write_claim, write_end

from tiphys import checkpoint
from tiphys.lineage.select import list_commits
from tiphys.store import DirectoryStore, read_events

SECTION = Path(__file__).parents[3].joinpath("docs/checkpoints.md").read_text().partition("## Loops of other libraries")
KERAS, XGBOOST, SKLEARN, JAX = re.findall(r"```python\n(.*?)```", SECTION[2].partition("\n## ")[0], re.DOTALL)
ROWS = np.random.default_rng(1).normal(size=(80, 4)).astype(np.float32)
LABELS = (ROWS[:, 0] > 0).astype(np.int64)


def module_or(name, stand_in):
    try:
        return importlib.import_module(name)
    except ImportError:
        return stand_in


class Variable:
    def __init__(self, value):
        self.value = np.array(value, dtype=np.float32)

    def assign(self, value):
        self.value = np.array(value)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype=dtype)


class StandInKeras:
    """A model of one variable, which grows by one in each epoch."""

    callbacks = SimpleNamespace(Callback=object)

    def __init__(self):
        self.variables = self.trainable_variables = [Variable([0.0])]
        self.optimizer = SimpleNamespace(build=lambda variables: None, variables=[Variable(0)])

    def fit(self, rows, labels, *, initial_epoch, epochs, callbacks):
        assert self.variables[0].value[0] == initial_epoch
        for epoch in range(initial_epoch, epochs):
            self.variables[0].assign(self.variables[0].value + 1)
            callbacks[0].on_epoch_end(epoch, {"loss": 1.0})


def with_keras():
    keras = module_or("keras", StandInKeras)
    if keras is StandInKeras:
        return {"keras": keras, "model": StandInKeras()}
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 4))
    model.compile("adam", "mse")
    return {"keras": keras, "model": model}


class StandInXgboost:
    callback = SimpleNamespace(TrainingCallback=object)

    class Booster:
        def __init__(self, model_file=b""):
            self.rounds = bytes(model_file)

        def num_boosted_rounds(self):
            return len(self.rounds)

        def save_raw(self):
            return bytearray(self.rounds)

    @classmethod
    def train(cls, parameters, data, *, num_boost_round, xgb_model, callbacks):
        booster = xgb_model or cls.Booster()
        for number in range(num_boost_round):
            booster.rounds += b"r"
            callbacks[0].after_iteration(booster, number, {})


def with_xgboost():
    xgboost = module_or("xgboost", StandInXgboost)
    return {"xgboost": xgboost, "data": xgboost.DMatrix(ROWS, LABELS) if xgboost is not StandInXgboost else None}


class StandInClassifier:
    fits = 0

    def partial_fit(self, rows, labels, classes):
        self.fits += 1


def with_sklearn():
    stand_in = SimpleNamespace(SGDClassifier=StandInClassifier)
    return {"SGDClassifier": module_or("sklearn.linear_model", stand_in).SGDClassifier}


def with_jax():
    tree = SimpleNamespace(map=lambda function, values: {name: function(value) for name, value in values.items()})
    jax = module_or("jax", SimpleNamespace(tree=tree, numpy=np))
    weights = {"w": jax.numpy.zeros(4)}
    return {"jax": jax, "weights": weights, "update": lambda weights, rows: {"w": weights["w"] + rows.sum(axis=0)}}


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("program", "given"),
    [(KERAS, with_keras), (XGBOOST, with_xgboost), (SKLEARN, with_sklearn), (JAX, with_jax)],
    ids=["keras", "xgboost", "scikit-learn", "jax"],
)
def test_documented_loop_saves_each_step_and_resumes(program, given, tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path / "store")
    environ = {"STORE": store.url, "RUN": RUN, "STEP": STEP, "LINEAGE": LINEAGE, "SAVE_EVERY": "1 steps"}
    for name, value in environ.items():
        monkeypatch.setenv(f"TIPHYS_{name}", value)
    common = {"np": np, "pickle": pickle, "checkpoint": checkpoint, "rows": ROWS, "labels": LABELS}

    # The first attempt ends after 12 steps, as the limit of the example stands for the end of its pod.
    for attempt, start, total in ((1, None, 12), (2, ref(1, 12), 20)):
        if start:
            write_end(store, end_of(1))
        write_claim(store, claim_of(attempt, start))
        monkeypatch.setenv("TIPHYS_ATTEMPT", str(attempt))
        monkeypatch.setenv("TIPHYS_RESUME_FROM", str(start or ""))
        monkeypatch.setenv("TIPHYS_OUTPUT_COPY", "off")
        exec(re.sub(r"(?<!:)\b20\b", str(total), program), common | given())

    steps = [found.global_step for found in list_commits(store, LINEAGE)]
    assert steps[0] == 20
    assert sorted(steps) == list(range(1, 21))
    assert any("attempt 2 resumes from step 12" in event.message for event in read_events(store, RUN))
