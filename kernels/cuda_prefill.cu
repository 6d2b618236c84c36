// MSA attention of many queries, forward, for Hopper (sm_90a): the bits of `triton_msa_attend.attend_kernel`.
//
// A tile is TOKENS neighbouring query tokens and one KV head. Its blocks are the union of what its tokens chose, walked in ascending
// order; each is brought to shared memory once, whatever the number of tokens that chose it. Eight warps own a token each and take part
// only in blocks that it chose; they may be as far apart as the ring of STAGES tiles (K or V of a block) allows. Four more warps fill the
// ring by TMA.
//
// Order of sums. Everything about a token happens in one warp, in the order of the Triton kernel: scores over k-steps 0 to 7 (labels of
// `triton_msa_tiles`, the same elements in the same register of the same lane), weighted values over steps of 16 keys, sums of weights for
// each pair of a lane's columns and then a tree over the eight 16-key steps, results of GROUP blocks joined, then those of such groups.
// The two warps of the Triton kernel, whose lanes hold SUMS = 8 sums of a row, are here the two 8-key halves of a 16-key step: a lane has two.
//
// Shared memory. K and V have rows of 64 dimensions (128 bytes), in two regions, with TMA's 128-byte swizzle: 16-byte chunk c of a row lies
// at c ^ (bits 7 to 9 of the row's address). Regions, and in V every other 8 keys, are set off by 256 bytes, so that what a quarter of a
// warp reads at a time lies in all 32 banks: for K the chunks of 2 keys by 4 lanes t, for V the keys {0, 1, 4, 5, 8, 9, 12, 13} of a step.
//
// Barriers. `full` has one mbarrier a tile of the walk, used once, so that a warp may pass over what it does not take part in.
// `empty` has one a stage; who fills it arrives for all warps that take no part.

#include "cuda_walk.cuh"

namespace samebits {

// Results of a set of keys, for the two rows (heads) of a lane. Values are apart: they fill the registers.
struct State {
    float top[2];
    float sums[2][2];  // row; which 8 of 16 keys
};

DEVICE void clear(State& x) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        x.top[row] = MINUS_INFINITY;
        x.sums[row][0] = x.sums[row][1] = 0.0f;
    }
}

// A lane's state in shared memory, where it does not take registers: words 128 bytes apart.
DEVICE State load_state(u32 at) {
    State x;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        x.top[row] = as_float(load_word(at + row * 128));
        x.sums[row][0] = as_float(load_word(at + (2 + 2 * row) * 128));
        x.sums[row][1] = as_float(load_word(at + (3 + 2 * row) * 128));
    }
    return x;
}

DEVICE void store_state(u32 at, const State& x) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        store_word(at + row * 128, as_bits(x.top[row]));
        store_word(at + (2 + 2 * row) * 128, as_bits(x.sums[row][0]));
        store_word(at + (3 + 2 * row) * 128, as_bits(x.sums[row][1]));
    }
}

// `_join` of all but the values: what these are multiplied by comes back.
DEVICE void join(State& x, const State& other, Shares (&shares)[2]) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        shares[row] = shares_of(x.top[row], other.top[row]);
        x.top[row] = shares[row].top;
#pragma unroll
        for (int i = 0; i < 2; i++) x.sums[row][i] = joined(shares[row], x.sums[row][i], other.sums[row][i]);
    }
}

// Scores of a block, s[n][..]: n-tile n has keys 16 (n / 2) + 4 t + 2 (n % 2) + {0, 1} in columns of lane t; [0..1] row g, [2..3] row g + 8.
DEVICE void score(float (&s)[16][4], u32 tile, u32 query, int lane) {
    int g = lane >> 2, t = lane & 3, key = 4 * (g >> 1) + (g & 1);
    u32 rows[2] = {tile + key_chunk(key, t, 0), tile + key_chunk(key + 2, t, 0)};
#pragma unroll
    for (int n = 0; n < 16; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 a[2][4];
        load_shared(a[0], query + (2 * w * 32 + lane) * 16);
        load_shared(a[1], query + ((2 * w + 1) * 32 + lane) * 16);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            u32 x[4];
            load_shared(x, (rows[n & 1] ^ (w << 4)) + (n >> 1) * 2048);
            mma(s[n], a[0], permute(x[0], x[2], 0x5410), permute(x[0], x[2], 0x7632));
            mma(s[n], a[1], permute(x[1], x[3], 0x5410), permute(x[1], x[3], 0x7632));
        }
    }
}

