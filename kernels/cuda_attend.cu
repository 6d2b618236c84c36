// MSA attention over NVFP4 pages in decode, in one launch: `kernels.cuda_attend` compiles and launches this.
//
// A result has the bits of `triton_msa_attend`: the same MMA steps over the same labels in the same order, and the same operations on fp32,
// none contracted. What differs is who does them.
//
// A warp makes the result of one chosen block: it waits for the block's keys, multiplies them with the queries of all heads, keeps the
// weights in its registers, where they already lie as the second product wants them, waits for the values, and leaves maxima, sums and
// weighted values in shared memory. The warps of a group of four blocks join these, and then all join the groups. UNIT is the number of
// blocks, and warps, of a CTA; where it is less than TOPK the CTAs of a query are a cluster and read each other's shared memory.
//
// Keys and values of a block are 9216 contiguous bytes each and come by one bulk copy each, asked for at the start and in the order in which
// they are needed. With UNIT = 16 the last four blocks have to wait for the place of keys that were used.
//
// With QUARTERS the warps of the last group share the values of its blocks, a quarter of the dimensions each, and join as they go: then
// less is left to do when the last bytes have come.
//
// Where queries are few a block has four warps (WIDE): each makes the scores of 32 keys, and a quarter of the dimensions of the values.
//
// Set from outside: UNIT, GROUPS, HEADS, LSE, ROUNDED, TILES (n-tiles of scores that are worked on at a time), MIXED (how codes become
// bf16), QUARTERS, WIDE.
// SAMEBITS_HOST is defined where a C++ compiler for a CPU reads this, with `cuda_on_cpu.h` in the place of PTX.

#define TOPK 16
#define GROUP 4
#define DIM 128
#define PAGE 128
#define ROWS 16
#define SUMS 8
#define CTAS (TOPK / UNIT)
#define WARPS (WIDE ? 4 : 1) // of a block
#define THREADS (32 * WARPS * UNIT)
#define PLANE 9216 // bytes of the keys, or values, of a block
#define CODES 8192 // of these
#define SLOTS (UNIT < 12 ? UNIT : 12)
#define QUERY (SLOTS * 2 * PLANE)
#define BARRIERS (QUERY + ROWS * DIM * 2)
#define MAXIMA (BARRIERS + 16 * UNIT) // of the warps of a block, 16 heads each
#define SHARED_BYTES (MAXIMA + (WIDE ? UNIT * WARPS * ROWS * 4 : 0))

#ifdef SAMEBITS_HOST
#include "cuda_on_cpu.h"
#else
#include "cuda_attend_ptx.cuh"
#endif
#include "cuda_attend_block.cuh"

