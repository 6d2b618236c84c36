// Arithmetic of MSA attention over bf16, operation for operation that of the Triton kernels (`triton_msa_tiles`, `triton_msa_attend`).
//
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

// Weight of a key. `origin`: less the largest score of the set, times `factor`.
DEVICE float weight(float score, float factor, float origin) { return exp2_approx(fused(score, factor, origin)); }

// Sums of weights are trees of the eight steps of 16 keys of a block.
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
