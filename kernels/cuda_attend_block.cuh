// Results of single blocks, and of groups of blocks, for `cuda_attend.cu`: decoding, the two products, weights, joins.

#define MINUS_INFINITY bits_to_float(0xFF800000u)

// Bits 4 to 11 of E4M3 scales in both halves to bf16 values times 2^119.
INLINE u32 scale_values(u32 bits) { return mul_bf16x2(mul_bf16x2(bits, 0x7B807B80u), 0x7B007B00u); }

// bf16 values * 2^-7, read as E4M3: as values * 2^-7 again.
INLINE u32 rounded(u32 x) {
    u32 e = e4m3x2(product(bits_to_float(x << 16), 128.0f), product(bits_to_float(x & 0xFFFF0000u), 128.0f));
    e = prmt(e, 0, 0x1404); // the bytes as the high ones of halves
    return mul_bf16x2((e & 0x80008000u) | ((e >> 4) & 0x07F007F0u), 0x78007800u);
}

// Eight E2M1 codes under the scales of both halves: (code i, code i + 4) * 2^-7 each.
INLINE void decode(u32 x, u32 scales, u32 (&out)[4]) {
    const u32 places = 0x81C081C0u;
#if MIXED
    u32 low = x >> 6, signs = x & 0x80808080u;
    out[0] = times(x & 0x000F000Fu, 0x1040) & places;
    out[1] = either(times(x, 4), times(signs, 256), 0x01C001C0u);
    out[2] = times(low & 0x003C003Cu, 0x410) & places;
    out[3] = either(low, signs, 0x01C001C0u);
#else
    u32 high = x >> 8;
    out[0] = times(x & 0x000F000Fu, 0x1040) & places;
    out[1] = times(x & 0x00F000F0u, 0x104) & places;
    out[2] = times(high & 0x000F000Fu, 0x1040) & places;
    out[3] = times(high & 0x00F000F0u, 0x104) & places;
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = mul_bf16x2(out[i], scales);
        if (ROUNDED) out[i] = rounded(out[i]);
    }
}

// Scale bytes without signs, and 0 for NaN where values are read as E4M3.
INLINE u32 scale_bytes(u32 x) {
    x &= 0x7F7F7F7Fu;
    if (ROUNDED) x &= ~(times((x + 0x01010101u) >> 7 & 0x01010101u, 0xFF));
    return x;
}

INLINE float finite(float x) { return x == MINUS_INFINITY ? 0.0f : x; }

struct Shares {
    float top, own, other;
};

// Two sets of keys as one: the new maximum, and what the sums and values of both are multiplied by.
INLINE Shares shares_of(float top, float other_top) {
    Shares s;
    s.top = larger(top, other_top);
    s.own = exp2_flushed(difference(top, finite(s.top)));
    s.other = exp2_flushed(difference(other_top, finite(s.top)));
    return s;
}

INLINE float joined(const Shares& s, float own, float other) { return sum(product(own, s.own), product(other, s.other)); }

INLINE void join(const Shares& s, float4& own, const float4& other) {
    own.x = joined(s, own.x, other.x);
    own.y = joined(s, own.y, other.y);
    own.z = joined(s, own.z, other.z);
    own.w = joined(s, own.w, other.w);
}

// log2 of a positive number: Triton's, which is libdevice's.
INLINE float log2_of(float x) {
    bool small = x < bits_to_float(0x00800000u);
    if (small) x = product(x, bits_to_float(0x4B000000u));
    u32 bits = float_to_bits(x), exponent = (bits - 1060439283u) & 0xFF800000u;
    float e = fma_flushed((float)(int)exponent, bits_to_float(0x34000000u), small ? -23.0f : 0.0f);
    float f = sum(bits_to_float(bits - exponent), -1.0f);
    float p = fma_flushed(bits_to_float(0x3DC6B27Fu), f, bits_to_float(0xBE2C7F30u));
    p = fma_flushed(p, f, bits_to_float(0x3E2FCF2Au));
    p = fma_flushed(p, f, bits_to_float(0xBE374E43u));
    p = fma_flushed(p, f, bits_to_float(0x3E520BF4u));
    p = fma_flushed(p, f, bits_to_float(0xBE763C8Bu));
    p = fma_flushed(p, f, bits_to_float(0x3E93BF99u));
    p = fma_flushed(p, f, bits_to_float(0xBEB8AA49u));
    p = fma_flushed(p, f, bits_to_float(0x3EF6384Au));
    p = fma_flushed(p, f, bits_to_float(0xBF38AA3Bu));
    p = product(f, product(f, p));
    p = sum(e, fma_flushed(f, bits_to_float(0x3FB8AA3Bu), p));
    return bits < 0x7F800000u ? p : fma_flushed(x, bits_to_float(0x7F800000u), bits_to_float(0x7F800000u));
}