// Weights of a block as operands, w[n][row], and its state. Keys from `limit` on are not seen.
DEVICE void weigh(u32 (&weights)[16][2], State& block, float (&s)[16][4], float factor, int limit, int lane) {
    if (limit < 128) {
        int left = limit - 4 * (lane & 3);
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (16 * (n >> 1) + 2 * (n & 1) + (i & 1) >= left) s[n][i] = MINUS_INFINITY;
    }
    float origin[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float top = larger(s[0][2 * row], s[0][2 * row + 1]);
#pragma unroll
        for (int n = 1; n < 16; n++) top = larger(top, larger(s[n][2 * row], s[n][2 * row + 1]));
        top = larger(top, shuffle_xor(top, 2));
        top = larger(top, shuffle_xor(top, 1));
        block.top[row] = mul(top, factor);
        origin[row] = -finite(block.top[row]);
    }
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float pair[8];
#pragma unroll
            for (int step = 0; step < 8; step++) {
                int n = 2 * step + half;
                float a = weight(s[n][2 * row], factor, origin[row]);
                float b = weight(s[n][2 * row + 1], factor, origin[row]);
                pair[step] = add(a, b);
                weights[n][row] = pack_bf16(a, b);
            }
            block.sums[row][half] = add(sum_of_four(pair[0], pair[1], pair[2], pair[3]), sum_of_four(pair[4], pair[5], pair[6], pair[7]));
        }
}

// Weighted values of 64 dimensions of a block: n-tile n has dimensions 64 half + 8 n + ... MASKED: keys from `limit` on may be NaN.
template <bool MASKED>
DEVICE void weighted(float (&y)[8][4], const u32 (&weights)[16][2], u32 tile, int half, int limit, int lane) {
    int i = lane & 7, key = 4 * (i >> 1) + 2 * ((lane >> 3) & 1) + (i & 1);
    u32 rows = tile + value_chunk(key, 2 * half, 0) ^ (u32)((lane >> 4) << 4);
    int left = limit - 4 * (lane & 3);
#pragma unroll
    for (int n = 0; n < 8; n++) y[n][0] = y[n][1] = y[n][2] = y[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        u32 a[4] = {weights[2 * step][0], weights[2 * step][1], weights[2 * step + 1][0], weights[2 * step + 1][1]};
        u32 seen[2] = {ALL, ALL};
        if (MASKED) {
#pragma unroll
            for (int w = 0; w < 2; w++) {
                int first = 16 * step + 2 * w;
                seen[w] = (first < left ? 0xFFFFu : 0u) | (first + 1 < left ? 0xFFFF0000u : 0u);
            }
        }
#pragma unroll
        for (int two = 0; two < 4; two++) {
            u32 x[4];
            load_matrices(x, (rows ^ (two << 5)) + step * 1024);
            if (MASKED) {
#pragma unroll
                for (int w = 0; w < 4; w++) x[w] &= seen[w & 1];
            }
            mma(y[2 * two], a, x[0], x[1]);
            mma(y[2 * two + 1], a, x[2], x[3]);
        }
    }
}

struct Output {
    u16* out;    // [tokens, G * HEADS, 128]
    float* lse;  // [tokens, G * HEADS]
};

// `_finish`.
DEVICE void finish(const Output& output, const State& x, const float (&values)[16][4], u64 row, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float half[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            half[i] = add(x.sums[r][i], shuffle_xor(x.sums[r][i], 1));
            half[i] = add(half[i], shuffle_xor(half[i], 2));
        }
        float total = add(half[0], half[1]);
        float inverse = inverse_of(total);
        int head = g + 8 * r;
        if (head >= HEADS) continue;
        u16* out = output.out + (row * HEADS + head) * 128;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            u32 two = finished(values[n][2 * r], values[n][2 * r + 1], inverse);
            *(u32*)(out + 8 * n + 2 * t) = two;
        }
        if (LSE && t == 0) output.lse[row * HEADS + head] = log_of_sum(x.top[r], total);
    }
}

// The results of a group of blocks into those of all groups before it.
DEVICE void join_group(u32 state, float (&all_values)[16][4], State& group, float (&values)[16][4]) {
    Shares shares[2];
    State all = load_state(state);
    join(all, group, shares);
    store_state(state, all);
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            all_values[n][i] = joined(shares[i >> 1], all_values[n][i], values[n][i]);
            values[n][i] = 0.0f;
        }
    clear(group);
}

