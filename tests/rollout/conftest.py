"""One in-process engine for each configuration, shared by all tests of the session."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samebits.quant.adapter import AdapterSpec, Manifest, ModelShape
from samebits.quant.profile import get_profile
from samebits.quant.roles import LORA_ROLES
from tests.support import random_m3

RANK = 8
KV_BYTES = 128 << 20
PROFILE = "w4a16-fp32"
SMALL = dict(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    enforce_eager=True,
    kv_cache_memory_bytes=KV_BYTES,
)
"""Options of an engine that is small enough for a CPU."""
LARGE = dict(dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=8192)
"""Of one on the kernels' wiring."""
UNTUNED = {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False, "enable_jit_warmup": False}
"""`kernel_config` as recipes have it: without tuning and warming up kernels that this model does not call."""


def usual_options(profile: str, rank: int = RANK, **more: str) -> dict:
    """What every engine of the tests is asked for, as jobs do: adapters in two slots, routes, logprobs, our worker, our numerics."""
    return dict(
        enable_lora=True,
        max_lora_rank=rank,
        max_loras=2,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="samebits.rollout.worker.WorkerExtension",
        additional_config={"samebits": {"profile": profile, "rank": rank, **more}},
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return random_m3.build(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="session")
def start(checkpoint) -> Callable:
    """Starts an engine in this process, on `folder` or the session's checkpoint, with whatever options differ from the usual ones."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the cache's size below, in whole GiB of every engine that is kept

    # Kept to the end of the session: an engine that goes takes the process group with it, in which others and later ones live.
    kept = []

    def start(kv_cache: str = "auto", folder: Path = checkpoint, profile: str = PROFILE, **options):
        from vllm import LLM

        settings = SMALL | usual_options(profile, kv_cache=kv_cache) | options
        kept.append(Engine(LLM(str(folder), **settings), kv_cache, profile))
        return kept[-1]

    return start


@pytest.fixture(scope="session")
def engine(start) -> Engine:
    return start()


@pytest.fixture(scope="session")
def packed_engine(start) -> Engine:
    return start(kv_cache="nvfp4")


class Engine:
    """An engine and the few things that tests do with it."""

    def __init__(self, llm, kv_cache: str, profile: str = PROFILE) -> None:
        self.llm = llm
        self.profile = get_profile(profile, kv_cache).hash
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.get_model()

    def rpc(self, name: str, *args):
        return self.llm.collective_rpc(name, args=args)[0]

    def load(self, tensors: dict[str, torch.Tensor], version: int, folder: Path) -> Manifest:
        from safetensors.torch import save_file

        path = folder / f"adapter-{version}.safetensors"
        save_file(tensors, path)
        sent = Manifest.of(tensors, version, self.profile)
        held = Manifest.from_json(self.rpc("samebits_load_adapter", str(path), sent.to_json()))
        sent.require(held, "engine")
        return held

    def close(self) -> None:
        """End an engine on a GPU, so that the next one of the process can capture graphs."""
        from vllm.platforms import current_platform

        self.llm.llm_engine.engine_core.shutdown()
        self.__dict__.clear()
        gc.collect()
        torch.cuda.empty_cache()
        # Of vLLM's process: the memory pool of graphs that are gone, in which torch captures no more.
        type(current_platform)._global_graph_pool = None

    def clear(self) -> None:
        for i in self.rpc("list_loras"):
            self.rpc("remove_lora", i)

    def run(
        self, prompts: list[list[int]], versions: list[int | None] | int | None = None, tokens: int = 1, **sampling
    ) -> list[SimpleNamespace]:
        """Logprobs of prompt tokens and response tokens, ids and routes of each prompt."""
        from vllm import SamplingParams

        from samebits.rollout.adapter import lora_request

        options = {"temperature": 1.0, "prompt_logprobs": 0} | sampling
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, **options)
        each = versions if isinstance(versions, list) else [versions] * len(prompts)
        requests = [None if v is None else lora_request(v) for v in each]
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, lora_request=requests if any(requests) else None
        )
        return [
            SimpleNamespace(
                prompt_logprobs=torch.tensor([next(iter(x.values())).logprob for x in (o.prompt_logprobs or [])[1:]]),
                logprobs=torch.tensor([x[t].logprob for x, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]),
                ids=list(o.outputs[0].token_ids),
                routes=o.outputs[0].routed_experts,
                cached=o.num_cached_tokens,
            )
            for o in outputs
        ]


def spec() -> AdapterSpec:
    return AdapterSpec(ModelShape.from_config(random_m3.config()), RANK, LORA_ROLES)


def adapter(seed: int, scale: float, roles=LORA_ROLES) -> dict[str, torch.Tensor]:
    """Random A and B; B is zero for roles that are not named."""
    from samebits.quant.adapter import parse_name

    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in spec().shapes().items():
        module, side = parse_name(name)
        t = (torch.randn(*shape, generator=g) * scale).to(torch.bfloat16)
        out[name] = t if side == "A" or module.role in roles else torch.zeros_like(t)
    return out


def prompt(length: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (length,), generator=g).tolist()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
