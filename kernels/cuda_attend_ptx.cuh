// What `cuda_attend.cu` and its parts ask of a Hopper GPU. `tests/support/cuda_on_cpu.h` has the same names for a CPU.

#define INLINE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

INLINE u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INLINE void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

INLINE u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

INLINE u32 prmt(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// Products by a power of two that are meant as shifts, on another pipe than logic.
INLINE u32 times(u32 a, u32 b) {
    u32 d;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (a & mask) | (b & ~mask)
INLINE u32 either(u32 a, u32 b, u32 mask) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
    return d;
}

INLINE float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float fma_flushed(float a, float b, float c) {
    float d;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

INLINE float larger(float a, float b) {
    float d;
    asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

INLINE u32 bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

INLINE u32 e4m3x2(float low, float high) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}

INLINE float bits_to_float(u32 x) { return __uint_as_float(x); }
INLINE u32 float_to_bits(float x) { return __float_as_uint(x); }
INLINE float product(float a, float b) { return __fmul_rn(a, b); }
INLINE float sum(float a, float b) { return __fadd_rn(a, b); }
INLINE float difference(float a, float b) { return __fsub_rn(a, b); }
INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INLINE float quotient(float a, float b) { return __fdiv_rn(a, b); }
INLINE float exchanged(float x, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, x, lanes); }
INLINE int of_lane(int x, int lane) { return __shfl_sync(0xFFFFFFFFu, x, lane); }
INLINE u32 lanes_with(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }
INLINE int ones(u32 x) { return __popc(x); }
INLINE void warp_sync() { __syncwarp(); }
INLINE void block_sync() { __syncthreads(); }

// Barriers want the lanes of a warp together.
INLINE void named_sync(int id, int threads) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

INLINE void named_arrive(int id, int threads) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

INLINE void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What a CTA of the cluster has at the place of `p`.
INLINE float remote_float(const void* p, int rank) {
    float x;
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %1, %2;\n\tld.shared::cluster.f32 %0, [at];\n\t}"
                 : "=f"(x) : "r"(address(p)), "r"(rank) : "memory");
    return x;
}

INLINE float4 remote_float4(const void* p, int rank) {
    float4 x;
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %4, %5;\n\tld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [at];\n\t}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address(p)), "r"(rank) : "memory");
    return x;
}

INLINE void barrier_init(u64* barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)) : "memory"); }

// Barriers that were made, and bytes that were read, are seen by the copies that follow.
INLINE void copies_see() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// Contiguous bytes to shared memory; `barrier` opens when they are there. They are read once: other things should stay in L2.
INLINE void copy_plane(void* to, const void* from, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "n"(PLANE) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(address(to)), "l"(from), "n"(PLANE), "r"(address(barrier)), "l"(0x12F0000000000000ull) : "memory"); // evict first
}

INLINE void wait_for(u64* barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t@done bra over;\n\tbra again;\n\tover:\n\t}" ::
            "r"(address(barrier)) : "memory");
    __syncwarp();
}

INLINE void after_the_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

INLINE char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
