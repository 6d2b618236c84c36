// A library that runs the kernel of `kernels/cuda_attend.cu` on the CPU.
#include <utility>
#define SAMEBITS_HOST
#include "cuda_attend.cu"

using namespace samebits;

static void* const* arguments;
template <class T> static T argument(int i) { return *(const T*)arguments[i]; }

static void body() {
    attend(argument<const u16*>(0), argument<const u8*>(1), argument<const int*>(2), argument<const int*>(3), argument<const int*>(4),
           argument<const int*>(5), argument<u16*>(6), argument<float*>(7), argument<i64>(8), argument<i64>(9), argument<float>(10));
    finish();
}

// As a launch of `blocks` CTAs has it: `given` are the addresses of the arguments. Returns the bytes of shared memory it wants.
extern "C" int launch(int blocks, unsigned seed, void* const* given) {
    arguments = given;
    for (int first = 0; first < blocks; first += CTAS) run_cluster(first, seed + first, body);
    return SHARED_BYTES;
}

// The decoding alone: four outputs of a word of eight codes under two scale bytes.
extern "C" void decode_word(u32 word, u32 low_scale, u32 high_scale, u32* out) {
    u32 four[4];
    decode_e2m1<MIXED>(four, word, scale_values(times(scale_bytes(low_scale | high_scale << 16), 16)));
    for (int i = 0; i < 4; i++) out[i] = four[i];
}

// log2 alone.
extern "C" float log2_alone(float x) { return log2_of(x); }
