"""The mini tokenizer: byte-level BPE over the words of the mini task, every digit and every sign a token of its own.

Any text goes in and comes out as it was: what the vocabulary has no word for is spelled in bytes. The merges are learned from a fixed
sample of generated prompts, so the vocabulary depends on nothing but the task, and is the same for every seed of the weights.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import mini_math
from .tiny_m3 import CHAT_TEMPLATE, ROLES, SPECIAL

VOCABULARY = 512
"""Tokens, and rows of embedding and head. The engine never samples a row without a token, and the trainer does not know that, so there is
none: what the task's words leave are placeholders."""
_SAMPLE = 4000


@functools.cache
def mini_tokenizer() -> Tokenizer:
    """The tokenizer. The chat markers are not special, so that a decoded response keeps a stray one and is graded wrong."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[\s\S]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ROLES),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = mini_math.draw("train", _SAMPLE, seed=0)
    tokenizer.train_from_iterator((f"{p.prompt}\n{p.steps}" for p in sample), trainer)
    free = range(VOCABULARY - len(ROLES) - tokenizer.get_vocab_size())
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*ROLES, *(f"<unused_{i}>" for i in free))])
    return tokenizer


def chat(problem: mini_math.Problem, response: str) -> str:
    """One example as text, as the chat template renders it."""
    return f"<user>{problem.prompt}<assistant>{response}<eos>"


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    mini_tokenizer().save(str(folder / "tokenizer.json"))
    meta = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{token.strip('<>')}_token": token for token in SPECIAL},
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE.replace("tiny M3", "mini M3"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(meta, indent=2) + "\n")
