// Arithmetic of MSA attention, operation for operation that of the Triton kernels (`triton_msa_tiles`, `triton_msa_attend`), in decode and
// in prefill.
//
// ROUNDED, a define: NVFP4 is read as E4M3.
// SAMEBITS_HOST is defined where a C++ compiler for a CPU reads this, after plain operations with the names of `cuda_sm90.cuh`.
#pragma once
#ifndef SAMEBITS_HOST
#include "cuda_sm90.cuh"
#endif

namespace samebits {

#define MINUS_INFINITY as_float(0xFF800000u)

DEVICE float finite(float x) { return x == MINUS_INFINITY ? 0.0f : x; }

// log2 of a positive number, as libdevice computes it for Triton, where subnormal results would be flushed: there are none.
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

// Bits 4 to 11 of E4M3 scales in both halves to bf16 values times 2^119.
DEVICE u32 scale_values(u32 bits) { return mul_bf16x2(mul_bf16x2(bits, 0x7B807B80u), 0x7B007B00u); }

// E4M3 bytes, the high ones of halves, times 2^-120.
DEVICE u32 e4m3_values(u32 x) { return ((x >> 4) & 0x07F007F0u) | (x & 0x80008000u); }

// bf16 values * 2^-7 rounded to E4M3, as values * 2^-7 again.
DEVICE u32 round_e4m3(u32 x) {
    float high = mul(as_float(x & 0xFFFF0000u), 128.0f), low = mul(as_float(x << 16), 128.0f);
    u32 e = e4m3x2(low, high);
    return mul_bf16x2(e4m3_values(permute(e, e, 0x1100)), 0x78007800u);
}

// A word of eight E2M1 codes as pairs (code i, code i + 4) * 2^-7, under the scales of both halves: see `triton_msa_tiles`.
// mixed: by fewer logic instructions and more multiplications.
template <bool mixed>
DEVICE void decode_e2m1(u32 (&y)[4], u32 x, u32 scales) {
    const u32 places = 0x81C081C0u;
    if (mixed) {
        u32 low = x >> 6, signs = x & 0x80808080u;
        y[0] = times(x & 0x000F000Fu, 0x1040) & places;
        y[1] = either(times(x, 4), times(signs, 256), 0x01C001C0u);
        y[2] = times(low & 0x003C003Cu, 0x410) & places;
        y[3] = either(low, signs, 0x01C001C0u);
    } else {
        u32 high = x >> 8;
        y[0] = times(x & 0x000F000Fu, 0x1040) & places;
        y[1] = times(x & 0x00F000F0u, 0x104) & places;
        y[2] = times(high & 0x000F000Fu, 0x1040) & places;
        y[3] = times(high & 0x00F000F0u, 0x104) & places;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i] = mul_bf16x2(y[i], scales);
        if (ROUNDED) y[i] = round_e4m3(y[i]);
    }
}

// Weight of a key. `origin`: less the largest score of the set, times `factor`.
DEVICE float weight(float score, float factor, float origin) { return exp2_approx(fused(score, factor, origin)); }

// Weights of NVFP4's values, which lack 2^7.
DEVICE u32 times_128(u32 weights) { return mul_bf16x2(weights, 0x43004300u); }

// Sums of weights are trees: of the eight steps of 16 keys of a block, or of a block's quarters.
DEVICE float sum_of_four(float a, float b, float c, float d) { return add(add(a, b), add(c, d)); }

struct Shares {
    float top, own, other;
};

// Two sets of keys as one: the new maximum, and what the sums and values of both are multiplied by.
DEVICE Shares shares_of(float top, float other_top) {
    Shares s;
    s.top = larger(top, other_top);
    s.own = exp2_approx(sub(top, finite(s.top)));
    s.other = exp2_approx(sub(other_top, finite(s.top)));
    return s;
}

DEVICE float joined(const Shares& s, float own, float other) { return add(mul(own, s.own), mul(other, s.other)); }

// What values are multiplied by in the end. `total`: of a row's weights.
DEVICE float inverse_of(float total) { return one_over(total > 0.0f ? total : 1.0f); }

// Two results in bf16. + 0.0 makes 0.0 of -0.0.
DEVICE u32 finished(float x, float y, float inverse) { return pack_bf16(add(mul(x, inverse), 0.0f), add(mul(y, inverse), 0.0f)); }

// log2 of the softmax's sum, of scores in powers of two.
DEVICE float log_of_sum(float top, float total) { return total > 0.0f ? add(top, log2_of(total)) : MINUS_INFINITY; }

}  // namespace samebits
