"""Models of the baseline: what stock verl and stock vLLM know, in the sizes of the mini MiniMax-M3, with random weights.

Time and memory of a step do not depend on what the weights say, as long as every response has the same length; so nothing is trained.
M3's shared expert has no counterpart in Qwen3-MoE, which leaves 2 % of the parameters out and each token one expert less.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from .mini_model import MINI
from .mini_tokens import write_tokenizer
from .tiny_m3 import BOS, EOS, PAD

_COMMON = {
    "vocab_size": MINI.vocab,
    "head_dim": MINI.head_dim,
    "max_position_embeddings": MINI.max_position,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-moe-mini": {
        "model_type": "qwen3_moe",
        "hidden_size": MINI.hidden,
        "num_hidden_layers": MINI.layers,
        "num_attention_heads": MINI.heads,
        "num_key_value_heads": MINI.kv_heads,
        "num_experts": MINI.experts,
        "num_experts_per_tok": MINI.top_k,
        "moe_intermediate_size": MINI.intermediate,
        "intermediate_size": MINI.dense,
        "mlp_only_layers": [layer for layer, moe in enumerate(MINI.moe_layer_freq) if not moe],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "qwen3-tiny": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
}
"""config.json by name. qwen3-tiny is dense: it is there to try the baseline out on a CPU, where vLLM has no experts under LoRA."""
MOE = frozenset(name for name, sizes in MODELS.items() if "num_experts" in sizes)


def model_config(name: str):
    """transformers' configuration of a model. Raises `KeyError` on an unknown name."""
    from transformers import AutoConfig

    sizes = {**_COMMON, **MODELS[name]}
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def parameters(name: str) -> int:
    """How many parameters a model has."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(model_config(name)).parameters())


def write_model(name: str, folder: Path, seed: int) -> None:
    """Write a bf16 checkpoint with random weights by `seed`, and the mini tokenizer, into the new `folder`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    _spread(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, MINI.max_position)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


@torch.no_grad()
def _spread(model: torch.nn.Module) -> None:
    """Matrices of rows of length one, as the mini's start: with transformers' 0.02 routers of a narrow model choose nearly by chance."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=1 / math.sqrt(weight.shape[-1]))
