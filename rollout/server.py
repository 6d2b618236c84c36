"""verl's side of the rollout: the Ray server around one vLLM engine. The sender that brings adapters to it is in `sender`.

A sync is tensors, in a buffer on the GPU or in a file in shared memory, and one manifest. The server has every engine rank load them,
asks each for the digests of what it then holds, drops the prefix cache, and only when every answer equals the manifest do later requests
use the new version. The report of what was sent and what is held stays with the server: the job reads it after every sync.
Each request names the adapter version it wants, so there is no request that silently runs on the base model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from samebits.quant.adapter import AdapterError, Manifest
from samebits.rollout import ended
from samebits.rollout.adapter import lora_request
from samebits.rollout.sender import ACTORS
from samebits.rollout.whole import WHOLE


class RouteError(RuntimeError):
    """The engine returned no routes, or routes that do not fit the tokens."""


class LogprobError(RuntimeError):
    """The engine returned logprobs that are not those of the sampled tokens."""


@dataclass
class SyncReport:
    """What one sync sent and what every rank of one engine replica holds afterwards."""

    replica: int
    version: int
    tensors: int
    bytes: int
    seconds: float
    sent: str
    """Manifest as JSON, with the digests of every rank's parts."""
    held: list[str] = field(default_factory=list)
    """Manifest of what each engine rank holds, as JSON, in the order of the ranks."""
    path: str = "file"
    """ipc: opened on the GPU that trainer and engine share; file: by a file in shared memory."""
    reason: str = ""
    """Why it was not ipc."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds: export (gathering, and the copy into buffer or host memory), digest, write or share, wait (for what of an engine's waking
    these did not hide, where it was asleep); load and verify of the slowest rank."""
    memory: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Peak bytes by role (trainer, engine), phase and kind (see `kernels.meter`); of the engine the largest rank's."""
    refused: str | None = None
    """Why an engine rank could not open the trainer's memory; nothing was loaded then."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Seconds in which the engine was put to sleep and woken since the last report, where a recipe has that."""