namespace samebits {

struct Result {
    float top, sums;
    float4 values;
};

DEVICE void add_result(Result& to, float top, float sums, const float4& values) {
    const Shares s = shares_of(to.top, top);
    to.top = s.top;
    to.sums = joined(s, to.sums, sums);
    join(s, to.values, values);
}

DEVICE Result nothing() {
    Result r;
    r.top = MINUS_INFINITY;
    r.sums = 0.0f;
    r.values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return r;
}

// Adds the result of block `i` of the query, in whichever CTA it lies, to `to`; lanes have a piece each.
DEVICE void add_block(Result& to, char* shared, int i, int head, int lane) {
    const char* result = values_of(shared, i % UNIT);
    const char* top = result + top_at(head);
    const char* sums = result + sum_at(head, lane % 8);
    const char* piece = result + piece_at(head, lane);
    if (CTAS == 1)
        add_result(to, *(const float*)top, *(const float*)sums, *(const float4*)piece);
    else
        add_result(to, remote_float(top, i / UNIT), remote_float(sums, i / UNIT), remote_float4(piece, i / UNIT));
}

KERNEL attend(
    const u16* query, // bf16 [T, GROUPS * HEADS, 128]
    const u8* pages,
    const int* table,    // [R, table_stride] page of each block of a request
    const int* request,  // [T]
    const int* position, // [T], -1 for padding
    const int* chosen,   // [T, GROUPS, TOPK] blocks, then -1
    u16* out,            // bf16 [T, GROUPS * HEADS, 128]
    float* lse,          // [T, GROUPS * HEADS]: log2 of the softmax's sum, of scores in powers of two
    i64 page_stride, i64 table_stride,
    float factor // softmax scale * log2(e) * 128
) {
    char* shared = shared_memory();
    u64* barriers = (u64*)(shared + BARRIERS); // keys, then values, of each block of the CTA
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CTAS, first = rank * UNIT;
    const i64 row = blockIdx.x / CTAS;
    if (warp == 0) {
        for (int i = lane; i < 2 * UNIT; i += 32) barrier_init(barriers + i);
        barriers_made();
        warp_sync();
    }
    after_the_kernel_before();

    const int block_of_lane = chosen[row * TOPK + lane % TOPK];
    const int limit_of_all = position[row / GROUPS] + 1;
    const i64 request_of_row = request[row / GROUPS];
    const int places = bits_of(ballot(block_of_lane >= 0) & 0xFFFF);
    const int count = places - first < 0 ? 0 : places - first < UNIT ? places - first : UNIT; // of the CTA
    const int page = block_of_lane >= 0 ? table[request_of_row * table_stride + block_of_lane] : 0;
    const u8* head_pages = pages + row % GROUPS * 2 * PLANE;
    if (warp == 0) {
        const int i = lane - first; // lane l has block l of the query
#pragma unroll
        for (int stage = 0; stage < (SLOTS + 3) / 4; stage++)
            if (i >= 0 && i / 4 == stage && i < count && i < SLOTS) {
                const u8* keys = head_pages + page * page_stride;
                copy_plane(keys_of(shared, i), keys, barriers + i);
                if (!asked_late(i, count)) copy_plane(values_of(shared, i), keys + PLANE, barriers + UNIT + i);
            }
    }
    // Queries as the MMAs want them: [step][lane] 16 bytes.
    for (int i = threadIdx.x; i < ROWS * 16; i += THREADS) {
        const int head = i / 16, t = i % 16 / 4, w = i % 4;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (head < HEADS) x = *(const uint4*)(query + (row * HEADS + head) * DIM + t * 32 + w * 8);
        u32* to = (u32*)(shared + QUERY) + (w * 64 + head % 8 * 4 + t) * 4 + head / 8;
        to[0] = permute(x.x, x.z, 0x5410);
        to[2] = permute(x.x, x.z, 0x7632);
        to[128] = permute(x.y, x.w, 0x5410);
        to[130] = permute(x.y, x.w, 0x7632);
    }
    block_sync();

    if (WIDE) {
        const int i = warp / 4, block = shuffle(block_of_lane, first + i);
        if (i < count) block_of_four(shared, barriers, i, warp % 4, lane, limit_of_all - block * PAGE, factor);
    } else if (warp < count) {
        const int block = shuffle(block_of_lane, first + warp), limit = limit_of_all - block * PAGE;
        if (UNIT > SLOTS && warp >= SLOTS) {
            const u8* keys = head_pages + shuffle(page, warp) * page_stride;
            const u8* before = head_pages + shuffle(page, warp - GROUP) * page_stride;
            named_sync(1 + warp - SLOTS, 64);
            if (lane == 0) {
                barriers_made();
                copy_plane(keys_of(shared, warp), keys, barriers + warp);
                copy_plane(values_of(shared, warp - GROUP), before + PLANE, barriers + UNIT + warp - GROUP);
            }
            named_sync(5 + warp - SLOTS, 64);
            if (lane == 0) {
                barriers_made();
                copy_plane(values_of(shared, warp), keys + PLANE, barriers + UNIT + warp);
            }
            warp_sync();
        }
        float s[16][4], top[2];
        uint4 weights[8];
        wait_for(barriers + warp);
        multiply_keys(keys_of(shared, warp), shared + QUERY, 0, lane, s);
        if (UNIT > SLOTS && warp < 8 && SLOTS + warp % 4 < count) named_arrive(1 + warp, 64); // its keys were read
        mask(s, 0, lane, limit);
        maxima(s, top);
        const State state = weigh(s, top, factor, weights);
        if (shares_values(warp))
            store_weights(keys_of(shared, warp), lane, state, weights);
        else {
            float o[16][4];
            wait_for(barriers + UNIT + warp);
            multiply_values(values_of(shared, warp), weights, lane, o);
            warp_sync();
            store_result(values_of(shared, warp), lane, state, o);
        }
    }

    if (WIDE && UNIT == GROUP) {
        block_sync();
        if (warp < 4 && count > 0) join_group(shared, 0, count, warp, lane);
    } else if (UNIT >= GROUP) {
        const int group = warp / GROUP * GROUP, end = group + GROUP < count ? group + GROUP : count;
        group_sync(group);
        if (group < count) {
            if (shares_values(warp))
                join_quarter(shared, barriers + UNIT, group, end, warp, lane);
            else
                join_group(shared, group, end, warp, lane);
        }
    }
    if (CTAS == 1)
        block_sync();
    else
        cluster_sync();
    for (int head = rank * (ROWS / CTAS) + warp; head < (rank + 1) * (ROWS / CTAS); head += WARPS * UNIT) {
        Result all = nothing();
        for (int group = 0; group < places; group += GROUP)
            if (UNIT >= GROUP)
                add_block(all, shared, group, head, lane);
            else {
                Result part = nothing();
                for (int i = group; i < (group + GROUP < places ? group + GROUP : places); i++) add_block(part, shared, i, head, lane);
                add_result(all, part.top, part.sums, part.values);
            }
        float total = all.sums; // of neighbours first
        total = add(total, shuffle_xor(total, 1));
        total = add(total, shuffle_xor(total, 2));
        total = add(total, shuffle_xor(total, 4));
        const float inverse = inverse_of(total);
        uint2 packed;
        packed.x = finished(all.values.x, all.values.y, inverse);
        packed.y = finished(all.values.z, all.values.w, inverse);
        if (head < HEADS) {
            *(uint2*)(out + (row * HEADS + head) * DIM + lane * 4) = packed;
            if (LSE && lane == 0) lse[row * HEADS + head] = log_of_sum(all.top, total);
        }
    }
    if (CTAS > 1) cluster_sync(); // others may still read
}

}  // namespace samebits
