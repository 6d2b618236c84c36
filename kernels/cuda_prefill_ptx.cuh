// What `cuda_prefill.cu` and its parts ask of a Hopper GPU beside `cuda_sm90.cuh`: clusters, TMA, barriers of a ring, registers.
//
// CLUSTER, a define, is the number of blocks of threads of a cluster.
#pragma once
#include "cuda_sm90.cuh"

namespace samebits {

struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
#define PARAM __grid_constant__ const
#define SHARED(name) extern __shared__ __align__(1024) u8 name[]

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 grid_size() { return gridDim.x; }
DEVICE void block_sync() {
    __syncwarp();
    asm volatile("bar.sync 0;" ::: "memory");
}
DEVICE void cluster_sync() {
    if (CLUSTER == 1) {
        block_sync();
    } else {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
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
// Pages and queries are not written while the kernel runs.
DEVICE void load_global(u32* x, const void* at) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(at));
}
DEVICE u32 load_global_u16(const void* at) {
    u16 x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(at));
    return x;
}
DEVICE u32 load_global_u8(const void* at) {
    u32 x;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
// Of a thread what it wrote itself; past L1, which has better things to hold.
DEVICE void load_kept(float (&x)[4], const float* at) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(at) : "memory");
}
DEVICE void store_kept(float* at, const float (&x)[4]) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
DEVICE void barrier_end(u32 at) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
DEVICE void barrier_arrive(u32 at, u32 count) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
DEVICE void barrier_arrive_at(u32 at, u32 rank) {
    if (CLUSTER == 1) {
        barrier_arrive(at, 1);
    } else {
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(at),
            "r"(rank)
            : "memory");
    }
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    u32 done;
    do {
        if (CLUSTER == 1) {
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(at), "r"(parity)
                : "memory");
        } else {
            asm volatile(
                "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                : "=r"(done)
                : "r"(at), "r"(parity)
                : "memory");
        }
    } while (!done);
    __syncwarp();
}
DEVICE void load_box(u32 at, const TensorMap* map, int x, int row, int head, int page, u32 barrier) {
    if (CLUSTER == 1) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(at),
            "l"(map), "r"(x), "r"(row), "r"(head), "r"(page), "r"(barrier)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(at),
            "l"(map), "r"(x), "r"(row), "r"(head), "r"(page), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
            : "memory");
    }
}

}  // namespace samebits
