"""What happens between the QKV projection and attention, in one kernel: per-head Gemma norm, partial RoPE, and K, V and index key into
their pages, as NVFP4, E4M3 or bf16. The same without pages for training, and its gradient.

`triton_heads` has what is done to a row; here is which rows there are. A program takes rows of one kind, counted over all tokens: index
keys, K, V, index queries, queries, in this order of programs, since those that quantize take longest. Query heads of one token share
the norm's weights and the token's angles, TILES times R of them. Non-finite rows are not looked for: an engine has no use for an
exception in the middle of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_heads import (
    angles,
    cached,
    head_gradient,
    inverse_rms,
    norm_weights,
    normed_rotated,
    quarters,
    store_page_rows,
    store_quarters,
)
from .triton_msa_tiles import PAGE


@triton.jit
def _positions(position_ptr, token, mask):
    """Rows of the rotation table; padding takes the first."""
    return tl.maximum(tl.load(position_ptr + token, mask=mask, other=0), 0)


@triton.jit
def _normed_rows(
    x_ptr, stride, norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, H: tl.constexpr, ROTARY: tl.constexpr, R: tl.constexpr
):
    """Rows `first` to `first` + R - 1 of heads [T, H]: (quarters, normed and rotated; token, head, mask)."""
    row = first + tl.arange(0, R)
    token, head = row // H, row % H
    mask = token < tokens
    a, b, c, d = quarters(x_ptr + (token.to(tl.int64) * stride + head * 128), mask)
    turn = angles(cos_ptr, sin_ptr, _positions(position_ptr, token, mask), ROTARY)
    weight = norm_weights(norm_ptr + row * 0)
    a, b, c, d = normed_rotated(a, b, c, d, inverse_rms(a, b, c, d, eps), weight, turn, ROTARY)
    return a, b, c, d, token, head, mask


@triton.jit
def _query_rows(
    x_ptr, stride, norm_ptr, cos_ptr, sin_ptr, position_ptr, out_ptr, first, tokens, eps, H: tl.constexpr, ROTARY: tl.constexpr,
    R: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """TILES times R query heads, normed and rotated; more than one tile lies in one token."""
    if TILES == 1:
        a, b, c, d, token, head, mask = _normed_rows(
            x_ptr, stride, norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, H, ROTARY, R
        )
        store_quarters(out_ptr + (token.to(tl.int64) * H + head) * 128, mask, a, b, c, d)
    else:
        row = first % H + tl.arange(0, R)
        mask = tl.full([R], True, tl.int1)
        token = first // H
        turn = angles(cos_ptr, sin_ptr, _positions(position_ptr, row * 0 + token, mask), ROTARY)
        weight = norm_weights(norm_ptr + row * 0)
        x_ptr += token.to(tl.int64) * stride
        out_ptr += token.to(tl.int64) * (H * 128)
        e, f, g, h = quarters(x_ptr + row * 128, mask)
        for tile in tl.static_range(TILES):
            a, b, c, d = e, f, g, h
            if tile + 1 < TILES:  # asked for before a store, behind which the compiler would not ask
                e, f, g, h = quarters(x_ptr + (row + R) * 128, mask)
            a, b, c, d = normed_rotated(a, b, c, d, inverse_rms(a, b, c, d, eps), weight, turn, ROTARY)
            store_quarters(out_ptr + row * 128, mask, a, b, c, d)
            row += R


@triton.jit
def _value_rows(x_ptr, stride, first, tokens, G: tl.constexpr, R: tl.constexpr):
    """As `_normed_rows`, with nothing done to them."""
    row = first + tl.arange(0, R)
    token, group = row // G, row % G
    mask = token < tokens
    a, b, c, d = quarters(x_ptr + (token.to(tl.int64) * stride + group * 128), mask)
    return a, b, c, d, token, group, mask


@triton.jit
def _pages(slot_ptr, base_ptr, token, group, mask, page_stride, head_stride):
    """(planes or first rows in the page, token in the page, whether it is written) of rows."""
    slot = tl.load(slot_ptr + token, mask=mask, other=-1)
    place = (slot % PAGE).to(tl.int32)
    return base_ptr + (slot // PAGE * page_stride + group * head_stride), place, mask & (slot >= 0)


@triton.jit(do_not_specialize=["tokens"])
def insert_kernel(
    q_ptr,  # [T, H, 128] by token stride, as all inputs
    k_ptr,  # [T, G, 128]
    v_ptr,  # [T, G, 128]
    index_q_ptr,  # [T, index heads, 128]; not read without INDEXED, as all that is the indexer's
    index_k_ptr,  # [T, 128]
    q_out_ptr,  # [T, H, 128]
    index_q_out_ptr,  # [T, index heads, 128]
    q_norm_ptr,
    k_norm_ptr,
    index_q_norm_ptr,
    index_k_norm_ptr,
    cos_ptr,  # fp32 [positions, ROTARY]
    sin_ptr,
    position_ptr,  # int32 [T], -1 for padding
    slot_ptr,  # int64 [T], page * 128 + place; -1 for no page
    keys_ptr,
    values_ptr,
    index_ptr,
    q_stride,
    k_stride,
    v_stride,
    index_q_stride,
    index_k_stride,
    page_stride,
    token_stride,
    head_stride,
    index_page_stride,
    index_token_stride,
    eps,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEXED: tl.constexpr,
    ROTARY: tl.constexpr,
    FORMAT: tl.constexpr,
    INDEX_FORMAT: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rows of one kind a program, see the module."""
    program = tl.program_id(0)
    of_index, of_groups = tl.cdiv(tokens, R) * INDEXED, tl.cdiv(tokens * G, R)
    if program < of_index:
        a, b, c, d, token, group, mask = _normed_rows(
            index_k_ptr, index_k_stride, index_k_norm_ptr, cos_ptr, sin_ptr, position_ptr, program * R, tokens, eps, 1, ROTARY, R
        )
        base, place, mask = _pages(slot_ptr, index_ptr, token, group, mask, index_page_stride, 0)
        store_page_rows(a, b, c, d, base, mask, place, index_token_stride, False, R, INDEX_FORMAT)
    elif program < of_index + of_groups:
        first = (program - of_index) * R
        a, b, c, d, token, group, mask = _normed_rows(
            k_ptr, k_stride, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, G, ROTARY, R
        )
        base, place, mask = _pages(slot_ptr, keys_ptr, token, group, mask, page_stride, head_stride)
        store_page_rows(a, b, c, d, base, mask, place, token_stride, False, R, FORMAT)
    elif program < of_index + 2 * of_groups:
        first = (program - of_index - of_groups) * R
        a, b, c, d, token, group, mask = _value_rows(v_ptr, v_stride, first, tokens, G, R)
        base, place, mask = _pages(slot_ptr, values_ptr, token, group, mask, page_stride, head_stride)
        store_page_rows(a, b, c, d, base, mask, place, token_stride, True, R, FORMAT)
    else:
        program -= of_index + 2 * of_groups
        _all_query_rows(
            q_ptr, index_q_ptr, q_stride, index_q_stride, q_norm_ptr, index_q_norm_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr,
            index_q_out_ptr, program, tl.cdiv(tokens * INDEX_HEADS, R), tokens, eps, H, INDEX_HEADS, ROTARY, R, TILES,
        )  # fmt: skip


