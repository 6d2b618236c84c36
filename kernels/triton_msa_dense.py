"""Dense causal attention on CUDA, forward: MiniMax-M3's first layers, whose queries see their whole prefix.

**One order.** Keys are taken in chunks of CHUNK positions, anchored at position 0 of the request, and a chunk in tiles of KEYS. Within a
chunk a query's maximum, sum and weighted values go through the tiles in ascending order, as in flash attention; the results of chunks are
then merged in ascending order by `_merge`. A program of `prefill_kernel` takes the chunks of many query tokens one after the other and
keeps both states in registers; in decode `split_kernel` leaves every chunk to a program of its own, and `merge_kernel` does the same
merging. So a query's bits are the same, and depend on nothing but itself and its keys.

**Equal arithmetic in unequal programs.** Prefill has queries as rows of the tensor cores' products, decode has keys as rows, so that few
queries need not be padded to 64. An element of a product is the sum over the same sixteen k's a step in the same order of steps either
way, and Hopper adds the sixteen of a step as one sum, whatever their places and whichever instruction it is (tests/gpu says so anew on
each machine). The maximum has no order. What has one is the sum of the weights, which Triton would reduce by the layout it finds: so it is
a product too, with ones, of the weights as they were rounded for the values. Multiply and add are contracted where `tl.fma` says it.

Tiles of bf16 keys are copied as they lie. Codes of NVFP4 and E4M3 become bf16 in registers, where two codes 16 bits apart in a word make a
pair, so eight dimensions that follow each other are in another order than in memory (`_dim`); the query's are put in that order too.
Keys beyond the last that a program's queries see read as anything in K, since their scores are masked, and as finite numbers in V, since
their weights are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_msa_tiles import BF16, NVFP4, OPERAND, PAGE, block_scales, e4m3_bytes, finite, halves, nibbles, rounded, unit, value_weights


@triton.jit
def _finite(x):
    """0 for -inf, so that differences of what may both be -inf are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _dim(FORMAT: tl.constexpr):
    """Dimension in each column of a tile of K or V."""
    column = tl.arange(0, 128)
    return column if FORMAT == BF16 else column // 8 * 8 + column % 2 * 4 + column % 8 // 2


