"""What `samebits quantize` will do, from headers and config.json alone: every check that needs no data happens here.

Files must be whole, every tensor of the model there once and of the shape that config.json asks for, and every stored format one that
the profile takes. Output shard i holds the modules whose weights lie in source shard i.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import mxfp8, nvfp4, readers
from .checkpoint import TORCH_DTYPES, config_json, gate_up_partner
from .profile import Format, NumericsProfile
from .readers import Kind, Stored
from .roles import MTP_PARTS, NOT_TEXT, Role, strip_prefixes, tensor_role
from .shards import DTYPE_NAMES, CheckpointError, Entry, Shards, Spec
from .sizes import text_shapes

BLOCKS = {Format.NVFP4: nvfp4.BLOCK, Format.MXFP8: mxfp8.BLOCK}
"""Elements that share a scale, in the formats that have blocks."""
_BIAS = "e_score_correction_bias"
_PACKED = ("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0")
_MTP_LEFT_OUT = "tensors of the MTP module"


@dataclass(frozen=True, slots=True)
class Item:
    """One unit of work: a module with its role, or a tensor that is copied as it is (`role` None)."""

    stored: Stored
    role: Role | None
    partner: Stored | None = None
    """The up of a gate, the gate of an up, where they share a scale."""
    keep_activation_scale: bool = False

    @property
    def nbytes(self) -> int:
        """Source bytes, for progress."""
        return self.stored.nbytes

    def specs(self, profile: NumericsProfile) -> dict[str, Spec]:
        """What is written for it: tensor name to dtype and shape."""
        module, shape = self.stored.module, self.stored.shape
        if self.role is None:
            return {module: (self.stored.parts["weight"].dtype, shape)}
        fmt = profile.weight_format(self.role)
        name = module if self.stored.bare else f"{module}.weight"
        if fmt not in BLOCKS:
            return {name: (DTYPE_NAMES[TORCH_DTYPES[fmt]], shape)}
        *rows, k = shape
        if fmt is Format.MXFP8:
            return {name: ("F8_E4M3", shape), f"{module}.weight_scale": ("U8", (*rows, k // mxfp8.BLOCK))}
        out: dict[str, Spec] = {
            name: ("U8", (*rows, k // 2)),
            f"{module}.weight_scale": ("F8_E4M3", (*rows, k // nvfp4.BLOCK)),
            f"{module}.weight_scale_2": ("F32", ()),
        }
        return out | ({f"{module}.input_scale": ("F32", ())} if self.keep_activation_scale else {})


@dataclass
class Job:
    """One output shard."""

    file: str
    items: list[Item] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Source bytes, for progress."""
        return sum(item.nbytes for item in self.items)

    def specs(self, profile: NumericsProfile) -> dict[str, Spec]:
        """All tensors of the shard."""
        return {n: s for item in self.items for n, s in item.specs(profile).items()}


