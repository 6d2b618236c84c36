// Arithmetic of MSA attention, operation for operation that of the Triton kernels (`triton_msa_tiles`, `triton_msa_attend`).
//
// ROUNDED, a define: NVFP4 is read as E4M3.
#pragma once
#ifdef SAMEBITS_HOST
#include "cuda_shim.h"
#else
#include "cuda_sm90.cuh"
#endif

#define BF16 0
#define FP8 1
#define NVFP4 2

namespace samebits {

DEVICE float finite(float x) { return x == as_float(0xFF800000u) ? 0.0f : x; }

// log2 of a normal number or of what is smaller, as libdevice computes it for Triton.
DEVICE float log2_of(float x) {
    bool small = x < as_float(0x00800000u);
    if (small) x = mul(x, 8388608.0f);
    float shift = small ? -23.0f : 0.0f;
    u32 exponent = (as_bits(x) - 1060439283u) & 0xFF800000u;
    float f = sub(as_float(as_bits(x) - exponent), 1.0f), e = fused((float)(int)exponent, as_float(0x34000000u), shift);
    float y = fused(as_float(0x3DC6B27Fu), f, as_float(0xBE2C7F30u));
    y = fused(y, f, as_float(0x3E2FCF2Au));
    y = fused(y, f, as_float(0xBE374E43u));
    y = fused(y, f, as_float(0x3E520BF4u));
    y = fused(y, f, as_float(0xBE763C8Bu));
    y = fused(y, f, as_float(0x3E93BF99u));
    y = fused(y, f, as_float(0xBEB8AA49u));
    y = fused(y, f, as_float(0x3EF6384Au));
    y = fused(y, f, as_float(0xBF38AA3Bu));
    y = fused(f, as_float(0x3FB8AA3Bu), mul(f, mul(f, y)));
    float result = add(e, y);
    if (as_bits(x) >= 0x7F800000u) result = fused(x, as_float(0x7F800000u), as_float(0x7F800000u));
    return result;
}

// A word of eight E2M1 codes as pairs (code i, code i + 4), times `scale` in both halves: see `triton_msa_tiles`.
DEVICE void decode_e2m1(u32 (&y)[4], u32 x, u32 scale) {
    u32 high = x >> 8;
    y[0] = mul_bf16x2(((x & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    y[1] = mul_bf16x2(((x & 0x00F000F0u) * 0x104u) & 0x81C081C0u, scale);
    y[2] = mul_bf16x2(((high & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, scale);
    y[3] = mul_bf16x2(((high & 0x00F000F0u) * 0x104u) & 0x81C081C0u, scale);
}

// An E4M3 byte in both halves, times 2^119. ROUNDED: NaN counts as 0.
DEVICE u32 scale_of(u32 byte) {
    byte &= 0x7F;
    if (ROUNDED && byte == 0x7F) byte = 0;
    return mul_bf16x2(mul_bf16x2(byte << 4 | byte << 20, 0x7B807B80u), 0x7B007B00u);
}

// bf16 values * 2^-7 rounded to E4M3, as values * 2^-7 again.
DEVICE u32 round_e4m3(u32 x) {
    u32 e = e4m3x2(mul(as_float(x & 0xFFFF0000u), 128.0f), mul(as_float(x << 16), 128.0f));
    e = permute(e, e, 0x1100);
    return mul_bf16x2(((e >> 4) & 0x07F007F0u) | (e & 0x80008000u), 0x78007800u);
}

// Eight E4M3 bytes of two words as pairs (byte i of one, byte i of the other).
DEVICE void decode_e4m3(u32 (&y)[4], u32 a, u32 b) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 c = permute(a, b, 0x4400 + 0x1111 * i);
        y[i] = mul_bf16x2(((c >> 4) & 0x07F007F0u) | (c & 0x80008000u), 0x7B807B80u);
    }
}

// Results of a set of keys, for the two rows (heads) of a lane. Values are apart: they fill the registers.
struct State {
    float top[2];
    float sums[2][2];  // row; which 8 of 16 keys
};

DEVICE void clear(State& x) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        x.top[row] = as_float(0xFF800000u);
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

// `_join` of all but the values: their factors come back.
DEVICE void join(State& x, const State& other, float (&share)[2], float (&other_share)[2]) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float top = larger(x.top[row], other.top[row]);
        share[row] = exp2_approx(sub(x.top[row], finite(top)));
        other_share[row] = exp2_approx(sub(other.top[row], finite(top)));
        x.top[row] = top;
#pragma unroll
        for (int i = 0; i < 2; i++) x.sums[row][i] = add(mul(x.sums[row][i], share[row]), mul(other.sums[row][i], other_share[row]));
    }
}

DEVICE float joined(float x, float share, float other, float other_share) { return add(mul(x, share), mul(other, other_share)); }

}  // namespace samebits
