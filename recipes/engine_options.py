"""What vLLM is started with for a recipe: the numerics of the training job, without the parts that only training needs.

`samebits eval` starts an engine in its own process, `samebits serve` a server in another; both get their options and environment here,
so that a response of either is computed with the bits that the training job's engine computes with, and sampled from the same ids. Routes
are not asked for, and without an adapter there are no adapter slots.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .config import Recipe, RecipeError

EXTENSION = "samebits.rollout.worker.WorkerExtension"
_SHARED = (
    "dtype",
    "load_format",
    "max_num_seqs",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "logprobs_mode",
    "enforce_eager",
    "gpu_memory_utilization",
)
"""Keys of verl's rollout configuration that are vLLM's engine arguments under the same name."""


def context_length(recipe: Recipe, verl: DictConfig, needed: int) -> int:
    """Longest sequence of an engine for sequences of `needed` tokens: the recipe's, or longer where the model allows it.

    Raises `RecipeError` when the model does not.
    """
    from samebits.quant.checkpoint import Checkpoint

    config = Checkpoint(recipe.model_path).config
    limit = config.get("text_config", config)["max_position_embeddings"]
    length = verl.actor_rollout_ref.rollout.max_model_len or verl.data.max_prompt_length + verl.data.max_response_length
    if needed > limit:
        raise RecipeError(f"prompt and response need {needed} tokens, the model ends at {limit}: lower --max-tokens")
    return max(needed, length)


def token_count(folder: Path) -> int | None:
    """Ids of a checkpoint's tokenizer; None where it has none, as that of a recipe that is only planned.

    The head may have more rows, whose logits mean nothing: the training job keeps them from being sampled, and so must every engine.
    """
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder))


def engine_options(recipe: Recipe, verl: DictConfig, *, context: int, adapter: bool, tokens: int | None) -> dict[str, Any]:
    """Arguments of vLLM's engine for a validated recipe.

    `context`: longest sequence in tokens. `adapter`: with slots for adapters. `tokens`: from `token_count`.
    """
    rollout = verl.actor_rollout_ref.rollout
    options = {key: rollout[key] for key in _SHARED}
    # vLLM wants room for a whole prompt in a step where prompts are not cut into chunks.
    step = 0 if rollout.enable_chunked_prefill else context
    options |= {
        "max_model_len": context,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, step),
        "seed": recipe.seed,
        "worker_extension_cls": EXTENSION,
    }
    if rollout.tensor_model_parallel_size > 1:
        options["tensor_parallel_size"] = rollout.tensor_model_parallel_size
    options |= OmegaConf.to_container(rollout.engine_kwargs.vllm, resolve=True)
    if tokens is not None:
        options["additional_config"]["samebits"]["tokens"] = tokens
    if adapter:
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": recipe.lora.rank}
    return options


def environment(recipe: Recipe, *, threads: int | None = None) -> dict[str, str]:
    """Environment of a process with an engine, for a recipe: what the training job's processes have."""
    found = {
        "OMP_NUM_THREADS": str(threads or recipe.threads or os.cpu_count() or 1),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if recipe.device == "cpu":
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Lets vLLM's CPU platform keep engine core and worker in one process: apart, each spins on a core while it waits.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # the first batch would wait for a C++ compiler, for one small helper of vLLM's
        }
    return found