class Plan:
    """What to do, from headers and config.json alone. Raises `CheckpointError` or `ValueError` in one line."""

    def __init__(self, source: Path, profile: NumericsProfile) -> None:
        self.source, self.profile = source, profile
        if not source.is_dir():
            raise CheckpointError(f"no folder {source}")
        self.config = self._read_config()
        self.shards = Shards(source)
        self.left_out: dict[str, int] = {}
        names = output_names(len(self.shards.files))
        self._jobs = {file: Job(name) for file, name in zip(self.shards.files, names, strict=True)}
        modules = self._group()
        self._check_model(modules)
        for stored in modules.values():
            self._add(stored, modules)
        self.jobs = [job for job in self._jobs.values() if job.items]
        for job, name in zip(self.jobs, output_names(len(self.jobs)), strict=True):
            job.file = name  # a shard of nothing but MTP has no counterpart
        self.taken_over = sum(i.stored.kind.format is not None for j in self.jobs for i in j.items)
        self.source_bytes = sum(job.nbytes for job in self.jobs)

    def _read_config(self) -> dict[str, Any]:
        path = self.source / "config.json"
        try:
            config = json.loads(path.read_text())
            assert isinstance(config, dict)
        except FileNotFoundError:
            raise CheckpointError(f"{self.source} holds no config.json") from None
        except (ValueError, AssertionError, OSError):
            raise CheckpointError(f"{path} is unreadable") from None
        readers.check_declared(config, str(path))
        return config

    def _group(self) -> dict[str, Stored]:
        """Stored modules by path without prefixes; vision tensors and routing biases under their own names."""
        groups: dict[str, tuple[str, dict[str, Entry]]] = {}
        for name, entry in self.shards.entries.items():
            short = strip_prefixes(name)
            if short.startswith(MTP_PARTS):
                self._leave_out(_MTP_LEFT_OUT)
                continue
            module, _, leaf = name.rpartition(".")
            if short.startswith(NOT_TEXT) or leaf == _BIAS:
                if entry.dtype in _PACKED:
                    raise CheckpointError(f"{entry.file}: tensor {name} is {entry.dtype}; quantized weights of this part have no reader")
                module, leaf = name, "weight"
            elif leaf not in readers.LEAVES:
                raise CheckpointError(f"{entry.file}: tensor {name} is unknown")
            first, parts = groups.setdefault(strip_prefixes(module), (module, {}))
            if first != module:
                raise CheckpointError(f"{entry.file}: tensor {name} is there under {first} too")
            parts[leaf] = entry
        return {short: self._stored(short, module, parts) for short, (module, parts) in groups.items()}

    @staticmethod
    def _stored(short: str, module: str, parts: Mapping[str, Entry]) -> Stored:
        if short.startswith(NOT_TEXT) or short.endswith(_BIAS):
            return Stored(module, Kind.PLAIN, parts["weight"].shape, parts, bare=True)
        return readers.describe(module, parts)

    def _leave_out(self, what: str) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + 1

    def _check_model(self, modules: Mapping[str, Stored]) -> None:
        try:
            expected = {name.removesuffix(".weight"): shape for name, shape in text_shapes(self.config).items()}
        except ValueError as error:
            raise CheckpointError(f"{self.source / 'config.json'}: {error}") from None
        for short, stored in modules.items():
            if short.startswith(NOT_TEXT):
                continue
            if short not in expected:
                raise CheckpointError(f"{stored.file}: tensor {stored.name} is unknown: config.json describes no such module")
            if stored.shape != expected[short]:
                raise CheckpointError(
                    f"{stored.file}: {stored.name} has shape {list(stored.shape)}, not {list(expected[short])} as in config.json"
                )
        for short in expected:
            if short not in modules:
                leaf = "" if short.endswith(_BIAS) else ".weight"
                raise CheckpointError(f"{self.source}: tensor {short}{leaf} is missing")

    def _add(self, stored: Stored, modules: Mapping[str, Stored]) -> None:
        short = strip_prefixes(stored.module)
        item = Item(stored, None)
        if not short.startswith(NOT_TEXT):
            role = tensor_role(short if stored.bare else f"{short}.weight")
            self._check_format(stored, role)
            item = Item(stored, role, self._partner(stored, role, modules), self._keeps_activation_scale(stored))
        self._jobs[stored.file.name].items.append(item)

    def _partner(self, stored: Stored, role: Role, modules: Mapping[str, Stored]) -> Stored | None:
        if role not in (Role.EXPERT_GATE, Role.EXPERT_UP) or self.profile.weight_format(role) is not Format.NVFP4:
            return None
        partner = modules[gate_up_partner(strip_prefixes(stored.module))]
        if partner.kind.format is not stored.kind.format:
            gate, up = sorted((stored.module, partner.module))
            raise CheckpointError(f"{self.source}: {gate} and {up} are stored in different formats")
        return partner

    def _keeps_activation_scale(self, stored: Stored) -> bool:
        for _ in (leaf for leaf in readers.KV_LEAVES if leaf in stored.parts):
            self._leave_out("KV cache scales; profiles write the cache with scale 1")
        if not any(leaf in stored.parts for leaf in readers.ACTIVATION_LEAVES):
            return False
        if self.profile.activations == Format.NVFP4 and stored.kind.format is Format.NVFP4:
            return True
        self._leave_out(f"activation scales, which profile {self.profile.name} does not use")
        return False

    def _check_format(self, stored: Stored, role: Role) -> None:
        fmt = self.profile.weight_format(role)
        if stored.kind is not Kind.PLAIN and stored.kind.format is not fmt:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is in {stored.kind.format}, profile {self.profile.name} has {role} in {fmt}, "
                "and nothing is quantized twice"
            )
        if fmt in BLOCKS and (len(stored.shape) != 2 or stored.shape[-1] % BLOCKS[fmt]):
            raise CheckpointError(
                f"{stored.file}: {stored.name} has shape {list(stored.shape)}, no width that is a multiple of {BLOCKS[fmt]}"
            )

    def fingerprint(self) -> str:
        """Changes when the source or the profile does. Files are told apart by name, size and time of change."""
        stats = [(f, (s := (self.source / f).stat()).st_size, s.st_mtime_ns) for f in self.shards.files]
        state = [1, self.profile.weights_hash, str(self.profile.activations), self.config, stats]
        return hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()

    def output_config(self) -> dict[str, Any]:
        """config.json of the result."""
        weights = [n for j in self.jobs for i in j.items if i.role is not None for n in i.specs(self.profile) if n.endswith(".weight")]
        config = {k: v for k, v in self.config.items() if k not in ("quantization_config", "compression_config", "samebits")}
        text = {k: v for k, v in config.get("text_config", {}).items() if k != "quantization_config"}
        if _MTP_LEFT_OUT in self.left_out:
            (text if text else config)["num_mtp_modules"] = 0
        return config_json(config | ({"text_config": text} if text else {}), sorted(weights), self.profile)


def output_names(count: int) -> list[str]:
    """File names of a checkpoint of `count` shards."""
    return ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
