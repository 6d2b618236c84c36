// What kernels of sm_90a are written with: inline PTX by names. NVRTC finds no headers of CUDA, so that there is no other.
#pragma once

namespace samebits {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define PARAM __grid_constant__ const
#define SHARED(name) extern __shared__ __align__(1024) u8 name[]

struct alignas(64) TensorMap {
    u64 opaque[16];
};

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
DEVICE u32 permute(u32 a, u32 b, u32 how) {
    u32 y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(how));
    return y;
}
// `volatile`: MMAs stay in the order in which they are written.
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 grid_size() { return gridDim.x; }
DEVICE void block_sync() {
    __syncwarp();
    asm volatile("bar.sync 0;" ::: "memory");
}
template <int COUNT>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
DEVICE u32 shuffle_up(u32 x, int by) { return __shfl_up_sync(0xFFFFFFFFu, x, by); }
DEVICE void atomic_or(u32* at, u32 x) { atomicOr(at, x); }
DEVICE void load_matrices(u32 (&x)[4], u32 at) {  // transposed
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void load_shared(u32 (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}
DEVICE void store_shared(u32 at, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
DEVICE void store_word(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE u32 load_word(u32 at) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
// Queries are not written while the kernel runs.
DEVICE void load_global(u32* x, const void* at) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at));
}
DEVICE void barrier_end(u32 at) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
DEVICE void barrier_arrive(u32 at, u32 count) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
    __syncwarp();
}
DEVICE void load_box(u32 at, const TensorMap* map, int x, int row, int head, int page, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(at),
        "l"(map), "r"(x), "r"(row), "r"(head), "r"(page), "r"(barrier)
        : "memory");
}

}  // namespace samebits
