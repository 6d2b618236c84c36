// What `cuda_attend.cu` and its parts ask of a Hopper GPU beside `cuda_sm90.cuh`.
#pragma once
#include "cuda_sm90.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

namespace samebits {

DEVICE void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    mma(c, a.x, a.y, a.z, a.w, b0, b1);
}

DEVICE void block_sync() { __syncthreads(); }

// Barriers want the lanes of a warp together.
DEVICE void named_sync(int id, int threads) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void named_arrive(int id, int threads) {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What a CTA of the cluster has at the place of `p`.
DEVICE float remote_float(const void* p, int rank) {
    float x;
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %1, %2;\n\tld.shared::cluster.f32 %0, [at];\n\t}"
                 : "=f"(x) : "r"(shared_address(p)), "r"(rank) : "memory");
    return x;
}

DEVICE float4 remote_float4(const void* p, int rank) {
    float4 x;
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %4, %5;\n\tld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [at];\n\t}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared_address(p)), "r"(rank) : "memory");
    return x;
}

DEVICE void barrier_init(u64* barrier) { barrier_init(shared_address(barrier), 1); }

// Contiguous bytes to shared memory; `barrier` opens when they are there. They are read once: other things should stay in L2.
DEVICE void copy_plane(void* to, const void* from, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "n"(PLANE) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)), "l"(from), "n"(PLANE), "r"(shared_address(barrier)), "l"(0x12F0000000000000ull) : "memory"); // evict first
}

DEVICE void wait_for(u64* barrier) {
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t@done bra over;\n\tbra again;\n\tover:\n\t}" ::
            "r"(shared_address(barrier)) : "memory");
    __syncwarp();
}

DEVICE void after_the_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}

}  // namespace samebits
