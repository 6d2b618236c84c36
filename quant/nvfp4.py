"""NVFP4: E2M1 codes in blocks of 16 that share an E4M3 scale, under one fp32 global scale. The arithmetic every kernel is held to.

    global scale  g = amax / 2688                     (2688 = 448 * 6, the largest E4M3 times the largest E2M1)
    block scale   s = E4M3(block_amax / (6 * g))      round to nearest even, saturating at 448
    code          c = E2M1(x / (s * g))               round to nearest, ties to the even code, saturating at 6
    value         x' = E2M1[c] * (s * g)

Every operation is one correctly rounded fp32 operation, in the order written: 6 * g, the quotient by it, s * g, the quotient by
that. The input (bf16, fp16 or fp32) is widened to fp32 first, which is exact.

Rules at the edges, each with a golden vector in tests/quant/golden/nvfp4.json:
  ties      0.25->0  0.75->1  1.25->1  1.75->2  2.5->2  3.5->4  5->4 (the even code, as `cvt.rn.satfinite.e2m1x2`)
  zeros     a block of zeros has scale 1.0 (byte 0x38) and codes 0; a tensor of zeros has global scale 1.0
  tiny      a block whose scale would round to 0 takes the smallest E4M3, 2^-9, so that it keeps what it can
  tiny g    a global scale below 2^-90 becomes 2^-90 (an amax below 2.2e-24): no product s * g is subnormal anywhere
  sign      -0.0 has code 0; a negative value that rounds to zero has code 8, and reads as -0.0
  large     a block beyond 2688 * g (a global scale given from outside) has scale 448, and codes saturate at 6; under a given scale
            above 2^116 a value can exceed fp32 and reads as infinity
  others    NaN or infinity raises `NonFiniteWeight` naming the tensor; a last dimension that is no multiple of 16 raises
            `ValueError`; a global scale that is not within [2^-90, 2^117] raises `ValueError`

Byte layout: two codes a byte, the even element in the low nibble, as ModelOpt and vLLM store it. A stack [E, N, K] has one global
scale for each matrix. CUDA tensors take the kernels of `quant.triton_quant` where Triton is there: the same bytes. Inside
`torch.compile` everything is plain torch in one graph, and what would raise becomes an assertion (`RuntimeError`) with the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import NonFiniteWeight, block_amax, e4m3_values, fast_path, for_chunks, require, require_blocks, require_finite, table
from .roles import Role

__all__ = ["NVFP4Tensor", "NonFiniteWeight", "dequantize", "global_scale", "quantize", "quantize_experts", "require_finite", "shared_scale"]

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
GLOBAL_DIVISOR = E2M1_MAX * E4M3_MAX  # 2688
GLOBAL_MIN, GLOBAL_LIMIT = 2.0**-90, 2.0**117  # the largest fp32 over 2688 is just below 2^117
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class NVFP4Tensor(NamedTuple):
    """A quantized tensor of logical shape [..., K]."""

    codes: Tensor  # uint8 [..., K/2], even element in the low nibble
    block_scales: Tensor  # uint8 [..., K/16], E4M3 bits
    global_scale: Tensor  # fp32, broadcastable over the leading dimensions: [] or [E] for a stack of experts


def global_scale(amax: Tensor) -> Tensor:
    """Global scale of a tensor whose largest magnitude is `amax` (any shape): fp32 amax / 2688, at least 2^-90; 1 where amax is 0."""
    amax = amax.float()
    # A tensor as divisor: on CUDA torch turns a quotient by a Python number into a product with its reciprocal.
    quotient = amax / torch.full_like(amax, GLOBAL_DIVISOR)
    return torch.where(amax == 0, torch.ones_like(amax), quotient.clamp_min(GLOBAL_MIN))


_default_scale = global_scale  # `quantize` has a parameter of this name


def quantize(w: Tensor, global_scale: Tensor | None = None, name: str | None = "weight") -> NVFP4Tensor:
    """Quantize `w` [..., K] (bf16, fp16 or fp32).

    Args:
        global_scale: fp32, a scalar or of a shape that matches `w`'s leading dimensions (one for each expert of a stack [E, N, K] is
            shape [E]). Default: from the amax of each matrix, so [] for [K] and [N, K], [E] for [E, N, K].
        name: what errors call the tensor. None: nothing is looked for, so that nothing waits for a device, and a CUDA graph can hold it;
            what NaN, infinity or a bad global scale then give is undefined.

    Raises `NonFiniteWeight` (with `name`), and `ValueError` when K is no multiple of 16 or a given global scale is out of range.
    """
    require_blocks(w, BLOCK)
    if fast_path(w):
        from . import triton_quant

        return triton_quant.nvfp4_quantize(w, global_scale, name)
    blocks = w.detach().reshape(-1, BLOCK)
    amax = block_amax(blocks, name)
    if global_scale is None:
        lead = w.shape[:-2]
        per_matrix = amax.reshape(*lead, -1) if w.numel() else amax.new_zeros(*lead, 1)
        global_scale = _default_scale(per_matrix.amax(-1))
    else:
        global_scale = global_scale.to(w.device, torch.float32)
        if name is not None:
            inside = (global_scale >= GLOBAL_MIN) & (global_scale <= GLOBAL_LIMIT)
            require(inside.all(), f"{name}: global scale must lie within [2^-90, 2^117]", ValueError)
    scales = block_scales(amax, per_block(global_scale, w))
    divisor = e4m3_values(scales).mul_(per_block(global_scale, w))
    codes = torch.empty(blocks.shape[0], BLOCK // 2, dtype=torch.uint8, device=w.device)

    def work(part: slice) -> None:
        quotient = blocks[part].float() / divisor[part, None]
        codes[part] = _pack_fresh(_with_sign(_magnitude_codes(quotient), blocks[part]))

    for_chunks(blocks, work)
    shape = w.shape[:-1]
    k = w.shape[-1]
    return NVFP4Tensor(codes.reshape(*shape, k // 2), scales.reshape(*shape, k // BLOCK), global_scale)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of a quantized tensor: E2M1 value times (block scale times global scale) in fp32, cast to `dtype` last."""
    if fast_path(t.codes):
        from . import triton_quant

        return triton_quant.nvfp4_dequantize(t, dtype)
    divisor = e4m3_values(t.block_scales.reshape(-1)) * per_block(t.global_scale, t.block_scales, 1)
    return scaled_values(t.codes, divisor, dtype)