// Places of the last four blocks of 16, whose keys and values lie where the keys of other blocks were.
INLINE char* keys_of(char* shared, int i) { return shared + (i < SLOTS ? i : i - SLOTS) * 2 * PLANE; }
INLINE char* values_of(char* shared, int i) { return i < SLOTS ? shared + i * 2 * PLANE + PLANE : shared + (i - SLOTS + 4) * 2 * PLANE; }

// Whether block `i` has its values asked for after the keys of block `i` + 4, so that what comes last are values alone.
INLINE bool asked_late(int i, int count) { return UNIT > SLOTS && i >= SLOTS - GROUP && i + GROUP < count; }

// Whether a warp is of the group whose values are shared.
INLINE bool shares_values(int warp) { return QUARTERS && !WIDE && UNIT >= GROUP && warp >= UNIT - GROUP; }

// A result lies where the values were: [16 heads][32 pieces of 4 dimensions], 16 maxima, [16][8] sums. Pieces are shuffled among the eight
// of their 128 bytes, so that those who write and those who read use all banks.
INLINE int piece_at(int head, int piece) { return head * 512 + (piece >> 3) * 128 + ((piece & 7) ^ ((head & 1) * 4 + (piece >> 3))) * 16; }
INLINE int top_at(int head) { return CODES + 4 * head; }
INLINE int sum_at(int head, int i) { return CODES + 64 + 4 * (SUMS * head + i); }

// Scores of N n-tiles, from n-tile N * part on: `s[n-tile]` as the MMA leaves them.
template <int N>
INLINE void multiply_keys(const char* keys, const char* query, int part, int lane, float (&s)[N][4]) {
    const int together = TILES < N ? TILES : N;
    int g = lane >> 2, t = lane & 3, key_of_lane = part * N * 8 + (g >> 1) * 4 + (g & 1);
    const char* codes_at = keys + key_of_lane * 64 + t * 16;
    const char* scales_at = keys + CODES + key_of_lane * 8 + t * 2;
#pragma unroll
    for (int tile = 0; tile < N; tile++) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.0f;
#pragma unroll
    for (int first = 0; first < N; first += together) {
        uint4 codes[together];
        u32 scales[together][2];
#pragma unroll
        for (int j = 0; j < together; j++) {
            int key = (first + j) / 2 * 16 + (first + j) % 2 * 2; // of the lane's first column
            codes[j] = *(const uint4*)(codes_at + key * 64);
            u32 raw = scale_bytes(*(const u16*)(scales_at + key * 8));
            raw = scale_values(times(raw, 0x1010) & 0x07F007F0u);
            scales[j][0] = prmt(raw, raw, 0x1010);
            scales[j][1] = prmt(raw, raw, 0x3232);
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint4 even = *(const uint4*)(query + (w * 64 + lane) * 16), odd = *(const uint4*)(query + (w * 64 + 32 + lane) * 16);
#pragma unroll
            for (int j = 0; j < together; j++) {
                u32 b[4];
                decode(w == 0 ? codes[j].x : w == 1 ? codes[j].y : w == 2 ? codes[j].z : codes[j].w, scales[j][w / 2], b);
                mma(s[first + j], even, b[0], b[1]);
                mma(s[first + j], odd, b[2], b[3]);
            }
        }
    }
}

