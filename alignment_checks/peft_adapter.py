"""A PEFT adapter read from its two files by own code: which weights it changes, by how much, and under which role.

The names in an adapter file are the contract between the tool that wrote it and the server that reads it, and every fault of the kind
"accepted, then ignored" lives there. So neither PEFT nor the server's loader is asked: each tensor name is held against the weights
that a Qwen3 or Qwen3-MoE checkpoint has, and a name that fits none of them is refused by name. Three spellings are known:

- `base_model.model.<module>.lora_{A,B}.weight` for a matrix, A [r, in], B [out, r];
- the same for each expert, `...mlp.experts.<e>.{gate,up,down}_proj`, which is what vLLM reads for these models;
- PEFT's `target_parameters` over the fused experts of transformers 5: `...mlp.experts.base_layer` and `...mlp.experts`, with A
  [E * r, in] (expert-major) and B [out, r * E] (expert-minor). The names do not say which of gate_up and down they are; the shapes do.

The scale of a pair is PEFT's: alpha / r, or alpha / sqrt(r) under rsLoRA, with `alpha_pattern` and `rank_pattern` looked up by
`(.*\\.)?(key)$` against the module's path (for fused experts, the parameter's).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE_COPIES = (".lm_head.base_layer.weight", ".embed_tokens.base_layer.weight")
"""Weights of the base that PEFT saves beside an adapter on the head or the embedding. vLLM skips them."""
FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)(\.base_layer)?")
REFUSED_SETTINGS = {
    "use_dora": "DoRA changes weights by more than B A",
    "fan_in_fan_out": "weights are stored transposed",
    "modules_to_save": "whole modules are replaced",
    "trainable_token_indices": "token embeddings are replaced",
    "lora_bias": "the pairs carry biases",
    "layer_replication": "layers are repeated",
}


class AdapterFileError(ValueError):
    """The adapter cannot be read, or changes something that the base does not have. One line."""


@dataclass(frozen=True, slots=True)
class Target:
    """One weight of the base that can carry an adapter."""

    weight: str
    """Name in the checkpoint, of a matrix [out, in]."""
    role: str
    """`q_proj`, `experts.gate_proj`, `router`, `lm_head`, and so on."""
    shape: tuple[int, int]
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What an adapter adds to one weight: scale * B A."""

    target: Target
    a: Tensor
    """[r, in] fp32."""
    b: Tensor
    """[out, r] fp32."""
    scale: float
    plain_scale: float
    """The scale of a reader that ignores `rank_pattern`, `alpha_pattern` and rsLoRA: `lora_alpha / r` of the configuration."""
    tensor: str
    """Name of B in the adapter file."""

    def matrix(self) -> Tensor:
        """The change of the weight, [out, in] fp32, summed in fp64."""
        return (self.scale * (self.b.double() @ self.a.double())).float()

    def scaled(self, factor: float) -> Delta:
        """The same change, `factor` times as large."""
        return replace(self, scale=self.scale * factor, plain_scale=self.plain_scale * factor)


def targets_of(config: Mapping[str, Any]) -> dict[str, Target]:
    """The weights of a Qwen3 or Qwen3-MoE checkpoint that can carry an adapter, by module path.

    Args:
        config: the checkpoint's config.json. Raises `ValueError` for another model type.
    """
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"model type {kind!r}: the oracle knows qwen3 and qwen3_moe")
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    found = {"lm_head": Target("lm_head.weight", "lm_head", (config["vocab_size"], hidden))}

    def add(module: str, role: str, out: int, into: int, expert: int | None = None) -> None:
        found[module] = Target(f"{module}.weight", role, (out, into), expert)

    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, rows in (("q_proj", heads * head), ("k_proj", kv_heads * head), ("v_proj", kv_heads * head)):
            add(f"{attention}.{name}", name, rows, hidden)
        add(f"{attention}.o_proj", "o_proj", hidden, heads * head)
        if is_moe_layer(config, layer):
            add(f"{mlp}.gate", "router", expert_count(config), hidden)
            owners = [(f"{mlp}.experts.{e}", "experts.", config["moe_intermediate_size"], e) for e in range(expert_count(config))]
        else:
            owners = [(mlp, "", config["intermediate_size"], None)]
        for owner, prefix, inner, expert in owners:
            add(f"{owner}.gate_proj", f"{prefix}gate_proj", inner, hidden, expert)
            add(f"{owner}.up_proj", f"{prefix}up_proj", inner, hidden, expert)
            add(f"{owner}.down_proj", f"{prefix}down_proj", hidden, inner, expert)
    return found


