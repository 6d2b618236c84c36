// Results of single blocks, and of groups of blocks, for `cuda_attend.cu`: the two products, weights, joins.
#pragma once
#include "cuda_msa.cuh"

namespace samebits {

// Scale bytes without signs, and 0 for NaN where values are read as E4M3.
DEVICE u32 scale_bytes(u32 x) {
    x &= 0x7F7F7F7Fu;
    if (ROUNDED) x &= ~(times((x + 0x01010101u) >> 7 & 0x01010101u, 0xFF));
    return x;
}

DEVICE void join(const Shares& s, float4& own, const float4& other) {
    own.x = joined(s, own.x, other.x);
    own.y = joined(s, own.y, other.y);
    own.z = joined(s, own.z, other.z);
    own.w = joined(s, own.w, other.w);
}

// Places of the last four blocks of 16, whose keys and values lie where the keys of other blocks were.
DEVICE char* keys_of(char* shared, int i) { return shared + (i < SLOTS ? i : i - SLOTS) * 2 * PLANE; }
DEVICE char* values_of(char* shared, int i) { return i < SLOTS ? shared + i * 2 * PLANE + PLANE : shared + (i - SLOTS + 4) * 2 * PLANE; }

// Whether block `i` has its values asked for after the keys of block `i` + 4, so that what comes last are values alone.
DEVICE bool asked_late(int i, int count) { return UNIT > SLOTS && i >= SLOTS - GROUP && i + GROUP < count; }

// Whether a warp is of the group whose values are shared.
DEVICE bool shares_values(int warp) { return QUARTERS && !WIDE && UNIT >= GROUP && warp >= UNIT - GROUP; }

// A result lies where the values were: [16 heads][32 pieces of 4 dimensions], 16 maxima, [16][8] sums. Pieces are shuffled among the eight
// of their 128 bytes, so that those who write and those who read use all banks.
DEVICE int piece_at(int head, int piece) { return head * 512 + (piece >> 3) * 128 + ((piece & 7) ^ ((head & 1) * 4 + (piece >> 3))) * 16; }
DEVICE int top_at(int head) { return CODES + 4 * head; }
DEVICE int sum_at(int head, int i) { return CODES + 64 + 4 * (SUMS * head + i); }

// Scores of N n-tiles, from n-tile N * part on: `s[n-tile]` as the MMA leaves them.
template <int N>
DEVICE void multiply_keys(const char* keys, const char* query, int part, int lane, float (&s)[N][4]) {
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
            scales[j][0] = permute(raw, raw, 0x1010);
            scales[j][1] = permute(raw, raw, 0x3232);
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint4 even = *(const uint4*)(query + (w * 64 + lane) * 16), odd = *(const uint4*)(query + (w * 64 + 32 + lane) * 16);
#pragma unroll
            for (int j = 0; j < together; j++) {
                u32 b[4];
                decode_e2m1<MIXED>(b, w == 0 ? codes[j].x : w == 1 ? codes[j].y : w == 2 ? codes[j].z : codes[j].w, scales[j][w / 2]);
                mma(s[first + j], even, b[0], b[1]);
                mma(s[first + j], odd, b[2], b[3]);
            }
        }
    }
}

