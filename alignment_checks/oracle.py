"""What a server should answer: logprobs of W + scale B A in fp32, computed here from the base checkpoint and the adapter file.

The model is transformers' Qwen3 or Qwen3-MoE. Its weights are read from the safetensors files by name, and an adapter is added to the
named weights by own code (`peft_adapter`), so a mistake in PEFT, in a file's names or in a server's loader shows as a difference.

Beside the exact answer there is a rounded one, in which the output of every module is rounded to bf16. It is not meant to equal any
server: it says how large the rounding error of this model on these tokens is, and how much larger it becomes with the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .peft_adapter import Delta, expert_count, is_moe_layer, targets_of


class BaseError(ValueError):
    """The base checkpoint cannot be read or is not one that the oracle computes. One line."""


class Oracle:
    """A base checkpoint in fp32, to which adapters can be added for a while."""

    def __init__(self, folder: Path, device: str = "cpu"):
        """Read the checkpoint in `folder`. Raises `BaseError` with one line."""
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.device = torch.device(device)
        self._model = self._build()
        self._parameters = dict(self._model.named_parameters(remove_duplicate=False))

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return int(self.config["vocab_size"])

    @property
    def has_experts(self) -> bool:
        """Whether some layer routes tokens to experts."""
        return any(is_moe_layer(self.config, layer) for layer in range(self.config["num_hidden_layers"]))

    def weight(self, name: str) -> Tensor:
        """A weight of the base, fp32, by the model's parameter name."""
        return self._parameters[name]

    @torch.no_grad()
    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits [N, T, V] fp32 of N sequences of equal length, with the adapters that are added now: row t is about token t + 1."""
        return self._model(torch.tensor([list(s) for s in sequences], device=self.device), use_cache=False).logits.float()

    @contextmanager
    def adapted(self, deltas: Iterable[Delta]) -> Iterator[Oracle]:
        """Within the block the weights are W + scale B A; afterwards the base's bytes are back."""
        saved: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for delta in deltas:
                    weight = self._slice(delta)
                    saved.append((weight, weight.clone()))
                    weight += delta.matrix().to(weight.device)
            yield self
        finally:
            with torch.no_grad():
                for weight, before in reversed(saved):
                    weight.copy_(before)

    @contextmanager
    def rounded(self) -> Iterator[Oracle]:
        """Within the block every module's output is rounded to bf16 and computed on in fp32."""

        def hook(_module: torch.nn.Module, _inputs: object, output: Any) -> Any:
            return _round(output)

        handles = [module.register_forward_hook(hook) for module in self._model.modules() if module is not self._model]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _slice(self, delta: Delta) -> Tensor:
        """The part of the model's parameters that holds a checkpoint weight, as a view."""
        name, expert = delta.target.weight, delta.target.expert
        if expert is None:
            return self._parameters[name]
        owner, _, projection = name.removesuffix(".weight").rsplit(".", 2)
        if projection == "down_proj":
            return self._parameters[f"{owner}.down_proj"][expert]
        both = self._parameters[f"{owner}.gate_up_proj"][expert]
        half = both.shape[0] // 2
        return both[:half] if projection == "gate_proj" else both[half:]

    def _build(self) -> torch.nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.for_model(**self.config)
        settings._attn_implementation = settings._experts_implementation = "eager"
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval().requires_grad_(False)
        if self.config.get("tie_word_embeddings"):  # an adapter on the head must not change the embedding
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight), requires_grad=False)
        weights = self._weights()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in [n for n in parameters if n not in weights]:
            raise BaseError(f"{self.folder}: weight {name} is missing")
        for name in [n for n in weights if n not in parameters]:
            raise BaseError(f"{self.folder}: weight {name} is unknown")
        for name, parameter in parameters.items():
            if parameter.shape != weights[name].shape:
                raise BaseError(f"{self.folder}: {name} is {list(weights[name].shape)}, expected {list(parameter.shape)}")
            parameter.data.copy_(weights.pop(name))
        return model.to(self.device)

    def _weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors in fp32 under the model's parameter names: experts stacked as [E, 2I, H] and [E, H, I]."""
        found = _read_tensors(self.folder)
        if self.config.get("tie_word_embeddings"):
            found["lm_head.weight"] = found.get("model.embed_tokens.weight", torch.empty(0))
        for layer in range(self.config["num_hidden_layers"]):
            if not is_moe_layer(self.config, layer):
                continue
            owner = f"model.layers.{layer}.mlp.experts"
            if f"{owner}.gate_up_proj" in found:
                continue  # already stacked in the file
            parts = {p: [self._expert(found, f"{owner}.{e}.{p}_proj.weight") for e in range(expert_count(self.config))] for p in _PARTS}
            found[f"{owner}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)])
            found[f"{owner}.down_proj"] = torch.stack(parts["down"])
        return found

    def _expert(self, found: dict[str, Tensor], name: str) -> Tensor:
        if name not in found:
            raise BaseError(f"{self.folder}: weight {name} is missing")
        return found.pop(name)


_PARTS = ("gate", "up", "down")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises `BaseError` where the oracle cannot compute such a model."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise BaseError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise BaseError(f"{path}: not JSON") from None
    if not isinstance(config, Mapping):
        raise BaseError(f"{path}: not a model configuration")
    if config.get("quantization_config"):
        raise BaseError(
            f"{path}: the base is quantized ({config['quantization_config'].get('quant_method')}); the oracle needs 16 or 32 bits"
        )
    try:
        targets_of(config)
    except (ValueError, KeyError, TypeError) as error:
        raise BaseError(f"{path}: {error}") from None
    return dict(config)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BaseError(f"{folder}: there is no safetensors file")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BaseError(f"{path}: {str(error).splitlines()[0]}") from None
    return found


def _round(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.bfloat16().to(output.dtype) if output.is_floating_point() else output
    if isinstance(output, tuple):
        return tuple(_round(part) for part in output)
    return output
