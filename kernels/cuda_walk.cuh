// The blocks that a tile of queries chose, and the ring of shared memory that they go through: see `cuda_prefill.cu`.
#pragma once
#ifdef SAMEBITS_HOST
#include "cuda_shim.h"
#else
#include "cuda_sm90.cuh"
#endif
#include "cuda_msa.cuh"

namespace samebits {

constexpr int WARPS = 8, FILLERS = 4, THREADS = 32 * (WARPS + FILLERS);
constexpr int TOKENS = WARPS, POSITIONS = TOKENS * TOPK;  // of a tile; blocks of its walk, at most
constexpr u32 SET_OFF = 256, REGION = 16384 + SET_OFF, EVERY_OTHER = 8192 + SET_OFF, STAGE = 33 * 1024, TILE_BYTES = 32768;
constexpr int QUERY = 4096, KEPT_STATE = 768;  // bytes of a token's queries, and of its state
constexpr u32 ALL = 0xFFFFFFFFu;

static_assert(TOPK % GROUP == 0 && TOPK <= 16, "chosen blocks");

// Offsets in shared memory.
constexpr u32 AT_QUERY = STAGES * STAGE;
constexpr u32 AT_STATE = AT_QUERY + TOKENS * QUERY;     // float [TOKENS][6][32]: results of groups of blocks, but for values
constexpr u32 AT_MASK = AT_STATE + TOKENS * KEPT_STATE; // u32 [POSITIONS]: tokens that chose the block
constexpr u32 AT_BLOCK = AT_MASK + 4 * POSITIONS;       // int [POSITIONS]
constexpr u32 AT_WHERE = AT_BLOCK + 4 * POSITIONS;      // int [POSITIONS]: page, or first key
constexpr u32 AT_CHOSEN = AT_WHERE + 4 * POSITIONS;     // int [TOKENS][TOPK]
constexpr u32 AT_FULL = AT_CHOSEN + 4 * POSITIONS;      // mbarrier [POSITIONS][2]
constexpr u32 AT_EMPTY = AT_FULL + 16 * POSITIONS;      // mbarrier [STAGES]
constexpr u32 AT_REQUEST = AT_EMPTY + 8 * 8;            // int [32]
constexpr u32 AT_POSITION = AT_REQUEST + 128;           // int [32]
constexpr u32 AT_TOTAL = AT_POSITION + 128;             // int [32]: what there is of blocks
constexpr u32 AT_BITS = AT_TOTAL + 128;                 // u32 [words] bits of blocks, then u32 [words] blocks before them
static_assert(STAGES <= 8, "barriers");

struct Batch {
    const int* table;     // [R, table_stride] page ids, or [R] first tokens
    const int* request;   // [tokens]
    const int* position;  // [tokens], -1 for padding
    const int* chosen;    // [tokens, G, TOPK]
    int table_stride;
    int tokens;
    int words;  // of bits of blocks: no request has more than 32 times as many
};

// Blocks that a tile's tokens chose, request after request and ascending: `mask`, `block`, `where`; and barriers. By all threads.
// Returns how many there are.
DEVICE int lay_out(u8* memory, const Batch& batch, int first_token, int head, int thread) {
    u32* mask = (u32*)(memory + AT_MASK);
    int* block = (int*)(memory + AT_BLOCK);
    int* where = (int*)(memory + AT_WHERE);
    int* chosen = (int*)(memory + AT_CHOSEN);
    int* request = (int*)(memory + AT_REQUEST);
    int* position = (int*)(memory + AT_POSITION);
    u32* total = (u32*)(memory + AT_TOTAL);
    u32* bits = (u32*)(memory + AT_BITS);
    u32* before = bits + batch.words;
    for (int i = thread; i < POSITIONS; i += THREADS) {
        int token = first_token + i / TOPK;
        int b = token < batch.tokens ? batch.chosen[((u64)token * G + head) * TOPK + i % TOPK] : -1;
        chosen[i] = b < batch.words * 32 ? b : -1;
        mask[i] = 0;
        barrier_init(shared_address(memory + AT_FULL) + 16 * i, 1);
        barrier_init(shared_address(memory + AT_FULL) + 16 * i + 8, 1);
    }
    if (thread < STAGES) barrier_init(shared_address(memory + AT_EMPTY) + 8 * thread, WARPS);
    if (thread < TOKENS) {
        int token = first_token + thread;
        request[thread] = token < batch.tokens ? batch.request[token] : -1;
        position[thread] = token < batch.tokens ? batch.position[token] : -1;
    }
    for (int i = thread; i < batch.words; i += THREADS) bits[i] = 0;
    barriers_made();
    block_sync();
    int base = 0;
    for (int first = 0; first < TOKENS;) {
        int r = request[first], end = first + 1;
        while (end < TOKENS && request[end] == r) end++;
        for (int i = first * TOPK + thread; i < end * TOPK; i += THREADS)
            if (chosen[i] >= 0) atomic_or(bits + (chosen[i] >> 5), 1u << (chosen[i] & 31));
        block_sync();
        if (thread < 32) {
            int each = (batch.words + 31) / 32, begin = thread * each;
            u32 sum = 0;
            for (int i = begin; i < begin + each; i++)
                if (i < batch.words) sum += bits_of(bits[i]);
            u32 upto = sum;
            for (int by = 1; by < 32; by *= 2) {
                u32 other = shuffle_up(upto, by);
                if (thread >= by) upto += other;
            }
            u32 count = upto - sum;
            for (int i = begin; i < begin + each; i++)
                if (i < batch.words) {
                    before[i] = count;
                    count += bits_of(bits[i]);
                }
            if (thread == 31) *total = upto;
        }
        block_sync();
        for (int i = first * TOPK + thread; i < end * TOPK; i += THREADS) {
            int b = chosen[i];
            if (b < 0) continue;
            int p = base + before[b >> 5] + bits_of(bits[b >> 5] & ((1u << (b & 31)) - 1));
            atomic_or(mask + p, 1u << (i / TOPK));
            block[p] = b;  // by all that chose it, the same
            where[p] = PAGED ? batch.table[(u64)r * batch.table_stride + b] : batch.table[r] + 128 * b;
        }
        base += *total;
        first = end;
        block_sync();
        if (first < TOKENS) {
            for (int i = thread; i < batch.words; i += THREADS) bits[i] = 0;
            block_sync();
        }
    }
    block_sync();
    return base;
}

// After a tile: nobody is in it any more.
DEVICE void leave(u8* memory, int thread) {
    block_sync();
    for (int i = thread; i < 2 * POSITIONS; i += THREADS) barrier_end(shared_address(memory + AT_FULL) + 8 * i);
    if (thread < STAGES) barrier_end(shared_address(memory + AT_EMPTY) + 8 * thread);
    block_sync();
}

// A stage is free, and those who take no part in tile `fill` (2 p for K of block p, 2 p + 1 for V) have left it already.
DEVICE void take_stage(u32 empty, int fill, u32 mask, bool one) {
    u32 at = empty + 8 * (fill % STAGES);
    if (fill >= STAGES) barrier_wait(at, (fill / STAGES - 1) & 1);
    u32 absent = WARPS - bits_of(mask);
    if (one && absent) barrier_arrive(at, absent);
}

DEVICE void release(u32 empty, int fill, int lane) {
    warp_sync();
    if (lane == 0) barrier_arrive(empty + 8 * (fill % STAGES), 1);
}

// Rows of K and V come by TMA. Boxes of 64 dimensions by 64 keys, or by 8 values, are shared out over warps and their lanes: a warp asks for
// one after the other.
DEVICE void fill_rows(u8* memory, const TensorMap* keys, const TensorMap* values, int count, int head, int filler, int lane) {
    u32 stages = shared_address(memory), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32* mask = (const u32*)(memory + AT_MASK);
    const int* where = (const int*)(memory + AT_WHERE);
    int box = filler + FILLERS * lane, half = box & 1, other = box >> 1;  // dimensions; keys
    for (int fill = 0; fill < 2 * count; fill++) {
        int p = fill >> 1, row = PAGED ? 0 : where[p], page = PAGED ? where[p] : 0;
        u32 at = stages + fill % STAGES * STAGE + half * REGION, barrier = full + 8 * fill;
        bool one = filler == 0 && lane == 0;
        take_stage(empty, fill, mask[p], one);
        if (one) barrier_expect(barrier, TILE_BYTES);
        if (fill & 1) {
            if (box < 32)
                load_box(at + (other & 1) * EVERY_OTHER + (other >> 1) * 1024, values, 64 * half, row + 8 * other, head, page, barrier);
        } else {
            if (box < 4) load_box(at + other * 64 * 128, keys, 64 * half, row + 64 * other, head, page, barrier);
        }
    }
}

// Places of 8 dimensions (chunk w of lane t's 32) of a key in a tile of K, and of V.
DEVICE u32 key_chunk(int key, int t, int w) { return (t >> 1) * REGION + key * 128 + ((((t & 1) * 4 + w) ^ ((key + 2 * (t >> 1)) & 7)) << 4); }
DEVICE u32 value_chunk(int key, int t, int w) {
    int half = t >> 1, other = (key >> 3) & 1;
    return half * REGION + other * EVERY_OTHER + ((key >> 4) * 8 + (key & 7)) * 128 + ((((t & 1) * 4 + w) ^ ((key + 2 * (half + other)) & 7)) << 4);
}

}  // namespace samebits
