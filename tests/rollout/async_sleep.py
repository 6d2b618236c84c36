"""`python -m tests.rollout.async_sleep CHECKPOINT`: a job's server over vLLM's asynchronous engine, put to sleep and woken as verl does it.

The engine core is a process of its own, as in a job. Prints one JSON object of what was seen.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the cache's size below

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.quant.adapter import Manifest
from samebits.quant.profile import get_profile
from samebits.rollout.server import SamebitsServer
from tests.support.served import print_seen

from .conftest import PROFILE, RANK, SMALL, adapter, prompt, usual_options

PROMPTS = [prompt(n, n) for n in (3, 130)]
GREEDY = {"temperature": 0, "logprobs": True, "max_tokens": 5}


def server_of(folder: str) -> SamebitsServer:
    """The server of a recipe with sleep, without Ray."""
    from verl.workers.rollout.replica import RolloutMode
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            folder,
            enable_chunked_prefill=False,
            **SMALL | {"max_num_seqs": 8},
            **usual_options(PROFILE) | {"worker_extension_cls": "tests.support.sleeping_worker.SleepingWorker"},
        )
    )
    server = SamebitsServer.__new__(SamebitsServer)
    server.engine, server.replica_rank, server.node_rank, server.global_steps = engine, 0, 0, 0
    server.rollout_mode, server._submission_paused, server._admitting = RolloutMode.HYBRID, False, 0
    server.model_config = SimpleNamespace(lora_rank=RANK, lora={})
    server.config = SimpleNamespace(
        free_cache_engine=True, max_model_len=1024, response_length=900, ignore_eos=True, enable_rollout_routing_replay=True
    )
    return server


async def see(server: SamebitsServer) -> dict[str, Any]:
    """Two steps of a job, the second cut short by sleep."""
    from safetensors.torch import save_file

    async def sync(version: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            path, tensors = Path(folder) / "adapter.safetensors", adapter(version, 0.2)
            save_file(tensors, path)
            sent = Manifest.of(tensors, version, get_profile(PROFILE).hash)
            report = await server.sync_adapter(str(path), sent.to_json(), time.time())
        return sent.agrees([Manifest.from_json(held) for held in report["held"]])

    async def sample(name: str) -> list[tuple[list[int], list[float], list]]:
        outputs = await server.generate_batch(PROMPTS, [GREEDY] * len(PROMPTS), [f"{name}{i}" for i in range(len(PROMPTS))])
        return [(o.token_ids, o.log_probs, o.routed_experts.tolist()) for o in outputs]

    found: dict[str, Any] = {}
    await server.sleep()  # before anything ran, as a job does it to load its checkpoint
    await server.wake_up(["weights"])
    found["synced"] = [await sync(0)]
    await server.wake_up(["kv_cache"])
    first = await sample("a")
    await server.sleep()
    digests = await server.base_digests()
    found["asleep"] = await server.engine.is_sleeping()
    await server.wake_up(["weights"])
    await server.wake_up(["kv_cache"])
    found["same"] = await sample("b") == first
    found["base_same"] = await server.base_digests() == digests
    running = asyncio.create_task(server.generate(PROMPTS[0], {"temperature": 0}, "long"))
    while not server.engine.output_processor.request_states:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await server.sleep()
    found["cut"] = (await running).stop_reason
    await server.wake_up(["weights"])
    found["synced"].append(await sync(1))
    await server.wake_up(["kv_cache"])
    second = await sample("c")
    found["moved"] = [a[1] != b[1] for a, b in zip(first, second, strict=True)]
    return found


async def main(folder: str) -> None:
    """Start, see, end."""
    await print_seen(server_of(folder), see)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
