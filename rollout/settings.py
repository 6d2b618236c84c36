"""What the engine is told about its numerics, and the check, before anything starts, that it can keep to it.

The engine learns its profile from vLLM's `additional_config`:

    {"samebits": {"profile": "w4a16-fp32", "kv_cache": "auto", "targets": "all", "rank": 32}}

`profile` names a numerics profile, `kv_cache` is "auto" (the compute dtype) or "nvfp4", `targets` and `rank` say what an adapter
consists of. vLLM's own `kv_cache_dtype` and `attention_config.indexer_kv_dtype` may say "nvfp4" as well: keys, values and index keys
have one format. `tokens`, where given, is how many ids are tokens: rows of the head behind them are never sampled. (verl's engine is told
in another way, by `monkey_patch_model`.) `split_indexer` (default true) lets the ranks of a tensor-parallel replica share the scoring of
index keys (`index_split`); no bit depends on it.

The check runs while vLLM builds its configuration, in the process of the caller, so that a wrong combination is one line there and not a
traceback from a worker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from samebits.quant.adapter import AdapterSpec, ModelShape, target_roles
from samebits.quant.profile import Format, NumericsProfile, get_profile, require_same
from samebits.quant.ranks import indivisible

ARCHITECTURE = "MiniMaxM3SparseForCausalLM"
PAGE = 128  # tokens of a KV page: one MSA block
RESIDENT = 2  # adapter versions in memory: the one that is being sampled from, and the next one
_ACTIVATIONS = {Format.BF16: torch.bfloat16, Format.FP32: torch.float32}
_KEYS = {"profile", "kv_cache", "targets", "rank", "split_indexer", "tokens"}
serving = False
"""Whether this process holds a model of ours: what is patched in vLLM for it leaves other models alone."""
KV_DTYPES = ("auto", "nvfp4")
"""What vLLM's `kv_cache_dtype` may be."""


class EngineRefused(RuntimeError):
    """The engine cannot run as asked. (No `ValueError`: pydantic would wrap it into several lines.)"""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parsed `samebits` entry of `additional_config`."""

    profile: NumericsProfile
    """With the KV format already replaced."""
    adapter: AdapterSpec
    """What an adapter must consist of."""
    split_indexer: bool = True
    """Do the ranks of a replica share the scoring of index keys?"""
    tokens: int | None = None
    """Ids that may be sampled: those below it; None: all rows of the head."""

    @property
    def packed_kv(self) -> bool:
        """Are K, V and index keys kept as NVFP4 bytes?"""
        return self.profile.kv_cache == Format.NVFP4


def parse(additional_config: Any, hf_config: Any) -> EngineSettings:
    """Settings from vLLM's `additional_config` and the checkpoint's HF config. Raises `EngineRefused` in one line."""
    raw = additional_config.get("samebits") if isinstance(additional_config, dict) else None
    if not isinstance(raw, dict):
        raise EngineRefused("additional_config has no 'samebits' entry: the engine does not know its numerics profile")
    unknown = sorted(raw.keys() - _KEYS)
    if unknown or "profile" not in raw:
        found = f"unknown key {unknown[0]!r}" if unknown else "no 'profile'"
        raise EngineRefused(f"additional_config.samebits has {found}; keys: {', '.join(sorted(_KEYS))}")
    split = raw.get("split_indexer", True)
    if not isinstance(split, bool):
        raise EngineRefused(f"additional_config.samebits.split_indexer must be true or false, not {split!r}")
    values = hf_config.to_dict()
    rows, tokens = values.get("text_config", values)["vocab_size"], raw.get("tokens")
    if tokens is not None and not (type(tokens) is int and 0 < tokens <= rows):
        raise EngineRefused(f"additional_config.samebits.tokens must be a number from 1 to {rows}, the rows of the head, not {tokens!r}")
    try:
        profile = get_profile(raw["profile"], raw.get("kv_cache"))
        spec = AdapterSpec(ModelShape.from_config(values), int(raw.get("rank", 32)), target_roles(raw.get("targets", "all")), profile.lora)
    except ValueError as error:
        raise EngineRefused(str(error)) from None
    return EngineSettings(profile, spec, split_indexer=split, tokens=tokens)


def of(vllm_config: VllmConfig) -> EngineSettings:
    """Settings of a running engine."""
    return parse(vllm_config.additional_config, vllm_config.model_config.hf_config)


def check(vllm_config: VllmConfig) -> EngineSettings:
    """Settings of `vllm_config`, after everything that could disagree with them was compared. Raises `EngineRefused` in one line."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    stamp = getattr(model.hf_config, "samebits", None)
    if not isinstance(stamp, dict) or "weights_hash" not in stamp:
        raise EngineRefused(f"{model.model} was not quantized by samebits (config.json has no 'samebits' entry)")
    settings = parse(vllm_config.additional_config, model.hf_config)
    try:
        require_same("the engine's weights", settings.profile.weights_hash, "the checkpoint", stamp["weights_hash"])
    except ValueError as error:
        raise EngineRefused(str(error)) from None
    name, activations = settings.profile.name, settings.profile.activations
    if activations not in _ACTIVATIONS:
        raise EngineRefused(f"numerics profile {name!r} has {activations} activations, which this engine does not compute")
    if model.dtype != _ACTIVATIONS[Format(activations)]:
        raise EngineRefused(f"numerics profile {name!r} computes in {activations}, the engine was started with dtype {model.dtype}")
    _check_parallel(parallel, settings.adapter.shape)
    if vllm_config.speculative_config is not None:
        raise EngineRefused("speculative decoding is not supported: its logprobs come from other batch shapes")
    lora = vllm_config.lora_config
    if lora is not None and lora.max_loras > RESIDENT:
        raise EngineRefused(f"max_loras is {lora.max_loras}; at most {RESIDENT} adapter versions are resident")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in KV_DTYPES:
        raise EngineRefused(f"kv_cache_dtype must be {' or '.join(KV_DTYPES)}, not {cache_dtype!r}")
    indexer = vllm_config.attention_config.indexer_kv_dtype
    have = "nvfp4" if settings.packed_kv else "bf16" if model.dtype is torch.bfloat16 else "auto"
    if indexer not in ("auto", have):
        raise EngineRefused(f"attention_config.indexer_kv_dtype is {indexer!r}, but index keys are kept as keys and values are ({have})")
    if vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs():
        raise EngineRefused("cudagraph_mode has piecewise graphs; samebits captures whole decode steps and nothing else")
    return settings


