"""Readers of weights that other tools wrote: how a module's stored tensors become one of our formats without being quantized again.

A module's format is told by the names, dtypes and shapes of its own tensors; what a config.json claims is only checked for methods
that change the meaning of those tensors. [N, K] is the module's matrix.

    plain        weight BF16, FP16 or FP32
    ModelOpt     NVFP4: weight U8 [N, K/2], weight_scale E4M3 [N, K/16], weight_scale_2 F32;  MXFP8: weight E4M3, weight_scale U8 [N, K/32]
    compressed-tensors   nvfp4-pack-quantized: weight_packed, weight_scale, weight_global_scale F32 = G;  MXFP8 as ModelOpt
    MiniMax      MXFP8 with the exponents in weight_scale_inv

Codes and block scales are taken byte for byte. compressed-tensors divides by its global scale and we multiply, so the global scale
becomes g = 1/G rounded to fp32, which is what vLLM's own loader does with it. That is exact when G is a power of two, and then every
value is the same number as by division. Otherwise g is off by at most half an ulp, and a value differs from the quotient by less than
2^-21 of itself. A G whose reciprocal is no normal fp32 number is refused.

Gate and up of an expert must share one global scale. Two different ones are made one only where that changes no value: a common scale
is looked for at which every block scale of both is again an E4M3 number and every weight dequantizes to the same bits. Without one
the pair is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import mxfp8, nvfp4
from .mxfp8 import MXFP8Tensor
from .nvfp4 import NVFP4Tensor
from .profile import Format
from .shards import CheckpointError, Entry

Weight = Tensor | NVFP4Tensor | MXFP8Tensor
PLAIN_DTYPES = ("BF16", "F16", "F32")
LEAVES = frozenset(
    "weight weight_packed weight_scale weight_scale_2 weight_scale_inv weight_global_scale".split()
    + "input_scale input_global_scale k_scale v_scale".split()
)
"""Names of a module's tensors that readers know."""
ACTIVATION_LEAVES = ("input_scale", "input_global_scale")
KV_LEAVES = ("k_scale", "v_scale")
_ROWS = 64
_METHODS = (None, "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "mxfp8", "compressed-tensors", "samebits")


class Kind(enum.Enum):
    """How a weight is stored, and which of our formats that is (None: in 16 or 32 bits)."""

    PLAIN = (None, ("weight",))
    NVFP4 = (Format.NVFP4, ("weight", "weight_scale", "weight_scale_2"))
    NVFP4_RECIPROCAL = (Format.NVFP4, ("weight_packed", "weight_scale", "weight_global_scale"))
    MXFP8 = (Format.MXFP8, ("weight", "weight_scale"))
    MXFP8_MINIMAX = (Format.MXFP8, ("weight", "weight_scale_inv"))

    @property
    def format(self) -> Format | None:
        """Our format of the same bytes."""
        return self.value[0]

    @property
    def leaves(self) -> tuple[str, ...]:
        """The tensors that make up the weight: codes, then scales."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Stored:
    """One module's weight in a source checkpoint."""

    module: str
    """Module path as the source spells it."""
    kind: Kind
    shape: tuple[int, ...]
    """Of the weight itself, not of its codes."""
    parts: Mapping[str, Entry]
    """All tensors of the module by leaf."""
    bare: bool = False
    """A single tensor whose name is `module` itself, e.g. a routing bias."""

    @property
    def name(self) -> str:
        """Name of the tensor with the codes."""
        return self.module if self.bare else f"{self.module}.{self.kind.leaves[0]}"

    @property
    def file(self) -> Path:
        """File of the tensor with the codes."""
        return self.parts[self.kind.leaves[0]].file

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(self.parts[leaf].nbytes for leaf in self.kind.leaves)


def check_declared(config: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` when a config.json declares a quantization that the tensors alone would not tell."""
    declared = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    method = declared.get("quant_method")
    if method not in _METHODS:
        raise CheckpointError(f"{where}: quantization method {method!r} has no reader")
    if declared.get("transform_config"):
        raise CheckpointError(f"{where}: the weights are rotated (transform_config), which has no reader")


def describe(module: str, parts: Mapping[str, Entry]) -> Stored:
    """How a module with these tensors (by leaf) is stored. Raises `CheckpointError` naming the tensor that does not fit any format."""
    if "weight_packed" in parts:
        kind, codes = Kind.NVFP4_RECIPROCAL, parts["weight_packed"]
    elif "weight" not in parts:
        leaf, entry = next(iter(parts.items()))
        raise CheckpointError(f"{entry.file}: tensor {module}.{leaf} has no {module}.weight")
    else:
        codes = parts["weight"]
        if codes.dtype in PLAIN_DTYPES:
            kind = Kind.PLAIN
        elif codes.dtype == "F8_E4M3":
            kind = Kind.MXFP8_MINIMAX if "weight_scale_inv" in parts else Kind.MXFP8
        elif codes.dtype == "U8":
            kind = Kind.NVFP4
        else:
            raise CheckpointError(f"{codes.file}: tensor {module}.weight is {codes.dtype}: a format without a reader")
    shape = codes.shape if kind.format is not Format.NVFP4 else (*codes.shape[:-1], 2 * codes.shape[-1] if codes.shape else 0)
    stored = Stored(module, kind, shape, parts)
    for leaf in kind.leaves:
        if leaf not in parts:
            raise CheckpointError(f"{codes.file}: tensor {module}.{leaf} is missing")
    for leaf, entry in parts.items():
        if leaf not in kind.leaves + ACTIVATION_LEAVES + KV_LEAVES:
            raise CheckpointError(f"{entry.file}: tensor {module}.{leaf} does not belong to a weight in {codes.dtype}")
        _check_part(stored, leaf, entry)
    return stored


def _check_part(stored: Stored, leaf: str, entry: Entry) -> None:
    *rows, k = stored.shape or (0,)
    dtypes: tuple[str, ...] = ("F32",)
    shapes: tuple[tuple[int, ...], ...] = ((), (1,))
    if leaf in ("k_scale", "v_scale"):
        dtypes = PLAIN_DTYPES
    elif leaf == stored.kind.leaves[0]:
        dtypes = {Format.NVFP4: ("U8",), Format.MXFP8: ("F8_E4M3",)}.get(stored.kind.format, PLAIN_DTYPES)
        shapes = (entry.shape,)
        block = {Format.NVFP4: nvfp4.BLOCK, Format.MXFP8: mxfp8.BLOCK}.get(stored.kind.format, 1)
        if stored.kind.format and (len(stored.shape) != 2 or k % block):
            raise CheckpointError(f"{entry.file}: {stored.name} has shape {stored.shape}, no matrix whose width is a multiple of {block}")
    elif leaf == "weight_scale" and stored.kind.format is Format.NVFP4:
        dtypes, shapes = ("F8_E4M3",), ((*rows, k // nvfp4.BLOCK),)
    elif leaf in ("weight_scale", "weight_scale_inv"):
        dtypes, shapes = ("U8", "F8_E8M0"), ((*rows, k // mxfp8.BLOCK),)
    if entry.dtype not in dtypes or entry.shape not in shapes:
        raise CheckpointError(
            f"{entry.file}: tensor {stored.module}.{leaf} is {entry.dtype} {list(entry.shape)}, "
            f"not {' or '.join(dtypes)} {list(shapes[0])}: a format without a reader"
        )


def read(stored: Stored) -> Weight:
    """The weight, from disk, in our format; codes, block scales and exponents byte for byte.

    Raises `CheckpointError` naming the tensor when a scale or code is NaN, negative where it may not be, or out of range.
    """
    codes, *scales = (stored.parts[leaf].read() for leaf in stored.kind.leaves)
    if stored.kind is Kind.PLAIN:
        return codes
    if stored.kind.format is Format.MXFP8:
        return _mxfp8(stored, codes.view(torch.uint8), scales[0].view(torch.uint8))
    blocks = scales[0].view(torch.uint8)
    if (blocks >= 0x7F).any():  # 0x7F is NaN, and a sign makes no sense in a scale
        _refuse(stored, "weight_scale", "holds a NaN or negative block scale")
    g = scales[1].reshape(())
    if stored.kind is Kind.NVFP4_RECIPROCAL:
        g = reciprocal(g)
    if not (torch.isfinite(g) and g >= torch.finfo(torch.float32).tiny):
        _refuse(stored, stored.kind.leaves[2], f"is {scales[1].item()}, no usable global scale")
    return NVFP4Tensor(codes, blocks, g)


def reciprocal(scale: Tensor) -> Tensor:
    """The multiplicative scale of a dividing one: 1/G, rounded to nearest in fp32; exact when G is a power of two."""
    return torch.ones((), dtype=torch.float32) / scale.float()


def read_activation_scale(stored: Stored) -> Tensor:
    """The static activation scale of an NVFP4 weight, multiplicative (amax / 2688)."""
    parts = stored.parts
    return parts["input_scale"].read() if "input_scale" in parts else reciprocal(parts["input_global_scale"].read())


def _mxfp8(stored: Stored, codes: Tensor, exponents: Tensor) -> MXFP8Tensor:
    if (exponents == 0xFF).any():
        _refuse(stored, stored.kind.leaves[1], "holds a NaN exponent")
    if ((codes & 0x7F) == 0x7F).any():
        _refuse(stored, "weight", "holds NaN")
    return MXFP8Tensor(codes, exponents)


def _refuse(stored: Stored, leaf: str, why: str) -> None:
    raise CheckpointError(f"{stored.parts[leaf].file}: tensor {stored.module}.{leaf} {why}")


def share_scale(gate: NVFP4Tensor, up: NVFP4Tensor, names: tuple[str, str]) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """Gate and up of an expert with one global scale and unchanged values.

    Tried are the larger of the two scales, then the smaller, then either times powers of two. Raises `CheckpointError` with `names`
    when none of them keeps every value's bits.
    """
    if torch.equal(gate.global_scale, up.global_scale):
        return gate, up
    large, small = torch.maximum(gate.global_scale, up.global_scale), torch.minimum(gate.global_scale, up.global_scale)
    for power in sorted(range(-16, 17), key=lambda p: (abs(p), p)):
        for base in (large, small):
            target = base * 2.0**power
            pair = rescaled(gate, target), rescaled(up, target)
            if pair[0] is not None and pair[1] is not None:
                return pair
    raise CheckpointError(
        f"{names[0]} and {names[1]} have global scales {gate.global_scale.item():.9g} and {up.global_scale.item():.9g}, "
        "which cannot be made one without changing values"
    )


def rescaled(t: NVFP4Tensor, target: Tensor) -> NVFP4Tensor | None:
    """`t` with global scale `target` and new block scales, or None when the bits of a value would change."""
    if torch.equal(t.global_scale, target):
        return t
    ratio = t.block_scales.view(torch.float8_e4m3fn).float() * t.global_scale / target
    blocks = ratio.clamp(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    for rows in torch.arange(len(t.codes)).split(_ROWS):  # most candidates fail at once
        old, new = (NVFP4Tensor(t.codes[rows], s[rows], g) for s, g in ((t.block_scales, t.global_scale), (blocks, target)))
        if not torch.equal(nvfp4.dequantize(old).view(torch.int32), nvfp4.dequantize(new).view(torch.int32)):
            return None
    return NVFP4Tensor(t.codes, blocks, target)
