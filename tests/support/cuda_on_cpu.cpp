// A library that runs the kernel of `kernels/cuda_attend.cu` on the CPU.
#include <algorithm>
#define EMULATED
#include "cuda_attend.cu"

static void* const* arguments;
template <class T> static T argument(int i) { return *(const T*)arguments[i]; }

static void body() {
    attend(argument<const u16*>(0), argument<const u8*>(1), argument<const int*>(2), argument<const int*>(3), argument<const int*>(4),
           argument<const int*>(5), argument<u16*>(6), argument<float*>(7), argument<i64>(8), argument<i64>(9), argument<float>(10));
    me->done = true;
}

// As a launch of `blocks` CTAs has it: `given` are the addresses of the arguments. Returns the bytes of shared memory it wants.
extern "C" int launch(int blocks, unsigned seed, void* const* given) {
    arguments = given;
    for (int first = 0; first < blocks; first += CTAS) run_cluster(first, seed + first, body);
    return SHARED_BYTES;
}