@triton.jit
def _offset(table_ptr, first, at, page_stride, token_stride, PAGED: tl.constexpr, FORMAT: tl.constexpr):
    """Elements to the key at position `at` (a multiple of a tile); of NVFP4, to its page's plane."""
    if PAGED:
        offset = tl.load(table_ptr + at // 128).to(tl.int64) * page_stride
        return offset if FORMAT == NVFP4 else offset + at % 128 * token_stride
    else:
        return (first + at).to(tl.int64) * token_stride


@triton.jit
def _codes(base, place, left, token_stride, KEYS: tl.constexpr, FORMAT: tl.constexpr, VALUE: tl.constexpr):
    """Raw bits of KEYS keys: words of 16 bytes a row, and two scales of E4M3 a row in NVFP4.

    Args:
        base: of the first key; of NVFP4, of its page's plane. place: of the first key in its page. left: keys that there are from it on;
            others need not be there in E4M3, and in NVFP4 are bytes of a page, which decode to finite numbers whatever they are.
    """
    words = base.to(tl.pointer_type(tl.int32))
    if FORMAT == NVFP4:
        row = tl.arange(0, KEYS * 4)
        key, quarter = row // 4 + place, row % 4
        x = tl.load(words + (key * 16 + quarter * 4)[:, None] + tl.arange(0, 4)[None, :])
        if VALUE:
            at = words + (PAGE * 16 + key // 4 * 8 + quarter * 2)
            low, high = tl.load(at) >> (key % 4 * 8), tl.load(at + 1) >> (key % 4 * 8)
        else:
            low = tl.load(words + (PAGE * 16 + key * 2 + quarter // 2)) >> (quarter % 2 * 16)
            high = low >> 8
        scale = (low & 0xFF) | ((high & 0xFF) << 8)
    else:
        row = tl.arange(0, KEYS * 8)
        at = (row // 8 * (token_stride // 4) + row % 8 * 4)[:, None] + tl.arange(0, 4)[None, :]
        x = tl.load(words + at, mask=(row // 8 < left)[:, None], other=0)
        scale = row
    return x, scale


@triton.jit
def _decoded(x, scale, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Operand [KEYS, 128] of what `_codes` gave; column c is dimension `_dim`[c]. ROUNDED: NVFP4 is read as E4M3."""
    if FORMAT == NVFP4:
        bits = tl.join(scale & 0xFF, scale >> 8)
        scales = block_scales(finite(bits) if ROUNDED else bits)
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [KEYS * 4, 2, 4]), [KEYS * 4, 4, 2])
        tile = nibbles(halves(x), scales)  # [row, word, half, 2, 2]
        if ROUNDED:
            tile = rounded(tile)
    else:
        tile = e4m3_bytes(tl.reshape(x, [KEYS * 8, 2, 2]))  # [row, pair of words, word, 2, 2]
    return tl.reshape(tl.permute(tile, [0, 1, 3, 4, 2]), [KEYS, 128])


@triton.jit
def _plain(base, left, token_stride, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """bf16 [KEYS, 128]; zero for keys from `left` on where MASKED."""
    key = tl.arange(0, KEYS)
    at = base + key[:, None] * token_stride + tl.arange(0, 128)[None, :]
    if MASKED:
        return tl.load(at, mask=(key < left)[:, None], other=0.0).to(OPERAND)
    else:
        return tl.load(at).to(OPERAND)


@triton.jit
def _merge(all_top, all_total, all_values, top, total, values):
    """State of the chunks before, [N], [N] and [N, 128], with that of a chunk. A row that sees no key of the chunk stays as it is."""
    seen = top > float("-inf")
    new_top = tl.maximum(all_top, top)
    origin = _finite(new_top)
    old, new = tl.exp2(all_top - origin), tl.exp2(top - origin)
    old, new = tl.where(seen, old, 1.0), tl.where(seen, new, 0.0)
    all_total = tl.fma(total, new, all_total * old)
    new, old = tl.broadcast_to(new[:, None], values.shape), tl.broadcast_to(old[:, None], values.shape)
    return new_top, all_total, tl.fma(values, new, all_values * old)


@triton.jit
def _weights(scores, new_top, factor, AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """2^(scores * factor - maximum), as operand beside values."""
    origin = tl.broadcast_to(tl.expand_dims(-_finite(new_top), AXIS), scores.shape)
    return value_weights(tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, origin)), FORMAT)


@triton.jit
def _row_weights(query, k, top, key, position, factor, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """Of a tile of keys, with queries as rows: the new maximum, what it makes of the old state, and weights [N, KEYS]."""
    scores = tl.dot(query, tl.trans(k))
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    return new_top, tl.exp2(top - _finite(new_top))[:, None], _weights(scores, new_top, factor, 1, FORMAT)


@triton.jit
def _column_weights(query, k, top, key, position, factor, FORMAT: tl.constexpr):
    """The same with queries as columns: weights [KEYS, N]."""
    scores = tl.dot(k, query)
    scores = tl.where(key[:, None] <= position[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0) * factor)
    return new_top, tl.exp2(top - _finite(new_top))[None, :], _weights(scores, new_top, factor, 0, FORMAT)


@triton.jit
def _chunk(
    query,
    position,
    keys_ptr,
    values_ptr,
    table_ptr,
    first,
    begin,
    limit,
    page_stride,
    token_stride,
    factor,
    ones,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAGED: tl.constexpr,
    COLUMNS: tl.constexpr,  # queries are columns of the products
    MASKED: tl.constexpr,  # some query does not see some key below begin + CHUNK; always so with COLUMNS
    STAGES: tl.constexpr,
):
    """Maximum, sum (as in the tiles) and weighted values of the keys from `begin` on, below `limit`."""
    top = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([64, N] if COLUMNS else [N, 16], tl.float32)
    values = tl.zeros([128, N] if COLUMNS else [N, 128], tl.float32)
    key = tl.arange(0, KEYS) + begin
    tiles = tl.minimum(CHUNK, limit - begin + KEYS - 1) // KEYS if MASKED else CHUNK // KEYS
    if FORMAT == BF16:
        for tile in tl.range(0, tiles, num_stages=STAGES):
            at = begin + tile * KEYS
            offset = _offset(table_ptr, first, at, page_stride, token_stride, PAGED, FORMAT)
            k = _plain(keys_ptr + offset, limit - at, token_stride, KEYS, MASKED)
            v = _plain(values_ptr + offset, limit - at, token_stride, KEYS, MASKED)
            seen = key + tile * KEYS
            if COLUMNS:
                top, shrink, weights = _column_weights(query, k, top, seen, position, factor, FORMAT)
                total = tl.dot(ones, weights, total * shrink)
                values = tl.dot(tl.trans(v), weights, values * shrink)
            else:
                top, shrink, weights = _row_weights(query, k, top, seen, position, factor, MASKED, FORMAT)
                total = tl.dot(weights, ones, total * shrink)
                values = tl.dot(weights, v, values * shrink)
    else:
        offset = _offset(table_ptr, first, begin, page_stride, token_stride, PAGED, FORMAT)
        x_k, scale_k = _codes(keys_ptr + offset, 0, limit - begin, token_stride, KEYS, FORMAT, False)
        x_v, scale_v = _codes(values_ptr + offset, 0, limit - begin, token_stride, KEYS, FORMAT, True)
        for tile in tl.range(0, tiles, num_stages=1):
            # The next tile is on its way while this one is computed; after the last one, the last one again.
            at = begin + tl.minimum(tile + 1, tiles - 1) * KEYS
            offset = _offset(table_ptr, first, at, page_stride, token_stride, PAGED, FORMAT)
            next_k, next_scale_k = _codes(keys_ptr + offset, at % 128, limit - at, token_stride, KEYS, FORMAT, False)
            next_v, next_scale_v = _codes(values_ptr + offset, at % 128, limit - at, token_stride, KEYS, FORMAT, True)
            k = _decoded(x_k, scale_k, KEYS, FORMAT, ROUNDED)
            seen = key + tile * KEYS
            if COLUMNS:
                top, shrink, weights = _column_weights(query, k, top, seen, position, factor, FORMAT)
                total = tl.dot(ones, weights, total * shrink)
                values = tl.dot(tl.trans(_decoded(x_v, scale_v, KEYS, FORMAT, ROUNDED)), weights, values * shrink)
            else:
                top, shrink, weights = _row_weights(query, k, top, seen, position, factor, MASKED, FORMAT)
                total = tl.dot(weights, ones, total * shrink)
                values = tl.dot(weights, _decoded(x_v, scale_v, KEYS, FORMAT, ROUNDED), values * shrink)
            x_k, scale_k, x_v, scale_v = next_k, next_scale_k, next_v, next_scale_v
    return top, total, values


@triton.jit
def owner(start_ptr, tile, requests, TOKENS: tl.constexpr):
    """Request of a tile of TOKENS tokens, the first of which is at start[r] // TOKENS + r; at least as many as it has begin there."""
    found = -1
    for first in range(0, requests, 64):
        r = first + tl.arange(0, 64)
        begin = tl.load(start_ptr + r, mask=r < requests, other=0) // TOKENS + r
        found += tl.sum(((begin <= tile) & (r < requests)).to(tl.int32), axis=0)
    return found


@triton.jit(do_not_specialize=["requests", "small"])
def prefill_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,
    values_ptr,
    table_ptr,  # int32 [R, table_stride] page ids, or [R] first tokens of contiguous keys
    start_ptr,  # int32 [R + 1], first query token of each request
    position_ptr,  # int32 [T], -1 for padding
    out_ptr,  # [T, G * HEADS, 128]
    lse_ptr,  # fp32 [T, G * HEADS]: log2 of the softmax's sum, of scores in powers of two
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,  # softmax scale * log2(e) * unit of K
    requests,
    small,  # requests of at most so many tokens are not for this kernel
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
    PAGED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """TOKENS query tokens of a request and a KV group a program: 16 rows a token."""
    N: tl.constexpr = TOKENS * 16
    group = tl.program_id(0) % G
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G  # late queries, which see most, first
    request = owner(start_ptr, tile, requests, TOKENS)
    first, end = tl.load(start_ptr + request), tl.load(start_ptr + request + 1)
    token = first + (tile - (first // TOKENS + request)) * TOKENS + tl.arange(0, N) // 16
    if (end - first > small) & (tl.min(token, axis=0) < end):
        head = tl.arange(0, N) % 16
        position = tl.load(position_ptr + token, mask=token < end, other=-1)
        inside = (token < end) & (head < HEADS)
        row = (token.to(tl.int64) * G + group) * HEADS + head
        query = tl.load(query_ptr + row[:, None] * 128 + _dim(FORMAT)[None, :], mask=inside[:, None], other=0.0).to(OPERAND)
        newest = tl.max(position, axis=0) + 1
        oldest = tl.minimum(tl.min(tl.where(position >= 0, position, 0x7FFFFFFF), axis=0), newest - 1) + 1
        first_key = 0
        if PAGED:
            table_ptr += request.to(tl.int64) * table_stride
        else:
            first_key = tl.load(table_ptr + request)
        keys_ptr += group.to(tl.int64) * head_stride
        values_ptr += group.to(tl.int64) * head_stride
        ones = tl.full([KEYS, 16], 1.0 / unit(FORMAT), OPERAND)
        top = tl.full([N], float("-inf"), tl.float32)
        total = tl.zeros([N], tl.float32)
        values = tl.zeros([N, 128], tl.float32)
        for begin in tl.range(0, oldest // CHUNK * CHUNK, CHUNK):
            a, b, c = _chunk(
                query, position, keys_ptr, values_ptr, table_ptr, first_key, begin, begin + CHUNK, page_stride, token_stride, factor, ones,
                N, KEYS, CHUNK, FORMAT, ROUNDED, PAGED, False, False, STAGES,
            )  # fmt: skip
            top, total, values = _merge(top, total, values, a, tl.max(b, axis=1), c)
        for begin in tl.range(oldest // CHUNK * CHUNK, newest, CHUNK):
            a, b, c = _chunk(
                query, position, keys_ptr, values_ptr, table_ptr, first_key, begin, newest, page_stride, token_stride, factor, ones,
                N, KEYS, CHUNK, FORMAT, ROUNDED, PAGED, False, True, STAGES,
            )  # fmt: skip
            top, total, values = _merge(top, total, values, a, tl.max(b, axis=1), c)
        real = position >= 0  # padding saw the chunks that are whole for the others
        total, values = tl.where(real, total, 0.0), tl.where(real[:, None], values, 0.0)
        _finish(out_ptr, lse_ptr, row, inside, top, total, values, _dim(FORMAT), N, LSE)


@triton.jit
def _finish(out_ptr, lse_ptr, row, inside, top, total, values, dim, N: tl.constexpr, LSE: tl.constexpr):
    """Divide and store. Rows that saw no key get zeros."""
    inverse = tl.math.div_rn(tl.full([N], 1.0, tl.float32), tl.where(total > 0, total, 1.0))
    at = out_ptr + row[:, None] * 128 + dim[None, :]
    tl.store(at, (values * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
    if LSE:
        tl.store(lse_ptr + row, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=inside)


@triton.jit(do_not_specialize=["first_request"])
def split_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,
    values_ptr,
    table_ptr,  # int32 [R, table_stride]
    start_ptr,  # int32 [R + 1]
    position_ptr,  # int32 [T]
    part_ptr,  # fp32 [requests of this launch, chunks, G, N, 128]: weighted values
    top_ptr,  # fp32 [requests of this launch, chunks, G, N]
    total_ptr,  # fp32, the same
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,
    first_request,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A chunk, a KV group and a request of at most TOKENS query tokens a program."""
    N: tl.constexpr = TOKENS * 16
    chunk, group = tl.program_id(0), tl.program_id(1)
    request = first_request + tl.program_id(2)
    first, end = tl.load(start_ptr + request), tl.load(start_ptr + request + 1)
    token, head = first + tl.arange(0, N) // 16, tl.arange(0, N) % 16
    position = tl.load(position_ptr + token, mask=token < end, other=-1)
    newest = tl.max(position, axis=0) + 1
    if (end - first <= TOKENS) & (chunk * CHUNK < newest):
        inside = (token < end) & (head < HEADS)
        row = (token.to(tl.int64) * G + group) * HEADS + head
        query = tl.load(query_ptr + row[:, None] * 128 + _dim(FORMAT)[None, :], mask=inside[:, None], other=0.0).to(OPERAND)
        table_ptr += request.to(tl.int64) * table_stride
        keys_ptr += group.to(tl.int64) * head_stride
        values_ptr += group.to(tl.int64) * head_stride
        ones = tl.full([64, KEYS], 1.0 / unit(FORMAT), OPERAND)
        top, total, values = _chunk(
            tl.trans(query), position, keys_ptr, values_ptr, table_ptr, 0, chunk * CHUNK, newest, page_stride, token_stride, factor, ones,
            N, KEYS, CHUNK, FORMAT, ROUNDED, True, True, True, STAGES,
        )  # fmt: skip
        part = ((tl.program_id(2) * tl.num_programs(0) + chunk) * G + group).to(tl.int64) * N + tl.arange(0, N)
        tl.store(top_ptr + part, top)
        tl.store(total_ptr + part, tl.max(total, axis=0))
        tl.store(part_ptr + part[None, :] * 128 + _dim(FORMAT)[:, None], values)


@triton.jit(do_not_specialize=["first_request", "count", "requests", "tokens"])
def merge_kernel(
    part_ptr,
    top_ptr,
    total_ptr,
    start_ptr,
    position_ptr,
    out_ptr,
    first_request,
    count,  # requests of this launch
    requests,
    tokens,
    chunks,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS heads of a query token and KV group a program: merge its chunks. Zeros for padding, also for what is behind all requests."""
    slot, item, group = tl.program_id(0) // TOKENS, tl.program_id(0) % TOKENS, tl.program_id(1)
    head, dim = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, 128)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, 128], tl.float32)
    if slot == count:
        for token in range(tl.load(start_ptr + requests) + item, tokens, TOKENS):
            row = (token * G + group) * HEADS + head
            _finish(out_ptr, out_ptr, row.to(tl.int64), head < HEADS, top, total, values, dim, ROWS, False)
    else:
        first, end = tl.load(start_ptr + first_request + slot), tl.load(start_ptr + first_request + slot + 1)
        token = first + item
        if (token < end) & (end - first <= TOKENS):
            position = tl.load(position_ptr + token)
            part = (slot * chunks * G + group).to(tl.int64) * (TOKENS * 16) + item * 16 + head
            for chunk in tl.range(0, (position + CHUNK) // CHUNK, num_stages=4):
                at = part + chunk * (G * TOKENS * 16)
                a, b = tl.load(top_ptr + at), tl.load(total_ptr + at)
                c = tl.load(part_ptr + at[:, None] * 128 + dim[None, :])
                top, total, values = _merge(top, total, values, a, b, c)
            row = (token.to(tl.int64) * G + group) * HEADS + head
            _finish(out_ptr, out_ptr, row, head < HEADS, top, total, values, dim, ROWS, False)
