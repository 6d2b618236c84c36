"""Numerics profiles: everything that trainer and engine must share so that they compute with the same bits.

A profile is frozen and hashable. `hash` covers all of it and must be equal in trainer and engine; `weights_hash` covers what is
baked into a checkpoint's bytes and must be equal in all three. A different hash refuses to run.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass

from .roles import EXPERT_ROLES, PROJECTION_ROLES, Role


class Format(enum.StrEnum):
    """Storage or compute format."""

    NVFP4 = "nvfp4"
    MXFP8 = "mxfp8"
    FP8 = "fp8_e4m3"
    BF16 = "bfloat16"
    FP32 = "float32"
    FP64 = "float64"


_WEIGHTS: dict[Role, Format] = {
    **{role: Format.NVFP4 for role in EXPERT_ROLES},
    **{role: Format.MXFP8 for role in PROJECTION_ROLES},
    Role.ROUTER: Format.FP32,
    Role.ROUTER_BIAS: Format.FP32,
    Role.NORM: Format.BF16,
    Role.EMBEDDING: Format.BF16,
    Role.HEAD: Format.BF16,
}


STORED = "stored"
E4M3_READ = "nvfp4-e4m3"
"""KV cache choice: stored as NVFP4, read as E4M3."""
_ADDED = {"kv_read": STORED}
"""Fields that profiles once did not have. At their default they are left out of a hash, so that hashes from before hold."""


class ProfileMismatch(ValueError):
    """Two sides were built for different numerics."""


@dataclass(frozen=True, slots=True)
class NumericsProfile:
    """Formats by role, and the rules that turn them into bits."""

    name: str
    """Short name by which recipes select the profile."""
    weights: tuple[tuple[str, str], ...] = tuple(sorted((str(r), str(f)) for r, f in _WEIGHTS.items()))
    """Weight format of each role, as sorted (role, format) pairs."""
    activations: str = Format.BF16
    """Format of the activations that enter a GEMM: bfloat16, float32 (CPU), or nvfp4 (W4A4)."""
    accumulation: str = Format.FP32
    """Format in which products are summed, before they are rounded to the activations': float32, or float64 where K and V of fp32 are
    rounded to NVFP4: an fp32 sum has other last bits in another batch, and a value between two codes then takes the other one."""
    kv_cache: str = Format.BF16
    """Format of K, V and index keys between their write and their use: the compute dtype, or nvfp4."""
    kv_read: str = STORED
    """What attention takes K, V and index keys as: "stored", as the cache holds them, or fp8_e4m3, where NVFP4 rows are rounded once more
    on their way to E4M3 products and meet queries of E4M3 (`quant.kv`; Blackwell's kernels). Other caches are read as stored."""
    lora: str = Format.BF16
    """Format of the adapter in forward and on the wire. The optimizer's master copy is fp32."""
    lora_scale: str = "folded-into-B"
    """alpha / rank is multiplied into B before B is rounded, so that the engine applies scale 1."""
    rules: str = "e2m1-rne;e4m3-rne;nvfp4-global-amax/2688;w1w3-shared-global;e8m0-rceil"
    """Rounding and scale policy, spelled out so that a change of it changes the hash."""

    def weight_format(self, role: Role) -> Format:
        """Format in which a weight of `role` is stored."""
        return Format(dict(self.weights)[str(role)])

    def replace(self, **changes: str) -> NumericsProfile:
        """A copy with fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def rounded_reads(self) -> bool:
        """Does attention read the NVFP4 cache as E4M3, with queries of E4M3?"""
        return self.kv_cache == Format.NVFP4 and self.kv_read == Format.FP8

    def _digest(self, fields: tuple[str, ...]) -> str:
        values = {f: getattr(self, f) for f in fields if getattr(self, f) != _ADDED.get(f)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def weights_hash(self) -> str:
        """Hash of what is baked into the bytes of a checkpoint: weight formats and rounding rules."""
        return self._digest(("weights", "rules"))

    @property
    def hash(self) -> str:
        """Hash of the whole profile but its name."""
        return self._digest(tuple(f.name for f in dataclasses.fields(self) if f.name != "name"))


PROFILES: dict[str, NumericsProfile] = {
    p.name: p
    for p in (
        NumericsProfile("w4a16"),
        NumericsProfile("w4a16-fp32", activations=Format.FP32, kv_cache=Format.FP32),
        NumericsProfile("w4a4", activations=Format.NVFP4, kv_cache=Format.NVFP4, kv_read=Format.FP8),
    )
}


def get_profile(name: str, kv_cache: str | None = None) -> NumericsProfile:
    """The profile called `name`, with its KV format replaced where given: nvfp4, or nvfp4-e4m3 for NVFP4 read as E4M3.

    An NVFP4 cache under fp32 activations brings sums in fp64.

    Raises `ValueError` on an unknown name or format.
    """
    if name not in PROFILES:
        raise ValueError(f"unknown numerics profile {name!r}; known: {', '.join(PROFILES)}")
    profile = PROFILES[name]
    if kv_cache is None or kv_cache == "auto":
        return profile
    exact = {"accumulation": Format.FP64} if profile.activations == Format.FP32 else {}
    if kv_cache == E4M3_READ:
        return profile.replace(kv_cache=Format.NVFP4, kv_read=Format.FP8, **exact)
    allowed = (profile.kv_cache, Format.NVFP4, E4M3_READ)
    if kv_cache not in allowed:
        *formats, last = dict.fromkeys(allowed)
        formats = f"{', '.join(formats)} or {last}"
        raise ValueError(f"numerics profile {name!r} takes a KV cache in {formats}, not {kv_cache!r}")
    return profile.replace(kv_cache=Format(kv_cache), **(exact if kv_cache == Format.NVFP4 else {}))


def require_same(what: str, have: str, other: str, want: str) -> None:
    """Raise `ProfileMismatch` in one line unless both hashes are equal."""
    if have != want:
        raise ProfileMismatch(f"numerics profile of {what} is {have}, of {other} {want}: they would not compute the same bits")
