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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import mxfp8, nvfp4
from .mxfp8 import MXFP8Tensor
from .nvfp4 import NVFP4Tensor
from .profile import Format, NumericsProfile
from .roles import Role, module_id, strip_prefixes, tensor_role

Weight = Tensor | NVFP4Tensor | MXFP8Tensor
_DTYPES = {Format.BF16: torch.bfloat16, Format.FP32: torch.float32}
_ALGO = {Format.NVFP4: ("W4A16_NVFP4", nvfp4.BLOCK), Format.MXFP8: ("MXFP8", mxfp8.BLOCK)}


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or of another kind."""


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
            partner = tensors[_gate_up_partner(name)] if role in (Role.EXPERT_GATE, Role.EXPERT_UP) else tensor
            amax = torch.maximum(tensor.abs().amax(), partner.abs().amax())
            t = nvfp4.quantize(tensor, nvfp4.global_scale(amax), name)
            out[name] = t.codes
            out[f"{module}.weight_scale"] = t.block_scales.view(torch.float8_e4m3fn)
            out[f"{module}.weight_scale_2"] = t.global_scale
        elif fmt is Format.MXFP8:
            m = mxfp8.quantize(tensor, name)
            out[name] = m.codes.view(torch.float8_e4m3fn)
            out[f"{module}.weight_scale"] = m.exponents
        else:
            nvfp4.require_finite(tensor, name)
            out[name] = tensor.to(_DTYPES[fmt])
    return out


def _gate_up_partner(name: str) -> str:
    head, leaf = name.removesuffix(".weight").rsplit(".", 1)
    return f"{head}.{ {'w1': 'w3', 'w3': 'w1'}[leaf] }.weight"


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
    stamped = {
        **config,
        "quantization_config": quantization_config(tensors, profile),
        "samebits": {"profile": profile.name, "weights_hash": profile.weights_hash},
    }
    (folder / "config.json").write_text(json.dumps(stamped, indent=2) + "\n")


class Checkpoint:
    """A quantized checkpoint opened for reading; tensors are read when asked for.

    Raises `CheckpointError` in one line when the folder holds no samebits checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(f"no model at {folder}")
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        if "samebits" not in self.config:
            raise CheckpointError(f"{folder} was not quantized by samebits (config.json has no 'samebits' entry)")
        self.weights_hash: str = self.config["samebits"]["weights_hash"]
        self._files: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as f:
                self._files |= dict.fromkeys(f.keys(), path)
        if not self._files:
            raise CheckpointError(f"{folder} holds no safetensors file")
        self._by_name = {strip_prefixes(name): name for name in self._files}

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors, without prefixes."""
        return list(self._by_name)

    @property
    def modules(self) -> list[str]:
        """Paths of all modules with a weight, in file order, without prefixes."""
        return [name.removesuffix(".weight") for name in self._by_name if name.endswith(".weight")]

    def tensor(self, name: str) -> Tensor:
        """One stored tensor by its name without prefixes. Raises `CheckpointError` when there is none."""
        if name not in self._by_name:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        stored = self._by_name[name]
        with safe_open(self._files[stored], "pt") as f:
            return f.get_tensor(stored)

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
