// How tiles of keys and values come to shared memory, for `cuda_prefill.cu`: bf16 by TMA, other formats decoded.
#pragma once
#include "cuda_walk.cuh"

namespace samebits {

// bf16. Boxes of a block of threads are shared out over warps and their lanes: a warp asks for one after the other.
constexpr int ASKING = CLUSTER > 1 ? 2 : FILLERS, VALUE_BOXES = 32 / CLUSTER, KEY_BOXES = CLUSTER > 1 ? 2 : 4;

DEVICE void fill_rows(u8* memory, const TensorMap* keys, const TensorMap* values, int count, int head, int rank, int filler, int lane) {
    u32 stages = shared_address(memory), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32* mask = (const u32*)(memory + AT_MASK);
    const int* where = (const int*)(memory + AT_WHERE);
    int box = filler + ASKING * lane, half = box & 1, other = box >> 1;  // dimensions; keys
    for (int fill = 0; fill < 2 * count; fill++) {
        int p = fill >> 1, row = PAGED ? 0 : where[p], page = PAGED ? where[p] : 0;
        u32 at = stages + fill % STAGES * STAGE + half * REGION, barrier = full + 8 * fill;
        bool one = filler == 0 && lane == 0;
        take_stage(empty, fill, mask[p], one);
        if (one) barrier_expect(barrier, TILE_BYTES);
        if (fill & 1) {
            int eight = rank * (16 / CLUSTER) + other;
            if (box < VALUE_BOXES)
                load_box(at + (eight & 1) * EVERY_OTHER + (eight >> 1) * 1024, values, 64 * half, row + 8 * eight, head, page, barrier);
        } else {
            int part = CLUSTER > 1 ? rank : other;
            if (box < KEY_BOXES) load_box(at + part * KEY_ROWS * 128, keys, 64 * half, row + part * KEY_ROWS, head, page, barrier);
        }
    }
}

// In the place of a block of threads none of whose tokens chose a block: what was sent to it has come before another tile may.
DEVICE void watch(u8* memory, int count, int rank, int lane) {
    u32 stages = shared_address(memory), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32* mask = (const u32*)(memory + AT_MASK);
    for (int fill = 0; fill < 2 * count; fill++) {
        if (of_rank(mask[fill >> 1], rank)) continue;
        barrier_wait(full + 8 * fill, 0);
        release(empty, fill, lane);
    }
}

// Places of 8 dimensions (chunk w of lane t's 32) of a key in a tile of K, and of V.
DEVICE u32 key_chunk(int key, int t, int w) { return (t >> 1) * REGION + key * 128 + ((((t & 1) * 4 + w) ^ ((key + 2 * (t >> 1)) & 7)) << 4); }
DEVICE u32 value_chunk(int key, int t, int w) {
    int half = t >> 1, other = (key >> 3) & 1;
    return half * REGION + other * EVERY_OTHER + ((key >> 4) * 8 + (key & 7)) * 128 + ((((t & 1) * 4 + w) ^ ((key + 2 * (half + other)) & 7)) << 4);
}

// An E4M3 byte in both halves, times 2^119. ROUNDED: NaN counts as 0.
DEVICE u32 scale_of(u32 byte) {
    byte &= 0x7F;
    if (ROUNDED && byte == 0x7F) byte = 0;
    return scale_values(byte << 4 | byte << 20);
}

// Eight E4M3 bytes of two words as pairs (byte i of one, byte i of the other).
DEVICE void decode_e4m3(u32 (&y)[4], u32 a, u32 b) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i] = mul_bf16x2(e4m3_values(permute(a, b, 0x4400 + 0x1111 * i)), 0x7B807B80u);
    }
}

// Bits of a tile that a lane decodes: 32 dimensions of 4 keys.
struct Raw {
    static constexpr int TASKS = 4, WORDS = FORMAT == NVFP4 ? 4 : 8;
    u32 words[TASKS][WORDS], scales[TASKS];
};

// Those of one key. `tile`: the block's keys or values in its page.
DEVICE void load_raw(Raw& raw, int i, const u8* tile, bool value, int key, int t) {
    if (FORMAT == NVFP4) {
        load_global(raw.words[i], tile + key * 64 + t * 16);
        const u8* of = tile + CODES + (value ? (key >> 2) * 32 + (key & 3) + 8 * t : 8 * key + 2 * t);
        raw.scales[i] = value ? load_global_u8(of) | load_global_u8(of + 4) << 8 : load_global_u16(of);
    } else {
        load_global(raw.words[i], tile + key * 256 + t * 32);
        load_global(raw.words[i] + (Raw::WORDS - 4), tile + key * 256 + t * 32 + 16);
    }
}

// NVFP4 and E4M3, by all fillers: a warp decodes 32 keys of a tile, a lane 32 dimensions of a key at a time. As soon as a key is decoded,
// the bits of the next tile's are asked for, in its registers.
DEVICE void fill_decoded(u8* memory, const u8* pages, u64 page_stride, int count, int head, int filler, int lane) {
    u32 stages = shared_address(memory), full = stages + AT_FULL, empty = stages + AT_EMPTY;
    const u32* mask = (const u32*)(memory + AT_MASK);
    const int* where = (const int*)(memory + AT_WHERE);
    int t = lane & 3, first = 32 * filler + (lane >> 2);
    u32 of_head = FORMAT == NVFP4 ? 2 * head * SLOT : head * 32768, of_values = FORMAT == NVFP4 ? SLOT : 128;
    Raw raw;
    if (count) {
#pragma unroll
        for (int i = 0; i < Raw::TASKS; i++) load_raw(raw, i, pages + where[0] * page_stride + of_head, false, first + 8 * i, t);
    }
    for (int fill = 0; fill < 2 * count; fill++) {
        bool value = fill & 1;
        int ahead = fill + 1 < 2 * count ? (fill + 1) >> 1 : 0;  // after the last, anything: without a branch, loads go where they hide
        const u8* next = pages + where[ahead] * page_stride + of_head + (value ? 0 : of_values);
        take_stage(empty, fill, mask[fill >> 1], filler == 0 && lane == 0);
        u32 at = stages + fill % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < Raw::TASKS; i++) {
            int key = first + 8 * i;
            u32 to = at + (value ? value_chunk(key, t, 0) : key_chunk(key, t, 0));
            u32 scales[2] = {0, 0};
            if (FORMAT == NVFP4) {
                scales[0] = scale_of(raw.scales[i]);
                scales[1] = scale_of(raw.scales[i] >> 8);
            }
#pragma unroll
            for (int w = 0; w < 4; w++) {
                u32 y[4];
                if (FORMAT == NVFP4) {
                    decode_e2m1<false>(y, raw.words[i][w], scales[w >> 1]);
                } else {
                    decode_e4m3(y, raw.words[i][2 * w % Raw::WORDS], raw.words[i][(2 * w + 1) % Raw::WORDS]);
                }
                store_shared(to ^ (w << 4), y);
            }
            load_raw(raw, i, next, !value, key, t);
        }
        warp_sync();
        if (lane == 0) barrier_arrive(full + 8 * fill, 1);
    }
}

}  // namespace samebits