def expert_count(config: Mapping[str, Any]) -> int:
    """Number of routed experts, under either of the names that Qwen3-MoE configurations use."""
    return config["num_experts"] if "num_experts" in config else config["num_local_experts"]


def is_moe_layer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts: transformers' rule for `qwen3_moe`."""
    return (
        config["model_type"] == "qwen3_moe"
        and layer not in (config.get("mlp_only_layers") or ())
        and expert_count(config) > 0
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


class PeftAdapter:
    """An adapter folder in PEFT's format, as changes of named weights."""

    def __init__(self, folder: Path, base_config: Mapping[str, Any]):
        """Read and hold every name against the base. Raises `AdapterFileError` with one line."""
        self.folder = Path(folder)
        self.config = _read_config(self.folder)
        self.tensors = _read_tensors(self.folder)
        self._copies = [name for name in self.tensors if name.endswith(BASE_COPIES)]
        self._base = base_config
        self._targets = targets_of(base_config)
        self.rows: dict[str, list[tuple[str, slice]]] = {}
        """By name of a B tensor: (role, rows of it that belong to the role)."""
        self.deltas: list[Delta] = [delta for module, a, b in self._pairs() for delta in self._read_pair(module, a, b)]
        self._require_configured_targets()

    @property
    def roles(self) -> list[str]:
        """Roles with an adapter, in the order of the model."""
        return list(dict.fromkeys(d.target.role for d in sorted(self.deltas, key=lambda d: list(self._targets).index(_module(d)))))

    @property
    def fused_experts(self) -> bool:
        """Whether the experts are in PEFT's `target_parameters` format (vLLM: `is_3d_lora_weight`)."""
        return any(FUSED.fullmatch(_path(name)) for name in self.rows)

    def of_role(self, role: str) -> list[Delta]:
        """The changes of one role alone."""
        return [d for d in self.deltas if d.target.role == role]

    def without_role(self, role: str) -> list[Delta]:
        """All changes but those of one role."""
        return [d for d in self.deltas if d.target.role != role]

    def require_base_copies(self, weight: Callable[[str], Tensor]) -> None:
        """Raise `AdapterFileError` where the file carries a weight of the base that is not the base's: no server would use it.

        Args:
            weight: gives a weight of the base by its name in the checkpoint.
        """
        for name in self._copies:
            own = weight(_path(name.removesuffix("base_layer.weight")) + ".weight")
            if own.shape != self.tensors[name].shape or not torch.equal(own.float().cpu(), self.tensors[name].float()):
                raise AdapterFileError(
                    f"{self.folder}: {name} is not the base's: the file replaces a weight, which W + B A does not describe"
                )

    def write_alone(self, folder: Path, roles: Iterable[str], factor: float = 1.0) -> None:
        """Write an adapter with the same tensor names in which only `roles` do anything: every other B is zero.

        Args:
            factor: power of two by which the remaining B are multiplied, exactly, so that an effect stands out of the noise.
        """
        keep = set(roles)
        tensors = dict(self.tensors)
        for name, parts in self.rows.items():
            old = tensors[name]
            tensors[name] = torch.zeros_like(old)
            for role, rows in parts:
                if role in keep:
                    tensors[name][rows] = old[rows] * factor
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=1) + "\n")
        save_file(tensors, folder / TENSORS)

    def _pairs(self) -> list[tuple[str, str, str]]:
        modules: dict[str, dict[str, str]] = {}
        for name in sorted(self.tensors.keys() - set(self._copies)):
            match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
            if match is None:
                raise AdapterFileError(f"{self.folder}: tensor {name} is not half of a LoRA pair")
            modules.setdefault(match[1], {})[match[2]] = name
        for module, sides in modules.items():
            if len(sides) != 2:
                raise AdapterFileError(f"{self.folder}: {module} has lora_{next(iter(sides))} and not the other half of the pair")
        if not modules:
            raise AdapterFileError(f"{self.folder}: there is no tensor in {TENSORS}")
        return [(_path(module + "."), sides["A"], sides["B"]) for module, sides in modules.items()]

    def _read_pair(self, module: str, a_name: str, b_name: str) -> list[Delta]:
        a, b = self.tensors[a_name].float(), self.tensors[b_name].float()
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise AdapterFileError(f"{self.folder}: {module} holds a value that is not finite")
        if FUSED.fullmatch(module):
            return self._read_fused(module, a, b, b_name)
        target = self._targets.get(module)
        if target is None:
            raise AdapterFileError(
                f"{self.folder}: {module} is no weight of the base ({self._base['model_type']}) that can carry an adapter"
            )
        rank = a.shape[0]
        if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != target.shape or b.shape[1] != rank:
            raise AdapterFileError(f"{self.folder}: {module} is {list(target.shape)}, but A is {list(a.shape)} and B {list(b.shape)}")
        self.rows[b_name] = [(target.role, slice(None))]
        key = f"{module}.weight" if target.role == "router" else module
        return [Delta(target, a, b, self._scale(key, rank), self._plain_scale(), b_name)]

    def _read_fused(self, module: str, a: Tensor, b: Tensor, b_name: str) -> list[Delta]:
        owner = FUSED.fullmatch(module)[1]
        if f"{owner}.0.gate_proj" not in self._targets:
            raise AdapterFileError(f"{self.folder}: {owner} is no layer with experts")
        experts = expert_count(self._base)
        inner, hidden = self._targets[f"{owner}.0.gate_proj"].shape
        layout = {(2 * inner, hidden): ("gate_up_proj", ("gate_proj", "up_proj")), (hidden, inner): ("down_proj", ("down_proj",))}
        found = layout.get((b.shape[0], a.shape[1]))
        if found is None or a.shape[0] != b.shape[1] or a.shape[0] % experts:
            raise AdapterFileError(
                f"{self.folder}: {module}: A {list(a.shape)} and B {list(b.shape)} fit neither gate_up_proj nor down_proj"
            )
        parameter, names = found
        rank = a.shape[0] // experts
        scale = self._scale(f"{owner}.{parameter}", rank)
        a_E, b_E = a.reshape(experts, rank, -1), b.reshape(b.shape[0], rank, experts).permute(2, 0, 1)
        rows = {n: slice(i * b.shape[0] // len(names), (i + 1) * b.shape[0] // len(names)) for i, n in enumerate(names)}
        self.rows[b_name] = [(f"experts.{n}", part) for n, part in rows.items()]
        return [
            Delta(self._targets[f"{owner}.{e}.{n}"], a_E[e], b_E[e, part].contiguous(), scale, self._plain_scale(), b_name)
            for n, part in rows.items()
            for e in range(experts)
        ]

    def _scale(self, key: str, rank: int) -> float:
        configured = int(_pattern(self.config.get("rank_pattern"), key, self.config["r"]))
        if configured != rank:
            raise AdapterFileError(f"{self.folder}: {key} has rank {rank} in the file and {configured} in {CONFIG}")
        alpha = float(_pattern(self.config.get("alpha_pattern"), key, self.config["lora_alpha"]))
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def _plain_scale(self) -> float:
        return float(self.config["lora_alpha"]) / int(self.config["r"])

    def _require_configured_targets(self) -> None:
        wanted = self.config.get("target_modules")
        if not isinstance(wanted, list):
            return  # a regular expression, or fused experts only: nothing to hold the names against
        modules = {_path(name) for name in self.rows}
        for name in wanted:
            if not any(m == name or m.endswith(f".{name}") for m in modules):
                raise AdapterFileError(f"{self.folder}: target module {name!r} of {CONFIG} has no tensor in {TENSORS}")


def _module(delta: Delta) -> str:
    return delta.target.weight.removesuffix(".weight")


def _path(name: str) -> str:
    module = re.sub(r"\.(lora_[AB]\.weight)?$", "", name)
    return module.removeprefix(PREFIX)


def _pattern(patterns: Mapping[str, Any] | None, key: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return default


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except OSError as error:
        raise AdapterFileError(f"{folder / CONFIG}: {error.strerror}") from None
    except ValueError:
        raise AdapterFileError(f"{folder / CONFIG}: not JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterFileError(f"{folder / CONFIG}: not the configuration of a PEFT LoRA adapter")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise AdapterFileError(f"{folder / CONFIG}: {key} is {config.get(key)!r}")
    for key, why in REFUSED_SETTINGS.items():
        if config.get(key):
            raise AdapterFileError(f"{folder / CONFIG}: {key} is set: {why}, which W + B A does not describe")
    if config.get("bias", "none") != "none":
        raise AdapterFileError(f"{folder / CONFIG}: bias is {config['bias']!r}: biases are trained, which W + B A does not describe")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSORS
    if not path.is_file():
        raise AdapterFileError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterFileError(f"{path}: {str(error).splitlines()[0]}") from None
