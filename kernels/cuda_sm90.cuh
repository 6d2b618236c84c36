// What kernels of sm_90a are written with: inline PTX by names. NVRTC finds no headers of CUDA, so that there is no other.
#pragma once

namespace samebits {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE int shuffle(int x, int from) { return __shfl_sync(0xFFFFFFFFu, x, from); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE u32 ballot(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }
DEVICE int bits_of(u32 x) { return __popc(x); }
DEVICE int first_bit(u32 x) { return __ffs(x) - 1; }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float one_over(float x) { return __fdiv_rn(1.0f, x); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 permute(u32 a, u32 b, u32 how) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(how));
    return y;
}
DEVICE u32 e4m3x2(float low, float high) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}
// Products that are meant as shifts, on another pipe than logic.
DEVICE u32 times(u32 a, u32 b) {
    u32 y;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// (a & mask) | (b & ~mask)
DEVICE u32 either(u32 a, u32 b, u32 mask) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(y) : "r"(a), "r"(mask), "r"(b));
    return y;
}
// `volatile`: MMAs stay in the order in which they are written.
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a[0], a[1], a[2], a[3], b0, b1); }
DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace samebits
