"""What samebits can ask of a vLLM worker by `collective_rpc`; given to vLLM as `worker_extension_cls`.

Answers are JSON strings or plain dictionaries, so that they cross processes under any serializer. There is one answer a worker.
"""

from __future__ import annotations

from safetensors.torch import save_file

from samebits.kernels import taps
from samebits.quant.adapter import AdapterError, Manifest
from samebits.quant.digests import digests

from . import adapter


class WorkerExtension:
    """Mixed into vLLM's CPU and GPU workers."""

    def samebits_load_adapter(self, path: str, manifest_json: str) -> str:
        """Load the adapter file that `manifest_json` describes; returns the manifest of what is held then.

        The sender compares the two. Refused before anything is loaded: another numerics profile, a file with other keys.
        """
        sent = Manifest.from_json(manifest_json)
        model = self.model_runner.get_model()
        profile = model.settings.profile.hash
        if sent.profile != profile:
            raise AdapterError(f"engine computes with numerics profile {profile}, the adapter was trained with {sent.profile}")
        adapter.load_path(model, path, sent.version)
        return adapter.held(model, sent.version).to_json()

    def samebits_held_adapter(self, version: int) -> str:
        """Manifest of what is held for `version`, as JSON. Raises `AdapterError` when it is not resident."""
        return adapter.held(self.model_runner.get_model(), version).to_json()

    def samebits_remove_adapter(self, version: int) -> bool:
        """Empty the version's slot; False when it was not resident."""
        return self.remove_lora(adapter.adapter_id(version))

    def samebits_base_digests(self) -> dict[str, str]:
        """Digest of the fp32 values of every frozen weight, by checkpoint path, read from the parameters that are multiplied."""
        return digests((path, value.float()) for path, value in self.model_runner.get_model().base_values())

    def samebits_profile(self) -> str:
        """Hash of the numerics profile that the model was built for."""
        return self.model_runner.get_model().settings.profile.hash

    def samebits_record(self, points: list[str] | None = None) -> None:
        """Record the taps of `kernels.taps` from now on: all, or those whose name ends with one of `points`."""
        taps.start(taps.Recorder(None if points is None else lambda name: name.endswith(tuple(points))))

    def samebits_recorded(self, path: str) -> list[str]:
        """Stop recording, write what was recorded to the safetensors file `path`, and return the points in order."""
        tensors = taps.stop().tensors()
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)
        return list(tensors)

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl calls this once: tokens without a meaning are never sampled. (verl's name; nothing is patched.)"""
        self.model_runner.get_model().forbid_tokens(vocab_size, banned_token_ids)
