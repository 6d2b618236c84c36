// The blocks that a tile of queries chose, and the ring of shared memory that they go through: see `cuda_prefill.cu`.
#pragma once
#ifdef SAMEBITS_HOST
#include "cuda_shim.h"
#else
#include "cuda_prefill_ptx.cuh"
#endif
#include "cuda_msa.cuh"

#define BF16 0
#define FP8 1
#define NVFP4 2

namespace samebits {

constexpr int WARPS = 8, FILLERS = 4, THREADS = 32 * (WARPS + FILLERS);
constexpr int OWN = WARPS * PER_WARP, TOKENS = OWN * CLUSTER;  // tokens of a block of threads, and of a cluster
constexpr int POSITIONS = TOKENS * TOPK;                       // blocks of a walk, at most
constexpr u32 SET_OFF = 256, REGION = 16384 + SET_OFF, EVERY_OTHER = 8192 + SET_OFF, STAGE = 33 * 1024, TILE_BYTES = 32768;
constexpr int QUERY = 4096, KEPT_STATE = 768;  // bytes of a token's queries, and of its state
constexpr int KEY_ROWS = CLUSTER > 2 ? 128 / CLUSTER : 64;  // of a box of K; of V it has 8
constexpr u32 SLOT = 9216, CODES = 8192;
constexpr u32 NOBODY = 0xFFFFFFFFu;

static_assert(TOKENS <= 32, "a cluster's tokens are bits of a word");
static_assert(TOPK % GROUP == 0 && TOPK <= 16, "chosen blocks");
static_assert(CLUSTER == 1 || FORMAT == BF16, "what is decoded is decoded for one block of threads");

// Offsets in shared memory.
constexpr u32 AT_QUERY = STAGES * STAGE;
constexpr u32 AT_STATE = AT_QUERY + OWN * QUERY;        // float [OWN][6][32]: results of groups of blocks, but for values
constexpr u32 AT_MASK = AT_STATE + OWN * KEPT_STATE;    // u32 [POSITIONS]: tokens of the cluster that chose the block
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
        barrier_init(shared_address(memory + AT_FULL) + 16 * i, FORMAT == BF16 ? 1 : FILLERS);
        barrier_init(shared_address(memory + AT_FULL) + 16 * i + 8, FORMAT == BF16 ? 1 : FILLERS);
    }
    if (thread < STAGES) barrier_init(shared_address(memory + AT_EMPTY) + 8 * thread, WARPS * CLUSTER);
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
    cluster_sync();
    return base;
}

// After a tile: nobody is in it any more.
DEVICE void leave(u8* memory, int thread) {
    cluster_sync();
    for (int i = thread; i < 2 * POSITIONS; i += THREADS) barrier_end(shared_address(memory + AT_FULL) + 8 * i);
    if (thread < STAGES) barrier_end(shared_address(memory + AT_EMPTY) + 8 * thread);
    block_sync();
}

// Tokens of one block of threads in a cluster's mask, as if it were the first.
DEVICE u32 of_rank(u32 mask, int rank) { return OWN == 32 ? mask : (mask >> (rank * OWN)) & ((1u << (OWN & 31)) - 1); }

// Warps that take part in a block; of blocks of threads with none, one that sees to it that the tile has come (`watch`).
DEVICE u32 takers(u32 mask) {
    u32 count = 0;
    for (int rank = 0; rank < CLUSTER; rank++) {
        u32 own = of_rank(mask, rank);
        if (PER_WARP == 2) own = (own | own >> 1) & 0x55555555u;
        count += CLUSTER > 1 && own == 0 ? 1 : bits_of(own);
    }
    return count;
}

// A stage is free, and those who take no part in tile `fill` (2 p for K of block p, 2 p + 1 for V) have left it already.
DEVICE void take_stage(u32 empty, int fill, u32 mask, bool one) {
    u32 at = empty + 8 * (fill % STAGES);
    if (fill >= STAGES) barrier_wait(at, (fill / STAGES - 1) & 1);
    u32 absent = WARPS * CLUSTER - takers(mask);
    if (one && absent) barrier_arrive(at, absent);
}

DEVICE void release(u32 empty, int fill, int lane) {
    warp_sync();
    if (lane < CLUSTER) barrier_arrive_at(empty + 8 * (fill % STAGES), lane);
}

}  // namespace samebits