// Scores of keys that the query does not see.
template <int N>
INLINE void mask(float (&s)[N][4], int part, int lane, int limit) {
    int key_of_lane = part * N * 8 + (lane & 3) * 4;
    if (limit < PAGE) {
#pragma unroll
        for (int tile = 0; tile < N; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (key_of_lane + tile / 2 * 16 + tile % 2 * 2 + i % 2 >= limit) s[tile][i] = MINUS_INFINITY;
    }
}

// Weighted values of a block; column c of n-tile n is dimension 16 c + n.
INLINE void multiply_values(const char* values, const uint4 (&weights)[8], int lane, float (&o)[16][4]) {
    int g = lane >> 2, t = lane & 3;
    // Of two neighbouring keys, lanes with an odd t read the other one first: they lie in the other half of the banks.
    const char* first_at = values + t * 256 + (t & 1) * 64 + g * 8;
    const char* second_at = values + t * 256 + (1 - (t & 1)) * 64 + g * 8;
    const char* scales_at = values + CODES + t * 32 + g * 4;
    u32 low = t & 1 ? 0x1054 : 0x5410, high = t & 1 ? 0x3276 : 0x7632;
#pragma unroll
    for (int n = 0; n < 16; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const uint2 a = *(const uint2*)(first_at + step * 1024), b = *(const uint2*)(second_at + step * 1024);
        const uint2 c = *(const uint2*)(first_at + step * 1024 + 128), d = *(const uint2*)(second_at + step * 1024 + 128);
        u32 raw = scale_bytes(*(const u32*)(scales_at + step * 128));
        u32 ab = scale_values(times(prmt(raw, 0, 0x4140), 16)), cd = scale_values(times(prmt(raw, 0, 0x4342), 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 x[4], y[4], selector = j % 2 ? high : low;
            decode(prmt(j < 2 ? a.x : a.y, j < 2 ? b.x : b.y, selector), ab, x);
            decode(prmt(j < 2 ? c.x : c.y, j < 2 ? d.x : d.y, selector), cd, y);
#pragma unroll
            for (int i = 0; i < 4; i++) mma(o[4 * j + i], weights[step], x[i], y[i]);
        }
    }
}

// Sums of the 32 keys of each quarter of a block.
INLINE float sum_of_parts(const float (&x)[4]) { return sum(sum(x[0], x[1]), sum(x[2], x[3])); }
INLINE float sum_of_parts(const float (&x)[1]) { return x[0]; }

struct State {
    float top[2], even[2], odd[2]; // of heads g and g + 8: maximum; sums 't' and '4 + t'
};

// The largest scores of heads g and g + 8.
template <int N>
INLINE void maxima(const float (&s)[N][4], float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = larger(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int tile = 1; tile < N; tile++) top[half] = larger(top[half], larger(s[tile][2 * half], s[tile][2 * half + 1]));
        top[half] = larger(top[half], exchanged(top[half], 2));
        top[half] = larger(top[half], exchanged(top[half], 1));
    }
}

// Scores to weights as the second product wants them, and their sums; `top`: of all the block's scores.
template <int N>
INLINE State weigh(const float (&s)[N][4], const float (&top)[2], float factor, uint4 (&weights)[N / 2]) {
    State state;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state.top[half] = product(top[half], factor);
        float origin = -finite(state.top[half]), pairs[N], quarter[2][N / 4];
#pragma unroll
        for (int tile = 0; tile < N; tile++) {
            float x = exp2_flushed(fused(s[tile][2 * half], factor, origin));
            float y = exp2_flushed(fused(s[tile][2 * half + 1], factor, origin));
            pairs[tile] = sum(x, y);
            u32 both = mul_bf16x2(bf16x2(x, y), 0x43004300u); // times 2^7, which the values lack
            if (tile % 2 == 0 && half == 0) weights[tile / 2].x = both;
            if (tile % 2 == 0 && half == 1) weights[tile / 2].y = both;
            if (tile % 2 == 1 && half == 0) weights[tile / 2].z = both;
            if (tile % 2 == 1 && half == 1) weights[tile / 2].w = both;
        }
#pragma unroll
        for (int i = 0; i < N / 4; i++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) quarter[odd][i] = sum(pairs[4 * i + odd], pairs[4 * i + 2 + odd]);
        state.even[half] = sum_of_parts(quarter[0]);
        state.odd[half] = sum_of_parts(quarter[1]);
    }
    return state;
}

