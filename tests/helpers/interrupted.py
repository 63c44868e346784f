"""A script that does one thing for ever, and says in a file of each rank that it does.

Arguments: what it does, a plan, and a folder for all that it writes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import meshplan
from tests.helpers.stated import DIM, HEADS, SEQ_LEN, VOCAB, Model, Tokens, next_token_loss

NUM_SAMPLES = 10**6


class Endless(Tokens):
    """So many samples that nobody reads all of them."""

    def __len__(self) -> int:
        return NUM_SAMPLES


def main(what: str, plan: str, folder: Path) -> None:
    def say(number: int) -> None:
        if number == 3:  # What is done for the first time is done by then.
            (folder / f"ready-{os.environ['RANK']}").touch()

    torch.manual_seed(0)
    if what == "generate":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": DIM, "n_head": HEADS, "n_layer": 1, "vocab_size": VOCAB}
        module: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=64))
    else:
        module = Model()
    model = meshplan.parallelize(module, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if what == "predict":
        seen = iter(range(NUM_SAMPLES))

        def inputs(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            say(next(seen))
            return batch[0]

        meshplan.predict(model, Endless(), inputs=inputs, take=lambda x: x.argmax(-1), batch_size=8)
    elif what == "generate":
        prompt = torch.ones(1, SEQ_LEN, dtype=torch.int64)
        for number in range(NUM_SAMPLES):
            model.generate(prompt, max_new_tokens=16, min_new_tokens=16, pad_token_id=0)
            say(number)
    elif what == "save":
        for number in range(NUM_SAMPLES):
            meshplan.save(folder / "states", model, optimizer, step=number, keep=3)
            say(number)
    else:
        workers = 2 if what == "workers" else 0
        loader = meshplan.dataloader(Endless(), model, batch_size=8, num_workers=workers)
        with meshplan.Run(folder / "run", model):
            for number, batch in enumerate(loader):
                meshplan.train_step(model, optimizer, *batch, next_token_loss)
                say(number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
