"""XGBoost with its callback TrainingCheckPoint, as its guide has it. It knows nothing of Tiphys."""

from pathlib import Path

from printing import digest, say

say("start")

import numpy as np
import xgboost

ROUNDS, EVERY = 60, 5


class Prints(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        step = model.num_boosted_rounds()
        say("step", step=step, weights=digest(model.save_raw()))
        if epoch % EVERY == 0 and epoch:
            say("saved", step=step)
        return False


def main():
    random = np.random.default_rng(0)
    inputs = random.standard_normal((3000, 16))
    labels = (inputs[:, 0] * inputs[:, 1] + inputs[:, 2] > 0).astype(int)
    data = xgboost.DMatrix(inputs, labels)
    folder = Path("snapshots")
    folder.mkdir(exist_ok=True)
    snapshots = sorted(folder.glob("model_*.ubj"), key=lambda path: int(path.stem.rpartition("_")[2]))
    model = xgboost.Booster(model_file=snapshots[-1]) if snapshots else None
    before = model.num_boosted_rounds() if model else 0
    say("resumed", step=before, weights=digest(model.save_raw()) if model else "")
    model = xgboost.train(
        {"objective": "binary:logistic", "max_depth": 6, "eta": 0.1, "nthread": 1},
        data,
        num_boost_round=ROUNDS - before,
        xgb_model=model,
        evals=[(data, "train")],
        verbose_eval=False,
        callbacks=[xgboost.callback.TrainingCheckPoint(folder, interval=EVERY), Prints()],
    )
    say("finished", step=model.num_boosted_rounds())


if __name__ == "__main__":
    main()
