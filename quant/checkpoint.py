"""Quantized checkpoints on disk: HF-style safetensors with a ModelOpt mixed-precision quantization config that vLLM reads.

Tensor names are the model's own. A weight of format NVFP4 is stored as `weight` (uint8 [N, K/2]), `weight_scale` (E4M3 [N, K/16])
and `weight_scale_2` (fp32 scalar); one of format MXFP8 as `weight` (E4M3 [N, K]) and `weight_scale` (uint8 E8M0 [N, K/32]).
`config.json` also carries, under `samebits`, the name of the numerics profile and the hash of its weight formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from . import mxfp8, nvfp4
from .mxfp8 import MXFP8Tensor
from .nvfp4 import NVFP4Tensor
from .profile import Format, NumericsProfile
from .roles import NOT_TEXT, Role, module_id, strip_prefixes, tensor_role
from .shards import CheckpointError, Shards

__all__ = ["Checkpoint", "CheckpointError", "config_json", "quantization_config", "quantize_tensors", "write_checkpoint"]

Weight = Tensor | NVFP4Tensor | MXFP8Tensor
TORCH_DTYPES = {Format.BF16: torch.bfloat16, Format.FP32: torch.float32}
"""Torch dtype of the formats without blocks."""
_ALGO = {Format.NVFP4: ("W4A16_NVFP4", nvfp4.BLOCK), Format.MXFP8: ("MXFP8", mxfp8.BLOCK)}


def quantize_tensors(tensors: Mapping[str, Tensor], profile: NumericsProfile) -> dict[str, Tensor]:
    """Checkpoint tensors of a 16- or 32-bit model (names ending in `.weight`) in the formats of `profile`.

    Gate and up of an expert share one NVFP4 global scale, by role. Raises `NonFiniteWeight` or `ValueError` naming the tensor.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        role = tensor_role(name)
        fmt = profile.weight_format(role)
        module = name.removesuffix(".weight")
        if fmt is Format.NVFP4:
            pair = (name, f"{gate_up_partner(module)}.weight") if role in (Role.EXPERT_GATE, Role.EXPERT_UP) else (name,)
            t = nvfp4.quantize(tensor, nvfp4.shared_scale({n: tensors[n] for n in pair}), name=name)
            out[name] = t.codes
            out[f"{module}.weight_scale"] = t.block_scales.view(torch.float8_e4m3fn)
            out[f"{module}.weight_scale_2"] = t.global_scale
        elif fmt is Format.MXFP8:
            m = mxfp8.quantize(tensor, name=name)
            out[name] = m.codes.view(torch.float8_e4m3fn)
            out[f"{module}.weight_scale"] = m.exponents
        else:
            nvfp4.require_finite(tensor, name)
            out[name] = tensor.to(TORCH_DTYPES[fmt])
    return out


def gate_up_partner(module: str) -> str:
    """Path of the up (w3) of an expert's gate (w1), and the other way round."""
    head, leaf = module.rsplit(".", 1)
    return f"{head}.{ {'w1': 'w3', 'w3': 'w1'}[leaf] }"


def quantization_config(names: Iterable[str], profile: NumericsProfile) -> dict[str, Any]:
    """The `quantization_config` of config.json for the tensors called `names`."""
    layers: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.endswith(".weight") and profile.weight_format(tensor_role(name)) in _ALGO:
            algo, group = _ALGO[profile.weight_format(tensor_role(name))]
            layers[name.removesuffix(".weight")] = {"quant_algo": algo, "group_size": group}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": [],
        "quantized_layers": layers,
        "producer": {"name": "samebits"},
    }


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], profile: NumericsProfile) -> None:
    """Quantize `tensors` by `profile` and write `model.safetensors` and `config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    quantized = quantize_tensors(tensors, profile)
    save_file({n: t.contiguous() for n, t in quantized.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(config, tensors, profile), indent=2) + "\n")


def config_json(config: Mapping[str, Any], names: Iterable[str], profile: NumericsProfile) -> dict[str, Any]:
    """`config` with the quantization config for the tensors called `names` and the profile's name and hash."""
    return {
        **config,
        "quantization_config": quantization_config(names, profile),
        "samebits": {"profile": profile.name, "weights_hash": profile.weights_hash},
    }


class Checkpoint:
    """The text model of a quantized checkpoint, opened for reading; tensors are read when asked for.

    Opening reads the headers of all shards and nothing else. Raises `CheckpointError` in one line when the folder holds no samebits
    checkpoint, when a shard is missing, left over or truncated, or when a tensor is there twice or is missing from its shard or index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(f"no model at {folder}")
        try:
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except ValueError:
            raise CheckpointError(f"{self.folder / 'config.json'} is unreadable") from None
        if "samebits" not in self.config:
            raise CheckpointError(f"{folder} was not quantized by samebits (config.json has no 'samebits' entry)")
        self.weights_hash: str = self.config["samebits"]["weights_hash"]
        self._shards = Shards(self.folder)
        self._by_name: dict[str, str] = {}
        for stored in self._shards.entries:
            name = strip_prefixes(stored)
            if name in self._by_name:
                raise CheckpointError(f"{folder}: tensor {name} is there as {self._by_name[name]} and as {stored}")
            if not name.startswith(NOT_TEXT):
                self._by_name[name] = stored

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors of the text model, without prefixes."""
        return list(self._by_name)

    @property
    def modules(self) -> list[str]:
        """Paths of all modules with a weight, in file order, without prefixes."""
        return [name.removesuffix(".weight") for name in self._by_name if name.endswith(".weight")]

    def tensor(self, name: str) -> Tensor:
        """One stored tensor by its name without prefixes. Raises `CheckpointError` when there is none."""
        if name not in self._by_name:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._shards.read(self._by_name[name])

    def weight(self, module: str) -> Weight:
        """The weight of a module in its stored format, codes and scales as uint8."""
        module_id(module)
        weight = self.tensor(f"{module}.weight")
        if weight.dtype == torch.uint8:
            scale = self.tensor(f"{module}.weight_scale").view(torch.uint8)
            return NVFP4Tensor(weight, scale, self.tensor(f"{module}.weight_scale_2").float())
        if weight.dtype == torch.float8_e4m3fn:
            return MXFP8Tensor(weight.view(torch.uint8), self.tensor(f"{module}.weight_scale"))
        return weight