INLINE void store_state(char* result, int lane, const State& state) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = g + 8 * half;
        if (t == 0) *(float*)(result + top_at(head)) = state.top[half];
        *(float*)(result + sum_at(head, t)) = state.even[half];
        *(float*)(result + sum_at(head, 4 + t)) = state.odd[half];
    }
}

INLINE void store_result(char* result, int lane, const State& state, const float (&o)[16][4]) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float4 piece = make_float4(o[4 * m][i], o[4 * m + 1][i], o[4 * m + 2][i], o[4 * m + 3][i]);
            *(float4*)(result + piece_at(g + i / 2 * 8, 8 * t + i % 2 * 4 + m)) = piece;
        }
    store_state(result, lane, state);
}

// Results of a group's blocks `first` to `end` - 1 as one, in the place of the first: four heads by a warp.
INLINE void join_group(char* shared, int first, int end, int warp, int lane) {
    int head = warp % 4 * 4 + lane / 8, part = lane % 8;
    float top = MINUS_INFINITY, sums = 0.0f;
    float4 values[4];
#pragma unroll
    for (int k = 0; k < 4; k++) values[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = first; i < end; i++) {
        const char* result = values_of(shared, i);
        const Shares s = shares_of(top, *(const float*)(result + top_at(head)));
        top = s.top;
        sums = joined(s, sums, *(const float*)(result + sum_at(head, part)));
#pragma unroll
        for (int k = 0; k < 4; k++) join(s, values[k], *(const float4*)(result + piece_at(head, 8 * k + part)));
    }
    warp_sync();
    char* result = values_of(shared, first);
#pragma unroll
    for (int k = 0; k < 4; k++) *(float4*)(result + piece_at(head, 8 * k + part)) = values[k];
    if (part == 0) *(float*)(result + top_at(head)) = top;
    *(float*)(result + sum_at(head, part)) = sums;
}

// Weights and state in the place of the keys, for other warps.
INLINE void store_weights(char* to, int lane, const State& state, const uint4 (&weights)[8]) {
#pragma unroll
    for (int step = 0; step < 8; step++) *(uint4*)(to + (step * 32 + lane) * 16) = weights[step];
    store_state(to, lane, state);
}

// A quarter of the weighted values of a block: column c of n-tile n is dimension 32 quarter + 4 c + n.
INLINE void multiply_quarter(const char* values, const char* weights, int quarter, int lane, float (&o)[4][4]) {
    int g = lane >> 2, t = lane & 3;
    const char* first_at = values + t * 256 + (t & 1) * 64 + quarter * 16 + g * 2; // as in `multiply_values`
    const char* second_at = values + t * 256 + (1 - (t & 1)) * 64 + quarter * 16 + g * 2;
    const char* scales_at = values + CODES + t * 32 + (quarter * 2 + g / 4) * 4;
    u32 selector = t & 1 ? 0x1054 : 0x5410;
#pragma unroll
    for (int n = 0; n < 4; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const uint4 weight = *(const uint4*)(weights + (step * 32 + lane) * 16);
        u32 a = *(const u16*)(first_at + step * 1024), b = *(const u16*)(second_at + step * 1024);
        u32 c = *(const u16*)(first_at + step * 1024 + 128), d = *(const u16*)(second_at + step * 1024 + 128);
        u32 raw = scale_bytes(*(const u32*)(scales_at + step * 128));
        u32 x[4], y[4];
        decode(prmt(a, b, selector), scale_values(times(prmt(raw, 0, 0x4140), 16)), x);
        decode(prmt(c, d, selector), scale_values(times(prmt(raw, 0, 0x4342), 16)), y);
#pragma unroll
        for (int n = 0; n < 4; n++) mma(o[n], weight, x[n], y[n]);
    }
}