def _capture_decode_alone(vllm_config: VllmConfig) -> None:
    """CUDA graphs of whole decode steps or none, and no compilation.

    vLLM (and verl) ask for graphs of all other steps as well. For this architecture those are cut where vLLM's own attention runs, which
    ours never does: the launches of one step's attention would be replayed for steps with other requests and lengths.
    """
    compilation = vllm_config.compilation_config
    asked = compilation.cudagraph_mode
    captured = asked is None or asked.has_full_cudagraphs()
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY if captured else CUDAGraphMode.NONE
    compilation.mode = CompilationMode.NONE


def _check_parallel(parallel: Any, shape: ModelShape) -> None:
    """Which ranks an engine may have. Tensor parallelism spreads the experts as well."""
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size != 1:
            raise EngineRefused(f"{option} is {size}; samebits spreads an engine by tensor_parallel_size alone")
    world = parallel.tensor_parallel_size
    odd = indivisible(
        world, kv_heads=shape.kv_heads, hidden=shape.hidden, intermediates=(shape.shared_intermediate, shape.dense_intermediate)
    )
    if odd or world > shape.experts:
        odd = odd or f"{shape.experts} experts"
        raise EngineRefused(f"tensor_parallel_size is {world}, which does not divide the model's {odd}; use data-parallel replicas")
    if parallel.enable_expert_parallel and parallel.data_parallel_size != 1:
        raise EngineRefused(
            f"enable_expert_parallel with data_parallel_size {parallel.data_parallel_size}: samebits spreads experts over "
            "tensor_parallel_size only, each data-parallel replica has all of them"
        )


def _adopt_kv_dtype(vllm_config: VllmConfig) -> None:
    """Take `kv_cache_dtype` into our settings. Our layers state the bytes of a page themselves, so vLLM is left with "auto"."""
    cache, ours = vllm_config.cache_config, vllm_config.additional_config
    if cache.cache_dtype not in KV_DTYPES or cache.cache_dtype == "auto" or not isinstance(ours, dict) or "samebits" not in ours:
        return  # `check` has the words for what is wrong here
    said = ours["samebits"].get("kv_cache", "auto")
    if said not in ("auto", cache.cache_dtype):
        raise EngineRefused(f"kv_cache_dtype is {cache.cache_dtype!r}, additional_config.samebits.kv_cache is {said!r}")
    vllm_config.additional_config = ours | {"samebits": ours["samebits"] | {"kv_cache": cache.cache_dtype}}
    cache.cache_dtype = "auto"


class ConfigHook(VerifyAndUpdateConfig):
    """vLLM calls this for our architecture while it builds its configuration."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Check the settings and choose the page size where the user did not."""
        cache = vllm_config.cache_config
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            # Workers inherit both. Ranks gather and never reduce; vLLM's own all-reduce would be the first to open symmetric memory, with
            # NVLink multicast, which peer memory here (`kernels.peer_memory`) is kept without.
            os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        _adopt_kv_dtype(vllm_config)
        _capture_decode_alone(vllm_config)
        check(vllm_config)
        if not cache.user_specified_block_size:
            cache.block_size = PAGE
        if cache.block_size != PAGE:
            raise EngineRefused(f"block_size must be {PAGE}, the block of sparse attention, not {cache.block_size}")
