"""TRL's `SFTTrainer` with a strategy underneath: `distft.Trainer` is in trainer.py."""
