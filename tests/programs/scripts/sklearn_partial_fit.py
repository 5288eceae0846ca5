"""scikit-learn's partial_fit over chunks, with joblib.dump as its guide has it. It knows nothing of Tiphys."""

from pathlib import Path

from printing import digest, say

say("start")

import joblib
import numpy as np
from sklearn.linear_model import SGDClassifier

CHUNKS, SAMPLES, EVERY = 60, 200, 5


def load(chunk):
    say("load")
    random = np.random.default_rng(chunk)
    inputs = random.standard_normal((SAMPLES, 1000))
    return inputs, (inputs[:, 0] + inputs[:, 1] > 0).astype(int)


def parts(model):
    return {"weights": digest(model.coef_, model.intercept_), "optimizer": digest(model.t_)}


def main():
    folder = Path("models")
    folder.mkdir(exist_ok=True)
    dumps = sorted(folder.glob("model-*.joblib"))
    if dumps:
        chunk, model = joblib.load(dumps[-1])
        say("resumed", step=chunk, **parts(model))
    else:
        chunk, model = 0, SGDClassifier(loss="log_loss", shuffle=False, random_state=0)
        say("resumed", step=chunk, weights="", optimizer="")
    test = load(10_000)
    while chunk < CHUNKS:
        model.partial_fit(*load(chunk), classes=[0, 1])
        chunk += 1
        say("step", step=chunk, ids=[chunk - 1], **parts(model))
        if chunk % EVERY == 0:
            say("evaluation")
            model.score(*test)
            joblib.dump((chunk, model), folder / f"model-{chunk:04d}.joblib")
            say("saved", step=chunk)
    say("finished", step=chunk)


if __name__ == "__main__":
    main()
