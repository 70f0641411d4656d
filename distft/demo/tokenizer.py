"""A byte-level BPE tokenizer trained on the demo's own text, and rows whose loss is on the answer.

Byte level: any text can be written, nothing is ever unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from distft.demo.data import Example

VOCABULARY = 2048
MAX_TOKENS = 96  # of one row; nearly all are shorter
IGNORED = -100  # the label that cross-entropy leaves out, in torch and in transformers

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Qwen's chat format without system prompt and tools.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    examples: Sequence[Example], vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """A tokenizer of ``vocabulary`` tokens trained on the examples, the same at every call.

    Collective: none
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (message["content"] for example in examples for message in example.messages)
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved at ``path``, through ``AutoTokenizer`` as anyone would load it.

    Collective: none
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(path)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of the question as a chat, up to where the answer begins.

    Collective: none
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def row(tokenizer: PreTrainedTokenizerFast, example: Example) -> dict[str, list[int]]:
    """One training row: ``input_ids`` and ``labels``, at most ``MAX_TOKENS`` long.

    The labels of the question are ``IGNORED``: the model learns to answer, not to ask. The end
    token is learned too, or generation would never stop.

    Collective: none
    """
    prompt = prompt_ids(tokenizer, example.question)
    answer = tokenizer.encode(example.answer + _END, add_special_tokens=False)
    input_ids = (prompt + list(answer))[:MAX_TOKENS]
    labels = ([IGNORED] * len(prompt) + list(answer))[:MAX_TOKENS]
    return {"input_ids": input_ids, "labels": labels}