class SamebitsServer(vLLMHttpServer):
    """vLLM server of one replica with versioned in-memory adapters and batched generation."""

    _adapter_version: int | None = None
    _report: SyncReport | None = None
    _waiting: dict[str, float] | None = None

    def _get_worker_extension_cls(self) -> str:
        return "samebits.rollout.worker.WorkerExtension"

    async def run_server(self, args) -> None:
        """Start the engine from vLLM's parsed arguments."""
        # Two slots: the next version is loaded and checked while the current one is still there.
        args.max_loras = 2
        await super().run_server(args)
        self._watching = asyncio.create_task(self._watch_engine())

    async def _watch_engine(self) -> None:
        """Tell the job's driver when the engine's process ends: requests learn it from vLLM, but a job may make none for long."""
        processes = list(self.engine.engine_core.resources.engine_manager.processes)
        while not self.engine.errored:
            await asyncio.sleep(0.5)
        for _ in range(20):  # vLLM hears from an engine that failed a moment before its process is gone
            if any(process.exitcode is not None for process in processes):
                break
            await asyncio.sleep(0.1)
        gone = [f"process {p.name} (pid {p.pid}) {ended.words(ended.from_exitcode(p.exitcode))}" for p in processes if not p.is_alive()]
        job = ray.get_runtime_context().get_job_id()
        ended.leave_note(job, self.replica_rank, f"engine replica {self.replica_rank}: {', '.join(gone) or 'vLLM gave its process up'}")

    async def sync_adapter(
        self, source: str, manifest_json: str, started: float, sender: dict[str, Any] | None = None, global_steps: int | None = None
    ) -> dict[str, Any]:
        """Load the adapter at `source` on every rank, verify it and make it the one that requests use. Returns the report as a dict.

        `sender` says what `source` is (`path`: file, or ipc for handles) and what its side took. When a rank's answer differs, the
        previous version stays in use and the report says what is held. When a rank cannot open a handle, nothing is held and it says why.
        `global_steps`: the job's step, which verl's server keeps.
        """
        manifest = Manifest.from_json(manifest_json)
        sender = sender or {"path": "file", "reason": "", "seconds": {}, "memory": {}}
        answers = await self.engine.collective_rpc("samebits_sync_adapter", args=(sender["path"], source, manifest_json))
        measured = [answer["measured"] for answer in answers]
        refused = [answer["refused"] for answer in answers if answer["refused"] is not None]
        if refused:
            if len(refused) < len(answers):  # where some ranks could open a handle and others not, all start again from none
                await self.engine.collective_rpc("samebits_remove_adapter", args=(manifest.version,))
        else:
            await self.engine.reset_prefix_cache()
        report = SyncReport(
            replica=self.replica_rank,
            version=manifest.version,
            tensors=len(manifest.digests),
            bytes=manifest.bytes,
            seconds=0.0,
            sent=manifest_json,
            held=[] if refused else [answer["held"] for answer in answers],
            path=sender["path"],
            reason=sender["reason"],
            parts=sender["seconds"] | _slowest(measured, ("load", "verify")),
            memory={"trainer": sender["memory"], "engine": _largest(measured)},
            refused=refused[0] if refused else None,
        )
        agrees = not refused and manifest.agrees([Manifest.from_json(held) for held in report.held])
        report.seconds = time.time() - started
        if refused:
            return asdict(report)
        self._report = report
        after = [] if global_steps is None else [self.set_global_steps(global_steps)]
        if agrees:
            previous, self._adapter_version = self._adapter_version, manifest.version
            if previous is not None and previous != manifest.version:
                after.append(self.engine.collective_rpc("samebits_remove_adapter", args=(previous,)))
        await asyncio.gather(*after)
        return asdict(report)

    async def sync_report(self) -> dict[str, Any] | None:
        """Report of the last sync, with what the engine holds for that version now (asked again, not remembered).

        A version that failed its check was never taken into use: its report keeps the answers that failed.
        """
        if self._report is None:
            return None
        self._report.waiting, self._waiting = self._waiting or {}, None
        if self._report.version != self._adapter_version:
            return asdict(self._report)
        held = await self.engine.collective_rpc("samebits_held_adapter", args=(self._adapter_version,))
        return asdict(self._report) | {"held": list(held)}

    async def device_uuids(self) -> list[str | None]:
        """UUID of each engine rank's device; None on a CPU."""
        return list(await self.engine.collective_rpc("samebits_device_uuid"))

    async def copy_seconds(self, size: int) -> float:
        """Seconds that a plain copy of `size` bytes takes on the slowest rank's device."""
        return max(await self.engine.collective_rpc("samebits_copy_seconds", args=(size,)))

    async def forget_adapter(self) -> None:
        """Empty the slot of the version in use, so that the same version can be sent again."""
        await self.engine.collective_rpc("samebits_remove_adapter", args=(self._adapter_version,))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """verl's, timed."""
        await self._timed("wake", super().wake_up(tags))

    async def sleep(self) -> None:
        """verl's, timed; where the recipe has no sleep this does nothing."""
        await self._timed("sleep", super().sleep())

    async def _timed(self, name: str, work: Awaitable[Any]) -> None:
        started = time.perf_counter()
        await work
        if self.config.free_cache_engine:
            self._waiting = self._waiting or {}
            self._waiting[name] = self._waiting.get(name, 0.0) + time.perf_counter() - started

    async def base_digests(self) -> list[dict[str, str]]:
        """Digest of every base weight as each engine rank holds it, by canonical module path; the engine may be asleep."""
        async with self._weights_awake():
            return list(await self.engine.collective_rpc("samebits_base_digests"))

    @asynccontextmanager
    async def _weights_awake(self) -> AsyncIterator[None]:
        """The engine's weights lie on its device inside the block. While the trainer learns from a step their memory may be given away:
        to read it then is an illegal access, which ends the engine."""
        asleep = await self.engine.is_sleeping()
        if asleep:
            await self.engine.wake_up(tags=["weights"])
        try:
            yield
        finally:
            if asleep:
                await self.engine.sleep(level=1)  # which keeps weights on the host

    async def held_bytes(self) -> list[dict[str, int]]:
        """Bytes of weights, adapter slots and KV cache of each engine rank, and on CUDA of its card."""
        return list(await self.engine.collective_rpc("samebits_held_bytes"))

    async def profile_hashes(self) -> list[str]:
        """Hash of the numerics profile of each engine rank."""
        return list(await self.engine.collective_rpc("samebits_profile"))

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        """Call a worker method on every engine rank and return the answers."""
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data=None,
        video_data=None,
        audio_data=None,
        mm_processor_kwargs=None,
        priority: int = 0,
        kv_transfer_params=None,
    ) -> TokenOutput:
        """Generate one response, tokens in and tokens out."""
        if image_data or video_data or audio_data:
            raise ValueError("samebits rollout serves text only")
        rejected = await self._park_until_admitted(request_id)
        if rejected is not None:
            return rejected
        try:
            collector = await self._submit(list(prompt_ids), dict(sampling_params), request_id, priority)
        finally:
            self._admitting -= 1
        return self._token_output(await collector.get(), prompt_ids)

    async def generate_batch(self, prompts: list[list[int]], params: list[dict[str, Any]], request_ids: list[str]) -> list[TokenOutput]:
        """Generate one response for each prompt as one batch.

        The engine is paused while the requests are handed over in order, so that which requests share a forward pass depends on
        the batch alone and not on timing: the same batch gives the same bits.
        """
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        collectors = []
        try:
            for prompt, param, request_id in zip(prompts, params, request_ids, strict=True):
                collectors.append(await self._submit(prompt, dict(param), request_id, 0))
        finally:
            await self.engine.resume_generation()
        finals = await asyncio.gather(*(collector.get() for collector in collectors))
        return [self._token_output(f, p) for f, p in zip(finals, prompts, strict=True)]

    async def _submit(self, prompt_ids: list[int], params: dict[str, Any], request_id: str, priority: int) -> RequestOutputCollector:
        """Hand one request to the engine; its collector gives the finished output."""
        if self._adapter_version is None:
            raise AdapterError("no adapter has been synced to the engine yet")
        room = self.config.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(f"prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.config.max_model_len}")
        wanted = params.pop("max_tokens", None) or params.pop("max_new_tokens", None) or self.config.response_length
        sampling = SamplingParams(
            **({"ignore_eos": self.config.ignore_eos} | params | {"logprobs": 0 if params.get("logprobs") else None}),
            flat_logprobs=True,
            extra_args=WHOLE,
            max_tokens=min(wanted, room),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return await self.engine.add_request(
            request_id,
            tokens_input(prompt_ids),
            sampling,
            lora_request=lora_request(self._adapter_version),
            priority=priority,
        )

    def _token_output(self, final: RequestOutput, prompt_ids: list[int]) -> TokenOutput:
        fields = {"global_steps": self.global_steps, "adapter_version": self._adapter_version}
        out = final.outputs[0] if final.outputs else None
        if out is None or out.finish_reason == "abort":
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
        tokens = list(out.token_ids)
        log_probs = None
        if out.logprobs is not None:
            if out.logprobs.token_ids != tokens:
                raise LogprobError(f"engine returned logprobs of {len(out.logprobs.token_ids)} tokens, not of the {len(tokens)} sampled")
            log_probs = out.logprobs.logprobs
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            routed_experts=self._routes(out.routed_experts, len(prompt_ids) + len(tokens)),
            stop_reason="completed",
            extra_fields=fields | {"finish_reason": out.finish_reason},
        )

    def _routes(self, routes: np.ndarray | None, total: int) -> np.ndarray | None:
        """int16 [prompt + response, layers, k]: the engine's rows, and -1 for the last token, which was never fed back."""
        if not self.config.enable_rollout_routing_replay:
            return None
        if routes is None:
            raise RouteError("routing replay is on, but the engine returned no routes")
        if routes.shape[0] != total - 1:
            raise RouteError(f"engine returned {routes.shape[0]} rows of routes for {total} tokens, expected {total - 1}")
        last = np.full((1, *routes.shape[1:]), -1, dtype=np.int16)
        return np.concatenate((routes.astype(np.int16), last))


class SamebitsReplica(vLLMReplica):
    """A vLLM replica whose servers are `SamebitsServer`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SamebitsServer)

    def _get_server_name_prefix(self) -> str:
        return ACTORS


def _slowest(ranks: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> dict[str, float]:
    """Seconds of `phases`, of the rank that took longest."""
    return {name: max(rank[name]["seconds"] for rank in ranks if name in rank) for name in phases if any(name in rank for rank in ranks)}


def _largest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Peak bytes by phase and kind, of the rank that needed most."""
    found: dict[str, dict[str, int]] = {}
    for rank in ranks:
        for phase, measured in rank.items():
            kinds = found.setdefault(phase, {})
            for kind, size in measured["memory"].items():
                kinds[kind] = max(size, kinds.get(kind, 0))
    return found
