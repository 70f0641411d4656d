"""From a checkpoint to an answer: consolidate, load with transformers alone, generate greedily."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import distft
from distft.demo.data import Example
from distft.demo.tokenizer import load_tokenizer, prompt_ids

# Names that a small model has a chance with: many others are documented in the same words.
_ASKED = ("str.isdigit", "inspect.iscode", "math.cosh", "os.path.isfile")
_MAX_NEW_TOKENS = 48


def ask_about(examples: Sequence[Example], count: int = 3) -> list[Example]:
    """The examples whose questions are put to the trained models.

    Collective: none
    """
    by_name = {example.name: example for example in examples}
    known = [by_name[name] for name in _ASKED if name in by_name]
    return [*known, *examples[:: max(1, len(examples) // count)]][:count]


def consolidate_and_ask(checkpoint: Path, out: Path, questions: Sequence[str]) -> dict[str, str]:
    """Write the checkpoint as safetensors to ``out``; what the model there answers, by question.

    The model is loaded by ``AutoModelForCausalLM.from_pretrained`` on the CPU: nothing of distft
    or DeepSpeed is needed to use it.

    Collective: none
    """
    import torch
    from transformers import AutoModelForCausalLM

    distft.consolidate(checkpoint, out)
    tokenizer = load_tokenizer(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    answers = {}
    for question in questions:
        prompt = torch.tensor([prompt_ids(tokenizer, question)])
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=False,
        )
        text = tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True)
        answers[question] = str(text).strip()
    return answers
