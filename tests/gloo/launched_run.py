"""A script for launchers: a run of the Trainer; each rank writes its log to a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Train, and go on where the latest checkpoint of the folder is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--changes", type=json.loads, default={})
    parser.add_argument("--pause-at", type=int, default=-1, help="ranks wait PAUSES seconds there")
    parser.add_argument("--from-pretrained", action="store_true")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, TrainerCallback

    import distft
    from distft.testing import tiny_model
    from tests.gloo.trainer_jobs import arguments, rows, tokenizer

    torch.set_num_threads(1)
    # Before the arguments: after them transformers partitions it where DeepSpeed's stage 3 is said.
    model = tiny_model("L")
    args = arguments(options.folder, **options.changes)
    if options.from_pretrained:
        # After the arguments, which started the process group, as in most scripts.
        model = AutoModelForCausalLM.from_pretrained(options.folder / "model")

    class Waits(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == options.pause_at and os.environ.get("PAUSES"):
                (options.folder / "waits").write_text(str(os.getpid()))
                time.sleep(float(os.environ["PAUSES"]))

    trainer = distft.Trainer(
        model,
        args,
        strategy=options.strategy,
        train_dataset=rows(),
        processing_class=tokenizer(),
        callbacks=[Waits()],
    )
    trainer.train()
    found = {"strategy": repr(trainer.strategy), "log": trainer.state.log_history}
    name = f"log-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}.json"
    (options.folder / name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