// Scores of keys that the query does not see.
template <int N>
DEVICE void mask(float (&s)[N][4], int part, int lane, int limit) {
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
DEVICE void multiply_values(const char* values, const uint4 (&weights)[8], int lane, float (&o)[16][4]) {
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
        u32 ab = scale_values(times(permute(raw, 0, 0x4140), 16)), cd = scale_values(times(permute(raw, 0, 0x4342), 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 x[4], y[4], selector = j % 2 ? high : low;
            decode_e2m1<MIXED>(x, permute(j < 2 ? a.x : a.y, j < 2 ? b.x : b.y, selector), ab);
            decode_e2m1<MIXED>(y, permute(j < 2 ? c.x : c.y, j < 2 ? d.x : d.y, selector), cd);
#pragma unroll
            for (int i = 0; i < 4; i++) mma(o[4 * j + i], weights[step], x[i], y[i]);
        }
    }
}

// Sums of the 32 keys of each quarter of a block.
DEVICE float sum_of_parts(const float (&x)[4]) { return sum_of_four(x[0], x[1], x[2], x[3]); }
DEVICE float sum_of_parts(const float (&x)[1]) { return x[0]; }

struct State {
    float top[2], even[2], odd[2]; // of heads g and g + 8: maximum; sums 't' and '4 + t'
};

// The largest scores of heads g and g + 8.
template <int N>
DEVICE void maxima(const float (&s)[N][4], float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = larger(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
        for (int tile = 1; tile < N; tile++) top[half] = larger(top[half], larger(s[tile][2 * half], s[tile][2 * half + 1]));
        top[half] = larger(top[half], shuffle_xor(top[half], 2));
        top[half] = larger(top[half], shuffle_xor(top[half], 1));
    }
}

// Scores to weights as the second product wants them, and their sums; `top`: of all the block's scores.
template <int N>
DEVICE State weigh(const float (&s)[N][4], const float (&top)[2], float factor, uint4 (&weights)[N / 2]) {
    State state;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state.top[half] = mul(top[half], factor);
        float origin = -finite(state.top[half]), pairs[N], quarter[2][N / 4];
#pragma unroll
        for (int tile = 0; tile < N; tile++) {
            float x = weight(s[tile][2 * half], factor, origin);
            float y = weight(s[tile][2 * half + 1], factor, origin);
            pairs[tile] = add(x, y);
            u32 both = times_128(pack_bf16(x, y));
            if (tile % 2 == 0 && half == 0) weights[tile / 2].x = both;
            if (tile % 2 == 0 && half == 1) weights[tile / 2].y = both;
            if (tile % 2 == 1 && half == 0) weights[tile / 2].z = both;
            if (tile % 2 == 1 && half == 1) weights[tile / 2].w = both;
        }
#pragma unroll
        for (int i = 0; i < N / 4; i++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) quarter[odd][i] = add(pairs[4 * i + odd], pairs[4 * i + 2 + odd]);
        state.even[half] = sum_of_parts(quarter[0]);
        state.odd[half] = sum_of_parts(quarter[1]);
    }
    return state;
}

DEVICE void store_state(char* result, int lane, const State& state) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = g + 8 * half;
        if (t == 0) *(float*)(result + top_at(head)) = state.top[half];
        *(float*)(result + sum_at(head, t)) = state.even[half];
        *(float*)(result + sum_at(head, 4 + t)) = state.odd[half];
    }
}

DEVICE void store_result(char* result, int lane, const State& state, const float (&o)[16][4]) {
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
DEVICE void join_group(char* shared, int first, int end, int warp, int lane) {
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
DEVICE void store_weights(char* to, int lane, const State& state, const uint4 (&weights)[8]) {
#pragma unroll
    for (int step = 0; step < 8; step++) *(uint4*)(to + (step * 32 + lane) * 16) = weights[step];
    store_state(to, lane, state);
}

// A quarter of the weighted values of a block: column c of n-tile n is dimension 32 quarter + 4 c + n.
DEVICE void multiply_quarter(const char* values, const char* weights, int quarter, int lane, float (&o)[4][4]) {
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
        decode_e2m1<MIXED>(x, permute(a, b, selector), scale_values(times(permute(raw, 0, 0x4140), 16)));
        decode_e2m1<MIXED>(y, permute(c, d, selector), scale_values(times(permute(raw, 0, 0x4342), 16)));
#pragma unroll
        for (int n = 0; n < 4; n++) mma(o[n], weight, x[n], y[n]);
    }
}

DEVICE void store_quarter(char* result, int quarter, int lane, const float (&o)[4][4]) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 piece = make_float4(o[0][i], o[1][i], o[2][i], o[3][i]);
        *(float4*)(result + piece_at(g + i / 2 * 8, 8 * quarter + 2 * t + i % 2)) = piece;
    }
}

DEVICE void group_sync(int group) {
    if (UNIT <= GROUP)
        block_sync();
    else
        named_sync(9 + group / GROUP, 32 * GROUP);
}

// `join_group` of weights whose values were not multiplied yet: a quarter of the dimensions by a warp.
DEVICE void join_quarter(char* shared, u64* opened, int first, int end, int warp, int lane) {
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
DEVICE void block_of_four(char* shared, u64* barriers, int i, int quarter, int lane, int limit, float factor) {
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

}  // namespace samebits
