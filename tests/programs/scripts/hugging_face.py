"""The Trainer of Hugging Face on a small language model. Three lines keep the checkpoints that it writes."""

from printing import digest, say

say("start")

import torch
import transformers

from tiphys import checkpoint
from tiphys.checkpoint.adapters.transformers import TiphysCallback

STEPS, BATCH = 30, 4


class Prints(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **objects):
        say("resumed", step=state.global_step, **parts(objects))

    def on_step_end(self, args, state, control, **objects):
        say("step", step=state.global_step, **parts(objects))

    def on_save(self, args, state, control, **objects):
        say("saved", step=state.global_step)

    def on_evaluate(self, args, state, control, **objects):
        say("evaluation")


def parts(objects):
    states = {"weights": objects["model"].state_dict(), "optimizer": objects["optimizer"].state_dict()["state"]}
    return {name: digest(state) for name, state in states.items()}


class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        say("load")
        tokens = torch.randint(1, 256, (64,), generator=torch.Generator().manual_seed(index))
        tokens[0] = index  # so that the model can print what it sees
        return {"input_ids": tokens, "labels": tokens}


class Model(transformers.GPT2LMHeadModel):
    def forward(self, input_ids=None, labels=None):
        if self.training:
            say("batch", ids=input_ids[:, 0].tolist())
        return super().forward(input_ids, labels=labels)


def main():
    torch.set_num_threads(1)
    transformers.set_seed(0)
    shape = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=96, n_layer=3, n_head=4)
    arguments = transformers.TrainingArguments(
        "out",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=1,
        save_steps=5,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with checkpoint.session() as session:  # Tiphys
        callback = TiphysCallback(session)  # Tiphys
        trainer = transformers.Trainer(
            Model(shape),
            arguments,
            train_dataset=Texts(96),
            eval_dataset=Texts(8),
            callbacks=[callback, Prints()],
        )
        trainer.train(resume_from_checkpoint=callback.restore("out"))  # Tiphys
    say("finished", step=trainer.state.global_step)


if __name__ == "__main__":
    main()