def scaled_values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., K] in `dtype` of packed codes uint8 [..., K/2] times one fp32 factor a block, `scale` [blocks]."""
    packed = codes.reshape(-1, BLOCK // 2)
    out = torch.empty(packed.shape[0], BLOCK, dtype=dtype, device=codes.device)
    pair_table = table(_pair_table, codes.device)

    def work(part: slice) -> None:
        pairs = pair_table.index_select(0, packed[part].reshape(-1).int()).view(torch.float32).view(-1, BLOCK)
        out[part] = pairs.mul_(scale[part, None])

    for_chunks(out, work)
    return out.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def shared_scale(weights: Mapping[str, Tensor]) -> Tensor:
    """Global scale for matrices [N, K] that share one (or for each place of stacks [E, N, K]): that of the largest amax among them.

    The keys are their names: raises `NonFiniteWeight` with the one that holds NaN or infinity.
    """
    return global_scale(torch.stack([_matrix_amax(w, name) for name, w in weights.items()]).amax(0))


def quantize_experts(weights: Mapping[Role, Tensor], name: str = "experts") -> dict[Role, NVFP4Tensor]:
    """Quantize the matrices of one expert ([N, K] each) or of a stack of experts ([E, N, K] each), by role.

    Gate (w1) and up (w3) of an expert share one global scale, that of the larger amax, because engines run them as one matrix;
    down has its own. Raises as `quantize` does, naming the tensor `{name}.{role}`.
    """
    pair = {f"{name}.{role}": weights[role] for role in (Role.EXPERT_GATE, Role.EXPERT_UP) if role in weights}
    shared = shared_scale(pair) if pair else None
    return {role: quantize(w, None if role is Role.EXPERT_DOWN else shared, f"{name}.{role}") for role, w in weights.items()}


def _matrix_amax(w: Tensor, name: str) -> Tensor:
    """fp32 amax of a matrix, or of each of a stack."""
    require_blocks(w, BLOCK)
    return block_amax(w.detach().reshape(-1, BLOCK), name).reshape(*w.shape[:-2], -1).amax(-1)


def per_block(scale: Tensor, w: Tensor, blocks: int = BLOCK) -> Tensor:
    """Global scale as one factor for all blocks of `w` ([]), or one for each block ([B]) where it has a leading dimension.

    `blocks` is how many elements of `w`'s last dimension make one block.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    shape = (*w.shape[:-1], w.shape[-1] // blocks)
    return scale.reshape(scale.shape + (1,) * (len(shape) - scale.dim())).expand(shape).reshape(-1)


def block_scales(amax: Tensor, g: Tensor) -> Tensor:
    """E4M3 bits (uint8) of the scales of blocks with the given `amax` (fp32) under global scale `g`."""
    ratio = (amax / (E2M1_MAX * g)).clamp_(E4M3_TINY, E4M3_MAX)
    return ratio.masked_fill_(amax == 0, 1.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _magnitude_codes(y: Tensor) -> Tensor:
    """E2M1 code of |y| (int32, 0..7) for fp32 `y`, which is overwritten.

    For |y| in [P, 2P), P = 1, 2 or 4 (and P = 1 below 1), codes are P/2 apart. Adding 2^22 * P makes the fp32 adder round to exactly
    that step, ties to even: the sum's low bits are then the number n of steps, and the code is n + 2 * log2(P).
    """
    y = y.abs_().clamp_max_(E2M1_MAX)
    magic = y.view(torch.int32).bitwise_and(0x7F800000).clamp_min_(0x3F800000).add_(22 << 23)
    total = magic.view(torch.float32).add_(y).view(torch.int32)
    # total >> 22 is 2 * (127 + 22 + log2 P): its low bit, the top fraction bit, is 0.
    return (total & 7).add_(total >> 22).sub_(2 * (127 + 22)).bitwise_and_(7)


def _with_sign(magnitude: Tensor, x: Tensor) -> Tensor:
    """uint8 codes with the sign of `x` (bit 3); -0.0 is not negative."""
    return magnitude.to(torch.uint8).bitwise_or_((x < 0).view(torch.uint8) << 3)


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 code (uint8, 0..15) of each fp32 value: round to nearest, ties to even, saturating."""
    return _with_sign(_magnitude_codes(x.detach().float().clone()), x)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 value of each E2M1 code (uint8, 0..15)."""
    return table(_code_table, codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def _code_table(device: torch.device) -> Tensor:
    return torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=device)


def _pair_table(device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 values of each packed byte, the low nibble's first."""
    values = _code_table(device)
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1).view(torch.int64).view(-1)


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K] codes to uint8 [..., K/2] bytes, even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _pack_fresh(codes: Tensor) -> Tensor:
    """`pack` of a contiguous tensor, through the little-endian pairs: (low | high << 8) >> 4 has the high code in place."""
    pairs = codes.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
