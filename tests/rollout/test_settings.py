"""Engines that could not agree are refused before they start, in one line."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode

from samebits.quant.profile import get_profile
from samebits.rollout.settings import ARCHITECTURE, PAGE, ConfigHook, EngineRefused, check
from tests.support import random_m3


def config(**changes):
    stamp = {"profile": "w4a16", "weights_hash": get_profile("w4a16").weights_hash}
    values = {
        "samebits": {"profile": "w4a16-fp32", "rank": 8},
        "stamp": stamp,
        "dtype": torch.float32,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "speculative_config": None,
        "cache_dtype": "auto",
        "indexer_kv_dtype": "auto",
        "max_loras": 2,
        "block_size": PAGE,
        "cudagraph_mode": CUDAGraphMode.NONE,
    } | changes
    hf = SimpleNamespace(to_dict=random_m3.config, samebits=values["stamp"])
    return SimpleNamespace(
        additional_config={"samebits": values["samebits"]} if values["samebits"] else {},
        model_config=SimpleNamespace(hf_config=hf, dtype=values["dtype"], model="m3"),
        parallel_config=SimpleNamespace(**{k: v for k, v in values.items() if "parallel" in k}),
        speculative_config=values["speculative_config"],
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], block_size=values["block_size"], user_specified_block_size=True),
        attention_config=SimpleNamespace(indexer_kv_dtype=values["indexer_kv_dtype"]),
        lora_config=SimpleNamespace(max_loras=values["max_loras"]),
        compilation_config=SimpleNamespace(mode=None, cudagraph_mode=values["cudagraph_mode"]),
    )


def test_a_fitting_engine_gets_its_settings():
    settings = check(config(samebits={"profile": "w4a16-fp32", "kv_cache": "nvfp4", "targets": "attention", "rank": 16}))
    assert settings.profile == get_profile("w4a16-fp32", "nvfp4") and settings.packed_kv
    assert settings.adapter.rank == 16 and [str(r) for r in settings.adapter.roles] == ["attn.q", "attn.k", "attn.v", "attn.o"]
    assert settings.split_indexer and not check(config()).packed_kv
    assert not check(config(samebits={"profile": "w4a16-fp32", "split_indexer": False})).split_indexer
    check(config(tensor_parallel_size=2, enable_expert_parallel=True))
    check(config(data_parallel_size=2))
    assert check(config()).tokens is None
    assert check(config(samebits={"profile": "w4a16-fp32", "tokens": 90})).tokens == 90


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samebits": None}, "no 'samebits' entry"),
        ({"samebits": {"rank": 8}}, "no 'profile'"),
        ({"samebits": {"profile": "w4a16-fp32", "kv": "nvfp4"}}, "unknown key 'kv'"),
        ({"samebits": {"profile": "w4a16-fp32", "split_indexer": "no"}}, "split_indexer must be true or false, not 'no'"),
        ({"samebits": {"profile": "w8"}}, "unknown numerics profile 'w8'"),
        ({"samebits": {"profile": "w4a16-fp32", "kv_cache": "fp8"}}, "takes a KV cache in"),
        ({"samebits": {"profile": "w4a16-fp32", "targets": "gate"}}, "unknown LoRA target 'gate'"),
        ({"samebits": {"profile": "w4a16-fp32", "tokens": 0}}, "tokens must be a number from 1 to 96, the rows of the head, not 0"),
        ({"samebits": {"profile": "w4a16-fp32", "tokens": 97}}, "from 1 to 96"),
        ({"samebits": {"profile": "w4a16-fp32", "tokens": "90"}}, "not '90'"),
        ({"stamp": None}, "was not quantized by samebits"),
        ({"stamp": {"weights_hash": "0" * 16}}, "they would not compute the same bits"),
        ({"dtype": torch.bfloat16}, "computes in float32, the engine was started with dtype torch.bfloat16"),
        ({"samebits": {"profile": "w4a4"}}, "nvfp4 activations, which this engine does not compute"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4, which does not divide the model's 2 KV heads; use data-par"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel with data_parallel_size 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype must be auto or nvfp4, not 'fp8'"),
        (
            {"cache_dtype": "nvfp4", "samebits": {"profile": "w4a16-fp32", "kv_cache": "float32"}},
            "kv_cache_dtype is 'nvfp4', additional_config.samebits.kv_cache is 'float32'",
        ),
        ({"indexer_kv_dtype": "nvfp4"}, "indexer_kv_dtype is 'nvfp4'"),
        ({"cache_dtype": "nvfp4", "indexer_kv_dtype": "fp8"}, "indexer_kv_dtype is 'fp8'.*(nvfp4)"),
        ({"max_loras": 3}, "max_loras is 3"),
        ({"block_size": 64}, "block_size must be 128"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(EngineRefused, match=message) as error:
        ConfigHook.verify_and_update_config(config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("said", [None, "auto", "nvfp4"])
def test_the_kv_format_may_come_by_vllms_own_option(said):
    c = config(cache_dtype="nvfp4", samebits={"profile": "w4a16-fp32"} | ({"kv_cache": said} if said else {}))
    ConfigHook.verify_and_update_config(c)
    assert c.cache_config.cache_dtype == "auto" and check(c).packed_kv


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_open_their_memory_without_nvlink_multicast(ranks, monkeypatch):
    names = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for name in names:
        monkeypatch.setenv(name, "as it was")
    with contextlib.suppress(EngineRefused):
        ConfigHook.verify_and_update_config(config(tensor_parallel_size=ranks))
    assert tuple(os.environ[name] for name in names) == (("0", "1") if ranks > 1 else ("as it was",) * 2)


def test_the_page_size_is_chosen_where_the_user_did_not():
    c = config(block_size=16)
    c.cache_config.user_specified_block_size = False
    ConfigHook.verify_and_update_config(c)
    assert c.cache_config.block_size == PAGE


@pytest.mark.parametrize("asked", [None, *CUDAGraphMode])
def test_graphs_are_captured_of_decode_steps_alone(asked):
    """vLLM counts the architecture among those whose prefills it captures too, in pieces that its own attention divides."""
    from vllm.config.vllm import DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES

    assert ARCHITECTURE in DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES
    c = config(cudagraph_mode=asked)
    ConfigHook.verify_and_update_config(c)
    got = c.compilation_config.cudagraph_mode
    assert got == (CUDAGraphMode.NONE if asked in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE) else CUDAGraphMode.FULL_DECODE_ONLY)
    assert c.compilation_config.mode == CompilationMode.NONE


def test_an_engine_with_graphs_in_pieces_is_refused_when_its_model_is_built():
    with pytest.raises(EngineRefused, match="piecewise"):
        check(config(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE))


@pytest.mark.slow
def test_vllm_itself_reports_the_refusal(checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    args = {"dtype": "bfloat16", "additional_config": {"samebits": {"profile": "w4a16-fp32"}}}
    with pytest.raises(EngineRefused, match="computes in float32"):
        EngineArgs(str(checkpoint), **args).create_engine_config()
