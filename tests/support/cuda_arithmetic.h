// What CUDA kernels of `samebits.kernels` compute with (`cuda_sm90.cuh`), made of plain operations for a CPU: what a thread does by itself.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define DEVICE static inline

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

DEVICE float as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE u32 as_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float mul(float a, float b) { return a * b; }
DEVICE float add(float a, float b) { return a + b; }
DEVICE float sub(float a, float b) { return a - b; }
DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float one_over(float x) { return 1.0f / x; }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
DEVICE float exp2_approx(float x) { return flushed(exp2f(flushed(x))); }
DEVICE int bits_of(u32 x) { return __builtin_popcount(x); }
DEVICE int first_bit(u32 x) { return __builtin_ffs(x) - 1; }

DEVICE float bf16_value(u32 bits) { return as_float(bits << 16); }
DEVICE u32 bf16_bits(float x) {
    u32 b = as_bits(x);
    if (x != x) return 0x7FFF;
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
DEVICE u32 permute(u32 a, u32 b, u32 how) {
    u64 both = (u64)b << 32 | a;
    u32 y = 0;
    for (int i = 0; i < 4; i++) {
        u32 from = how >> 4 * i & 15;
        if (from > 7) {
            fprintf(stderr, "sign mode of prmt\n");
            _Exit(3);
        }
        y |= (u32)(both >> 8 * from & 0xFF) << 8 * i;
    }
    return y;
}
