"""What samebits can ask of a vLLM worker by `collective_rpc`; given to vLLM as `worker_extension_cls`.

Answers are JSON strings or plain dictionaries, so that they cross processes under any serializer. There is one answer a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from samebits.kernels import taps
from samebits.kernels.meter import Meter
from samebits.quant.adapter import AdapterError, Manifest
from samebits.quant.digests import Digester

from . import adapter
from .held import card_bytes, held_bytes
from .ipc import CUDA, Handles, NotShareable

HEADS = (".self_attn.q", ".self_attn.k", ".self_attn.v")
"""Points at which a rank records its own heads [T, heads, D]."""


class WorkerExtension:
    """Mixed into vLLM's CPU and GPU workers."""

    samebits_handles: Handles = CUDA
    _samebits_meter: Meter | None = None

    def samebits_load_adapter(self, path: str, manifest_json: str) -> str:
        """Load the adapter file that `manifest_json` describes; returns the manifest of what is held then.

        The sender compares the two. Refused before anything is loaded: another numerics profile, a file with other keys.
        """
        return self._samebits_load(lambda model, sent: adapter.load_path(model, path, sent.version), manifest_json)

    def samebits_open_adapter(self, handles: str, manifest_json: str) -> str:
        """`samebits_load_adapter` from the trainer's buffer on this worker's device. Raises `NotShareable` when it cannot be opened."""
        return self._samebits_load(lambda model, sent: adapter.load_shared(model, handles, sent, self.samebits_handles), manifest_json)

    def samebits_sync_adapter(self, path: str, source: str, manifest_json: str) -> dict[str, Any]:
        """A sync in one call: {"held": manifest as above or None, "refused": why a buffer cannot be opened or None, "measured": as below}.

        `path`: ipc where `source` is handles, file where it is a file.
        """
        held = refused = None
        try:
            held = (self.samebits_open_adapter if path == "ipc" else self.samebits_load_adapter)(source, manifest_json)
        except NotShareable as error:
            refused = str(error)
        return {"held": held, "refused": refused, "measured": self.samebits_measured()}

    def _samebits_load(self, load: Callable[[Any, Manifest], None], manifest_json: str) -> str:
        sent = Manifest.from_json(manifest_json)
        model = self.model_runner.get_model()
        profile = model.settings.profile.hash
        if sent.profile != profile:
            raise AdapterError(f"engine computes with numerics profile {profile}, the adapter was trained with {sent.profile}")
        meter = self._samebits_metering()
        meter.enter("load")
        load(model, sent)
        meter.enter("verify")
        held = adapter.held(model, sent.version).to_json()
        meter.enter("rollout")
        return held

    def _samebits_metering(self) -> Meter:
        if self._samebits_meter is None:
            self._samebits_meter = Meter(self.device)
        return self._samebits_meter

    def samebits_measured(self) -> dict[str, dict[str, Any]]:
        """{phase: {"seconds", "memory": {kind: peak bytes}}} since the last call: load, verify, and rollout for all between two loads.

        Seconds of rollout include those in which there was nothing to do.
        """
        found = self._samebits_metering().take()
        self._samebits_metering().enter("rollout")
        return {name: {"seconds": phase.seconds, "memory": phase.memory} for name, phase in found.items()}

    def samebits_device_uuid(self) -> str | None:
        """UUID of the worker's device; None on a CPU."""
        return self.samebits_handles.uuid(torch.device(self.device))

    def samebits_copy_seconds(self, size: int, repeat: int = 5) -> float:
        """Seconds of the fastest of `repeat` copies of `size` bytes from the worker's device to the same device."""
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        best = float("inf")
        for _ in range(repeat):
            _wait(source.device)
            started = time.perf_counter()
            target.copy_(source)
            _wait(source.device)
            best = min(best, time.perf_counter() - started)
        return best

    def samebits_held_adapter(self, version: int) -> str:
        """Manifest of what is held for `version`, as JSON. Raises `AdapterError` when it is not resident."""
        return adapter.held(self.model_runner.get_model(), version).to_json()

    def samebits_remove_adapter(self, version: int) -> bool:
        """Empty the version's slot; False when it was not resident."""
        return self.remove_lora(adapter.adapter_id(version))

    def samebits_held_bytes(self) -> dict[str, int]:
        """Bytes of weights, adapter slots and KV cache of this rank (see `held`), and on CUDA of its whole card."""
        found = held_bytes(self.model_runner.get_model(), self.model_runner.kv_caches)
        card = card_bytes(self.device)
        return found if card is None else found | {"card": card}

    def samebits_base_digests(self) -> dict[str, str]:
        """Digest of the fp32 values of every frozen weight, or of this rank's part, by checkpoint path, read from what is multiplied."""
        digester = Digester()
        for paths, values in self.model_runner.get_model().base_stacks():
            digester.add_stack(paths, values.float())
        return digester.finish()

    def samebits_profile(self) -> str:
        """Hash of the numerics profile that the model was built for."""
        return self.model_runner.get_model().settings.profile.hash

    def samebits_record(self, points: list[str] | None = None) -> None:
        """Record the taps of `kernels.taps` from now on: all, or those whose name ends with one of `points`."""
        taps.start(taps.Recorder(None if points is None else lambda name: name.endswith(tuple(points))))

    def samebits_recorded(self, path: str) -> list[str]:
        """Stop recording, write what was recorded to the safetensors file `path`, and return the points in order.

        Where a replica has several ranks, heads are put together from all; anything else is recorded where every rank has all of it.
        """
        tensors = taps.stop().tensors()
        group = self.model_runner.get_model().group
        whole = {name: group.gather(t, 1) if name.endswith(HEADS) else t for name, t in tensors.items()}
        if group.rank == 0:
            save_file({name: t.contiguous() for name, t in whole.items()}, path)
        return list(tensors)

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl calls this once: tokens without a meaning are never sampled. (verl's name; nothing is patched.)"""
        self.model_runner.get_model().forbid_tokens(vocab_size, banned_token_ids)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