@triton.jit
def _all_query_rows(
    q_ptr, index_q_ptr, q_stride, index_q_stride, q_norm_ptr, index_q_norm_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr,
    index_q_out_ptr, program, of_index, tokens, eps, H: tl.constexpr, INDEX_HEADS: tl.constexpr, ROTARY: tl.constexpr, R: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Index queries in the first `of_index` programs, then queries."""
    if program < of_index:
        _query_rows(
            index_q_ptr, index_q_stride, index_q_norm_ptr, cos_ptr, sin_ptr, position_ptr, index_q_out_ptr, program * R, tokens, eps,
            INDEX_HEADS, ROTARY, R, 1,
        )  # fmt: skip
    else:
        first = (program - of_index) * (R * TILES)
        _query_rows(q_ptr, q_stride, q_norm_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, first, tokens, eps, H, ROTARY, R, TILES)


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    index_q_ptr,
    index_k_ptr,
    q_out_ptr,  # [T, H, 128]
    k_out_ptr,  # [T, G, 128]
    v_out_ptr,  # [T, G, 128]
    index_q_out_ptr,  # [T, index heads, 128]
    index_k_out_ptr,  # [T, 128]
    q_norm_ptr,
    k_norm_ptr,
    index_q_norm_ptr,
    index_k_norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_stride,
    k_stride,
    v_stride,
    index_q_stride,
    index_k_stride,
    eps,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEXED: tl.constexpr,
    ROTARY: tl.constexpr,
    FORMAT: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
):
    """As `insert_kernel`, with what pages of FORMAT would give back instead of pages."""
    program = tl.program_id(0)
    of_index, of_groups = tl.cdiv(tokens, R) * INDEXED, tl.cdiv(tokens * G, R)
    if program < of_index:
        a, b, c, d, token, group, mask = _normed_rows(
            index_k_ptr, index_k_stride, index_k_norm_ptr, cos_ptr, sin_ptr, position_ptr, program * R, tokens, eps, 1, ROTARY, R
        )
        a, b, c, d = cached(a, b, c, d, R, FORMAT)
        store_quarters(index_k_out_ptr + token.to(tl.int64) * 128, mask, a, b, c, d)
    elif program < of_index + of_groups:
        first = (program - of_index) * R
        a, b, c, d, token, group, mask = _normed_rows(
            k_ptr, k_stride, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, G, ROTARY, R
        )
        a, b, c, d = cached(a, b, c, d, R, FORMAT)
        store_quarters(k_out_ptr + (token.to(tl.int64) * G + group) * 128, mask, a, b, c, d)
    elif program < of_index + 2 * of_groups:
        first = (program - of_index - of_groups) * R
        a, b, c, d, token, group, mask = _value_rows(v_ptr, v_stride, first, tokens, G, R)
        a, b, c, d = cached(a, b, c, d, R, FORMAT)
        store_quarters(v_out_ptr + (token.to(tl.int64) * G + group) * 128, mask, a, b, c, d)
    else:
        program -= of_index + 2 * of_groups
        _all_query_rows(
            q_ptr, index_q_ptr, q_stride, index_q_stride, q_norm_ptr, index_q_norm_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr,
            index_q_out_ptr, program, tl.cdiv(tokens * INDEX_HEADS, R), tokens, eps, H, INDEX_HEADS, ROTARY, R, TILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def rotate_gradient_kernel(
    q_ptr,
    k_ptr,
    q_grad_ptr,  # [T, H, 128] by token stride, as q and k
    k_grad_ptr,  # [T, G, 128]
    q_out_ptr,  # [T, H, 128]
    k_out_ptr,  # [T, G, 128]
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_stride,
    k_stride,
    q_grad_stride,
    k_grad_stride,
    eps,
    tokens,
    H: tl.constexpr,
    G: tl.constexpr,
    ROTARY: tl.constexpr,
    R: tl.constexpr,
):
    """Gradient of q and k before norm and rotation; K's programs come first."""
    program, programs = tl.program_id(0), tl.cdiv(tokens * G, R)
    if program >= programs:
        first = (program - programs) * R
        _gradient_rows(
            q_ptr, q_stride, q_grad_ptr, q_grad_stride, q_out_ptr, q_norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, H,
            ROTARY, R,
        )  # fmt: skip
    else:
        _gradient_rows(
            k_ptr, k_stride, k_grad_ptr, k_grad_stride, k_out_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, program * R, tokens, eps,
            G, ROTARY, R,
        )  # fmt: skip


@triton.jit
def _gradient_rows(
    x_ptr, stride, grad_ptr, grad_stride, out_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, first, tokens, eps, H: tl.constexpr,
    ROTARY: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, R)
    token, head = row // H, row % H
    mask = token < tokens
    at = token.to(tl.int64)
    a, b, c, d = quarters(x_ptr + at * stride + head * 128, mask)
    e, f, g, h = quarters(grad_ptr + at * grad_stride + head * 128, mask)
    turn = angles(cos_ptr, sin_ptr, _positions(position_ptr, token, mask), ROTARY)
    a, b, c, d = head_gradient(a, b, c, d, e, f, g, h, norm_weights(norm_ptr + row * 0), turn, eps, ROTARY)
    store_quarters(out_ptr + row.to(tl.int64) * 128, mask, a, b, c, d)
