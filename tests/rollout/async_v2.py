"""`python -m tests.rollout.async_v2 CHECKPOINT`: a job's server over V2's outputs without a model, in the processes that a GPU's job has.

Prints one JSON object of what was seen.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

import numpy as np

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.rollout import server as module
from samebits.rollout.server import SamebitsServer
from tests.support.served import print_seen

from .conftest import KV_BYTES
from .test_whole import BLOCK, MAX_LEN, Wish, expected

ROUNDS, REQUESTS = 3, 96


def server_of(folder: str) -> SamebitsServer:
    """The server of a recipe with sleep, without Ray."""
    from verl.workers.rollout.replica import RolloutMode
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.support.v2_worker import configure

    arguments = AsyncEngineArgs(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=KV_BYTES,
        additional_config={"samebits": {"profile": "w4a16-fp32", "rank": 8}},
        max_model_len=MAX_LEN,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=4 * REQUESTS,
        block_size=BLOCK,
    )
    config = configure(arguments.create_engine_config())
    server = SamebitsServer.__new__(SamebitsServer)
    server.engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    server.replica_rank, server.node_rank, server.global_steps, server._adapter_version = 0, 0, 0, 0
    server.rollout_mode, server._submission_paused, server._admitting = RolloutMode.HYBRID, False, 0
    server.model_config = SimpleNamespace(lora_rank=0, lora={})
    server.config = SimpleNamespace(
        free_cache_engine=True, max_model_len=MAX_LEN, response_length=300, ignore_eos=True, enable_rollout_routing_replay=True
    )
    module.lora_request = lambda version: None  # a worker without a model has no adapters
    return server


def differs(got: Any, wish: Wish) -> str | None:
    """What of an output is not what the executor's formulas say."""
    want = expected(wish)
    routes = np.concatenate((want.routes, np.full((1, *want.routes.shape[1:]), -1, np.int16)))
    parts = {
        "ids": got.token_ids == want.ids,
        "logprobs": got.log_probs == [row[1] for row in want.logprobs],
        "routes": got.routed_experts.dtype == np.int16 and np.array_equal(got.routed_experts, routes),
        "reason": got.extra_fields["finish_reason"] == want.reason,
    }
    return next((name for name, same in parts.items() if not same), None)


async def see(server: SamebitsServer) -> dict[str, Any]:
    """Steps of a job, the last cut short by sleep."""
    found: dict[str, Any] = {"differs": []}
    await server.sleep()
    for step in range(ROUNDS):
        await server.wake_up(["weights"])
        await server.wake_up(["kv_cache"])
        wishes = []
        for n in range(REQUESTS):
            plain = Wish(n + step, 20 + 7 * n % 96, 20 + 53 * n % 260)
            ends = expected(plain).ids
            wishes.append(Wish(plain.start, plain.length, plain.tokens, stops=[ends[len(ends) // 2]] if n % 3 else []))
        params = [{"temperature": 1.0, "logprobs": True, "max_tokens": w.tokens, "stop_token_ids": w.stops} for w in wishes]
        outputs = await server.generate_batch([w.prompt for w in wishes], params, [f"{step}-{n}" for n in range(REQUESTS)])
        found["differs"] += [f"{d} of {w}" for o, w in zip(outputs, wishes, strict=True) if (d := differs(o, w))]
        await server.sleep()
    await server.wake_up()
    running = asyncio.create_task(server.generate([3, 4, 5], {"temperature": 1.0, "logprobs": True}, "cut"))
    while not server.engine.output_processor.request_states:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    await server.sleep()
    found["cut"] = (await running).stop_reason
    await server.wake_up()
    again = await server.generate_batch([Wish(1).prompt], [{"temperature": 1.0, "logprobs": True, "max_tokens": 30}], ["again"])
    found["differs"] += [d for d in [differs(again[0], Wish(1))] if d]
    await asyncio.sleep(0.5)  # workers learn of a request's end with the next step
    found["left"] = await server.engine.collective_rpc("left")
    return found


async def main(folder: str) -> None:
    """Start, see, end."""
    await print_seen(server_of(folder), see)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