INLINE void store_quarter(char* result, int quarter, int lane, const float (&o)[4][4]) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 piece = make_float4(o[0][i], o[1][i], o[2][i], o[3][i]);
        *(float4*)(result + piece_at(g + i / 2 * 8, 8 * quarter + 2 * t + i % 2)) = piece;
    }
}

INLINE void group_sync(int group) {
    if (UNIT <= GROUP)
        block_sync();
    else
        named_sync(9 + group / GROUP, 32 * GROUP);
}

// `join_group` of weights whose values were not multiplied yet: a quarter of the dimensions by a warp.
INLINE void join_quarter(char* shared, u64* opened, int first, int end, int warp, int lane) {
    int g = lane >> 2, t = lane & 3, quarter = warp % 4;
    State all;
    float values[4][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        all.top[half] = MINUS_INFINITY;
        all.even[half] = all.odd[half] = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) values[n][2 * half] = values[n][2 * half + 1] = 0.0f;
    }
    for (int i = first; i < end; i++) {
        const char* weights = keys_of(shared, i);
        float o[4][4];
        wait_for(opened + i);
        multiply_quarter(values_of(shared, i), weights, quarter, lane, o);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int head = g + 8 * half;
            const Shares s = shares_of(all.top[half], *(const float*)(weights + top_at(head)));
            all.top[half] = s.top;
            all.even[half] = joined(s, all.even[half], *(const float*)(weights + sum_at(head, t)));
            all.odd[half] = joined(s, all.odd[half], *(const float*)(weights + sum_at(head, 4 + t)));
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    float& value = values[n][2 * half + column];
                    value = joined(s, value, o[n][2 * half + column]);
                }
        }
    }
    group_sync(first); // all have read the values in whose place the result goes
    char* result = values_of(shared, first);
    store_quarter(result, quarter, lane, values);
    if (quarter == 0) store_state(result, lane, all);
}

// The result of a block by four warps, each of which makes the scores of 32 keys, then a quarter of the dimensions.
INLINE void block_of_four(char* shared, u64* barriers, int i, int quarter, int lane, int limit, float factor) {
    int g = lane >> 2, t = lane & 3;
    char *keys = keys_of(shared, i), *values = values_of(shared, i);
    float* largest = (float*)(shared + MAXIMA) + i * 4 * ROWS;
    float s[4][4], top[2], o[4][4];
    uint4 weights[2];
    wait_for(barriers + i);
    multiply_keys(keys, shared + QUERY, quarter, lane, s);
    mask(s, quarter, lane, limit);
    maxima(s, top);
    if (t == 0) largest[quarter * ROWS + g] = top[0];
    if (t == 0) largest[quarter * ROWS + g + 8] = top[1];
    named_sync(1 + i, 128); // and nobody reads keys any more
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float* each = largest + g + 8 * half;
        top[half] = larger(larger(each[0], each[ROWS]), larger(each[2 * ROWS], each[3 * ROWS]));
    }
    State state = weigh(s, top, factor, weights);
    // In the place of the keys: weights of all, and sums of each quarter.
    float* sums = (float*)(keys + 4096);
#pragma unroll
    for (int step = 0; step < 2; step++) *(uint4*)(keys + ((2 * quarter + step) * 32 + lane) * 16) = weights[step];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sums[(quarter * ROWS + g + 8 * half) * SUMS + t] = state.even[half];
        sums[(quarter * ROWS + g + 8 * half) * SUMS + 4 + t] = state.odd[half];
    }
    named_sync(1 + i, 128);
    wait_for(barriers + UNIT + i);
    multiply_quarter(values, keys, quarter, lane, o);
    named_sync(1 + i, 128); // nobody reads values any more
    store_quarter(values, quarter, lane, o);
    if (quarter == 0) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float even[4], odd[4];
#pragma unroll
            for (int part = 0; part < 4; part++) {
                even[part] = sums[(part * ROWS + g + 8 * half) * SUMS + t];
                odd[part] = sums[(part * ROWS + g + 8 * half) * SUMS + 4 + t];
            }
            state.even[half] = sum_of_parts(even);
            state.odd[half] = sum_of_parts(odd);
        }
        store_state(values, lane, state);
    }
}