// A warp's queries of a tile, as operands of the 8 k-steps: [step][lane][4].
DEVICE void load_queries(u32 to, const u16* query, u64 row, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 x[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (g + 8 * r < HEADS)
                load_global(x[r], query + (row * HEADS + g + 8 * r) * 128 + 32 * t + 8 * w);
            else
                x[r][0] = x[r][1] = x[r][2] = x[r][3] = 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 a[4] = {permute(x[0][i], x[0][i + 2], 0x5410), permute(x[1][i], x[1][i + 2], 0x5410), permute(x[0][i], x[0][i + 2], 0x7632),
                        permute(x[1][i], x[1][i + 2], 0x7632)};
            store_shared(to + ((2 * w + i) * 32 + lane) * 16, a);
        }
    }
}

// A warp's token over a tile's walk.
DEVICE void attend(u8* memory, const Batch& batch, const Output& output, const u16* query, float factor, int count, int first_token, int head,
                   int warp, int lane) {
    u32 stages = shared_address(memory), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32* mask = (const u32*)(memory + AT_MASK);
    const int* block = (const int*)(memory + AT_BLOCK);
    const int* position = (const int*)(memory + AT_POSITION) + warp;
    u32 queries = stages + AT_QUERY + warp * QUERY;
    int token = first_token + warp, places = 0;
    u32 state = stages + AT_STATE + warp * KEPT_STATE + lane * 4;  // of all groups that are over
    State group;
    float values[16][4], all_values[16][4];
    clear(group);
    store_state(state, group);
#pragma unroll
    for (int n = 0; n < 64; n++) values[n / 4][n % 4] = all_values[n / 4][n % 4] = 0.0f;
    if (token < batch.tokens) load_queries(queries, query, (u64)token * G + head, lane);
    warp_sync();
    for (int base = 0; base < count; base += 32) {
        u32 mine = base + lane < count ? (mask[base + lane] >> warp) & 1 : 0;
        for (u32 some = ballot(mine != 0); some; some &= some - 1) {
            int p = base + first_bit(some);
            u32 keys = stages + 2 * p % STAGES * STAGE, value_tile = stages + (2 * p + 1) % STAGES * STAGE;
            barrier_wait(full + 16 * p, 0);
            int limit = *position + 1 - 128 * block[p];
            u32 weights[16][2];
            State found;
            {
                float s[16][4];
                score(s, keys, queries, lane);
                release(empty, 2 * p, lane);
                weigh(weights, found, s, factor, limit, lane);
            }
            Shares shares[2];
            join(group, found, shares);
            barrier_wait(full + 16 * p + 8, 0);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float y[8][4];
                if (limit < 128)
                    weighted<true>(y, weights, value_tile, half, limit, lane);
                else
                    weighted<false>(y, weights, value_tile, half, limit, lane);
#pragma unroll
                for (int n = 0; n < 32; n++) {
                    float& x = values[8 * half + n / 4][n % 4];
                    x = joined(shares[n % 4 >> 1], x, y[n / 4][n % 4]);
                }
            }
            release(empty, 2 * p + 1, lane);
            if (++places % GROUP == 0) join_group(state, all_values, group, values);
        }
    }
    if (token >= batch.tokens) return;
    // A group that is not whole; an empty one would change nothing but the sign of zeros, which `finish` does not see.
    if (places % GROUP) join_group(state, all_values, group, values);
    finish(output, load_state(state), all_values, (u64)token * G + head, lane);
}

KERNEL(THREADS) prefill_kernel(PARAM TensorMap keys_map, PARAM TensorMap values_map, const u16* query, const int* table, const int* request,
                               const int* position, const int* chosen, u16* out, float* lse, int table_stride, int tokens, int words,
                               float factor) {
    SHARED(memory);
    int thread = thread_index(), warp = thread >> 5, lane = thread & 31;
    Batch batch = {table, request, position, chosen, table_stride, tokens, words};
    Output output = {out, lse};
    int tiles = (tokens + TOKENS - 1) / TOKENS, first = block_index(), step = grid_size();
    // All tiles of one KV head, then of the next: what is read at a time stays in the L2 cache.
    if (warp < WARPS) {
        more_registers<240>();
        for (int tile = first; tile < tiles * G; tile += step) {
            int first_token = tile % tiles * TOKENS, head = tile / tiles;
            int count = lay_out(memory, batch, first_token, head, thread);
            attend(memory, batch, output, query, factor, count, first_token, head, warp, lane);
            leave(memory, thread);
        }
    } else {
        fewer_registers<24>();
        for (int tile = first; tile < tiles * G; tile += step) {
            int first_token = tile % tiles * TOKENS, head = tile / tiles;
            int count = lay_out(memory, batch, first_token, head, thread);
            fill_rows(memory, &keys_map, &values_map, count, head, warp - WARPS, lane);
            leave(memory, thread);
        }
    }
}

}  // namespace samebits
