"""Steps of the engine on fake CUDA tensors: `python -m tests.rollout.on_fake_cuda bfloat16|nvfp4`, a process of its own.

The serving model, its adapter slots and the builder of its steps are the engine's own; vLLM's scheduler and runner are not there. What a
CUDA graph cannot hold raises or is found: a value asked for on the host, operands on two devices, a copy from or to the host, a stream
that is not joined, a kernel that is compiled while a graph is captured.
"""

from __future__ import annotations

from tests.support.fake_cuda import Launch, Seen, fake_cuda  # before torch

# ruff: noqa: E402, I001
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
import samebits.rollout

samebits.rollout.register()

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.linear_tiles import MXFP8Tiles
from samebits.kernels.logprobs import token_logprob_rows
from samebits.quant.checkpoint import config_json
from samebits.quant.profile import get_profile
from samebits.rollout import attention, pages, slots
from samebits.rollout.model import Experts, MiniMaxM3ForCausalLM
from tests.support import random_m3

SIZES = dict(vocab=512, hidden=512, heads=16, kv_heads=4, layers=3, experts=16, top_k=4, intermediate=256, dense=512, blocks=16)
CONTEXT, REQUESTS, TOKENS, PAGES = 4096, 64, 8192, 8
CAPTURED = (1, 2, 4, 8, 24, 64)  # tokens of decode steps that have a graph
# Tokens, requests, most tokens of a request, longest context: chunked prefill beside decode, long and short, and whole prompts.
OTHER_STEPS = ((300, 2, 299, 2049), (8192, 64, 4000, 4096), (64, 64, 1, 100), (8192, 64, 128, 128))


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def engine_config(folder: Path, kv_cache: str) -> VllmConfig:
    """vLLM's configuration of an engine, and the process groups that its layers ask for."""
    small = SIZES | dict(hidden=64, intermediate=64, dense=64, vocab=64)  # the names are the same
    config = config_json(random_m3.config(**SIZES), list(random_m3.tensors(**small)), get_profile("w4a16"))
    (folder / "config.json").write_text(json.dumps(config))
    random_m3.write_tokenizer(folder, SIZES["vocab"])
    options = dict(dtype="bfloat16", max_model_len=CONTEXT, max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS, enforce_eager=True)
    ours = {"samebits": {"profile": "w4a16", "kv_cache": kv_cache, "rank": 32}}
    made = EngineArgs(str(folder), **options, enable_lora=True, max_lora_rank=32, max_loras=2, additional_config=ours)
    config = made.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'group'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    return config


class FakeEngine:
    """The model with tiles for weights, its slots, and the buffers that vLLM's V2 runner keeps."""

    def __init__(self, config: VllmConfig, seen: Seen) -> None:
        self.config, self.seen, device = config, seen, torch.device("cuda", 0)
        attention.kernels_attend = lambda *_: True
        with set_default_torch_dtype(torch.bfloat16), torch.device("cuda"):
            self.model = MiniMaxM3ForCausalLM(vllm_config=config)
        for module in self.model.modules():
            if hasattr(module, "slices"):
                n, k = module.weight.shape
                chunks = -(-k // 128)
                module.tiles = MXFP8Tiles(empty(chunks, n, 16, dtype=torch.int64), empty(chunks, n, dtype=torch.int32), k)
            elif isinstance(module, Experts):
                for name in ("w13", "w2"):
                    count, n, half = getattr(module, f"{name}_weight").shape
                    chunks = -(-2 * half // 128)
                    codes, scales = empty(count, chunks, n, 16, dtype=torch.int32), empty(count, chunks, n, dtype=torch.int64)
                    setattr(module, name, NVFP4Tiles(codes, scales, empty(count, dtype=torch.float32), 2 * half))
        self.slots = slots.attach(self.model, config, device, self.model.settings.adapter).slots
        self.slots.occupants = [1, 2]
        layers = [layer.self_attn.attn for layer in self.model.model.layers]
        self.names = [layer.prefix for layer in layers]
        spec = layers[0].get_kv_cache_spec(config)
        for layer in layers:
            layer.bind_kv_cache(empty(PAGES, 1, 128, spec.head_size + spec.head_size_v, dtype=spec.dtype))
        self.builder = pages.StepBuilder(spec, self.names, config, device)
        self.ids, self.lengths = empty(TOKENS, dtype=torch.int32), empty(REQUESTS, dtype=torch.int32)
        self.starts, self.table = empty(REQUESTS + 1, dtype=torch.int32), empty(REQUESTS, CONTEXT // 128, dtype=torch.int32)
        self.mapping, self.positions = empty(TOKENS, dtype=torch.int64), empty(TOKENS, dtype=torch.int64)

    def step(self, tokens: int, requests: int, most: int, longest: int, adapters: list[int]) -> list[Launch]:
        """Launches of one forward. Raises when building the step or the forward copied, waited, or left a stream alone."""
        self.slots.set_tokens((adapters * tokens)[:tokens])
        self.seen.clear()
        common = CommonAttentionMetadata(
            query_start_loc=self.starts[: requests + 1],
            query_start_loc_cpu=None,
            seq_lens=self.lengths[:requests],
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_query_len=most,
            max_seq_len=longest,
            block_table_tensor=self.table[:requests],
            slot_mapping=self.mapping[:tokens],
        )
        metadata = dict.fromkeys(self.names, self.builder.build(0, common))
        with set_forward_context(metadata, self.config, num_tokens=tokens):
            hidden = self.model(self.ids[:tokens], self.positions[:tokens])
        launches = self.seen.launches
        logits = self.model.compute_logits(hidden[:requests])
        token_logprob_rows(logits, empty(requests, 1, dtype=torch.int64))
        assert hidden.shape == (tokens, SIZES["hidden"]) and logits.shape == (requests, SIZES["vocab"])
        assert not self.seen.copies, f"{tokens} tokens: {self.seen.copies}"
        forked, joined = self.seen.waits[::2], self.seen.waits[1::2]
        assert set(forked) <= {("side", "main")} and joined == [("main", "side")] * len(forked), self.seen.waits
        return launches


def keys(launches: list[Launch]) -> set[tuple[str, str]]:
    return {(launch.kernel, launch.key) for launch in launches}


def main(kv_cache: str) -> dict[str, Any]:
    """Take the steps; returns how many there were and what was launched."""
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(Path(folder), kv_cache)
    compiled: set[tuple[str, str]] = set()
    forks = 0
    with fake_cuda() as seen, set_current_vllm_config(config), torch.inference_mode():
        engine = FakeEngine(config, seen)
        seen.clear()
        engine.slots.set_tokens([2] * 8)
        assert not seen.copies, f"a step with one adapter waits for the step before: {seen.copies}"
        engine.slots.set_tokens([1, 2, 0, 1])
        waiting = [copy for copy in seen.copies if " and goes on at " not in copy]
        assert seen.pinned and seen.copies and not waiting, f"a step with several adapters waits for the step before: {waiting}"
        for tokens in CAPTURED:
            for adapters in ([0], [1, 2]):
                warm, captured = (engine.step(tokens, tokens, 1, CONTEXT, adapters) for _ in range(2))
                assert [launch.grid for launch in warm] == [launch.grid for launch in captured]
                assert keys(captured) <= keys(warm), "a kernel is compiled while a graph is captured"
                compiled |= keys(warm)
                forks += len(seen.waits)
        for step in OTHER_STEPS:
            for adapters in ([0], [1], [1, 0, 2]):
                compiled |= keys(engine.step(*step, adapters))
    return {"variants": len(compiled), "kernels": sorted({name for name, _ in compiled}), "forks": forks}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
