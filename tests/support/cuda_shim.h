// Runs a CUDA kernel of `samebits.kernels` on a CPU: the same source, with these functions in the place of its inline PTX.
//
// A thread of a block is a fiber. What a warp does together (mma, ldmatrix, shuffles, shared memory, votes) is done when all of its 32
// lanes have come to it, and all must have come to the same; barriers are waited for by giving way to others. The order in which warps get
// their turn, and when a copy by TMA arrives, are drawn from a seed. Shared memory is poisoned first, a barrier that is misused stops the
// process with a line, and so does a block in which nothing happens any more. Accesses to shared memory that want one bank twice at a time
// are counted.
//
// Not shown: memory ordering, registers, time, and the rounding inside an MMA: sums are fp32, k after k.
#pragma once
#include "cuda_arithmetic.h"

#include <cstdarg>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

namespace shim {

[[noreturn]] inline void fail(const char* text, ...) {
    va_list args;
    va_start(args, text);
    fprintf(stderr, "shim: ");
    vfprintf(stderr, text, args);
    fprintf(stderr, "\n");
    fflush(stderr);
    _Exit(3);
}

// ---- fibers
struct Fiber {
    void* stack_pointer = nullptr;
    std::unique_ptr<char[]> stack;
    bool done = false;
    u32 thread = 0;
    u64 op = 0;                 // warp operations so far
};
#if !defined(__x86_64__)
#error "fibers are switched by x86-64 code"
#endif
extern "C" void shim_switch(void** from, void* to);
asm(R"(
.text
.globl shim_switch
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

struct Barrier {
    bool made = false;
    int count = 0, pending = 0;
    long tx = 0;
    u32 phase = 0;
};

struct Meeting {  // of a warp
    u32 arrived = 0;
    u64 generation = 0;
    const char* name = nullptr;
    u32 in[32][12];
    u32 out[32][4];
};

struct Block {
    std::vector<unsigned char> storage;
    unsigned char* memory = nullptr;
    std::vector<Barrier> barriers;
    u32 sync_arrived = 0;
    u64 sync_generation = 0;
};

struct Machine {
    int threads = 0, grid = 0, index = 0;  // the latter of the block that runs
    u32 bytes = 0;
    Block block;
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    Fiber* current = nullptr;
    void* scheduler = nullptr;
    u64 progress = 0;
    std::mt19937 random;
    std::deque<std::pair<int, std::function<void()>>> flying;
    u64 conflicts = 0, accesses = 0, mmas = 0, boxes = 0;
    std::function<void()> body;
};
inline Machine machine;

inline void give_way() {
    Fiber* self = machine.current;
    shim_switch(&self->stack_pointer, machine.scheduler);
}
template <class Condition>
void wait_until(Condition condition) {
    while (!condition()) give_way();
    machine.progress++;
}
inline void enter() {
    machine.body();
    machine.current->done = true;
    machine.progress++;
    give_way();
    fail("a fiber that is over was resumed");
}

inline void run_block(int index) {
    Machine& m = machine;
    m.index = index;
    m.block = {};
    m.block.storage.assign(m.bytes + 1024, 0xCB);
    m.block.memory = (unsigned char*)(((u64)m.block.storage.data() + 1023) / 1024 * 1024);
    m.block.barriers.assign(m.bytes / 8, {});
    m.fibers.clear();
    m.fibers.resize(m.threads);
    m.warps.assign(m.fibers.size() / 32, {});
    constexpr size_t SIZE = 96 << 10;
    for (size_t i = 0; i < m.fibers.size(); i++) {
        Fiber& f = m.fibers[i];
        f.thread = i;
        f.stack.reset(new char[SIZE]);
        u64* top = (u64*)(((u64)f.stack.get() + SIZE) / 16 * 16);
        *--top = 0;
        *--top = (u64)enter;
        for (int r = 0; r < 6; r++) *--top = 0;
        f.stack_pointer = top;
    }
    std::vector<int> order(m.warps.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    u64 seen = m.progress, idle = 0;
    for (size_t left = m.fibers.size(); left;) {
        std::swap(order[m.random() % order.size()], order[m.random() % order.size()]);
        for (int w : order) {
            if (m.random() % 8 == 0) continue;  // no warp is in step with another
            for (int lane = 0; lane < 32; lane++) {
                Fiber& f = m.fibers[32 * w + lane];
                if (f.done) continue;
                m.current = &f;
                shim_switch(&m.scheduler, f.stack_pointer);
                if (f.done) left--;
            }
        }
        for (size_t i = m.flying.size(); i--;) {
            auto flight = m.flying.front();
            m.flying.pop_front();
            if (flight.first-- > 0)
                m.flying.push_back(flight);
            else
                flight.second();
            m.progress++;
        }
        idle = m.progress == seen ? idle + 1 : 0;
        seen = m.progress;
        if (idle > 1000) fail("nothing happens any more: %zu threads wait", left);
    }
    if (!m.flying.empty()) fail("a block of threads ended before its copies");
    for (auto& barrier : m.block.barriers)
        if (barrier.made) fail("a barrier was left behind");
}

// ---- what a warp does together
template <class Work>
u32* together(const char* name, const u32* in, int words, Work work) {
    Machine& m = machine;
    Fiber* self = m.current;
    int index = self - m.fibers.data();
    Meeting& meeting = m.warps[index / 32];
    int lane = index % 32;
    if (meeting.arrived && strcmp(meeting.name, name)) fail("lanes of a warp came to %s and %s", meeting.name, name);
    meeting.name = name;
    for (int i = 0; i < words; i++) meeting.in[lane][i] = in[i];
    m.progress++;
    u64 generation = meeting.generation;
    if (++meeting.arrived == 32) {
        work(meeting);
        meeting.arrived = 0;
        meeting.generation++;
    } else {
        while (meeting.generation == generation) give_way();
    }
    return meeting.out[lane];  // copied before the lane meets the others again
}

inline unsigned char* at(u32 address, u32 size, u32 align) {
    if (address + size > machine.bytes || address % align) fail("shared address %x of %u bytes", address, size);
    return machine.block.memory + address;
}
inline Barrier& barrier_at(u32 address) {
    at(address, 8, 8);
    return machine.block.barriers[address / 8];
}
inline void turn(Barrier& b) {
    if (b.pending < 0) fail("more arrivals than a barrier expects");
    if (b.pending == 0 && b.tx == 0) {
        b.phase++;
        b.pending = b.count;
    }
    machine.progress++;
}
// Wavefronts beyond one for each quarter of a warp that has 16 bytes a lane.
inline void count_banks(const u32* address) {
    for (int quarter = 0; quarter < 4; quarter++) {
        int most = 0;
        for (int bank = 0; bank < 8; bank++) {
            int count = 0;
            for (int i = 0; i < 8; i++) {
                u32 a = address[8 * quarter + i];
                bool first = (a >> 4 & 7) == (u32)bank;
                for (int j = 0; j < i; j++) first &= address[8 * quarter + j] != a;
                count += first;
            }
            most = count > most ? count : most;
        }
        machine.conflicts += most - 1;
    }
    machine.accesses++;
}
}  // namespace shim

// ---- the primitives
struct alignas(64) TensorMap {
    u64 opaque[16];
};
#define KERNEL(THREADS) static void
#define PARAM const
#define SHARED(name) u8* name = shim::machine.block.memory

DEVICE u32 shared_address(const void* p) { return (u32)((const u8*)p - shim::machine.block.memory); }
DEVICE u32 thread_index() { return shim::machine.current->thread; }
DEVICE u32 block_index() { return shim::machine.index; }
DEVICE u32 grid_size() { return shim::machine.grid; }
DEVICE void warp_sync() { shim::together("warp_sync", nullptr, 0, [](shim::Meeting&) {}); }
DEVICE void block_sync() {
    auto& block = shim::machine.block;
    u64 generation = block.sync_generation;
    shim::machine.progress++;
    if (++block.sync_arrived == (u32)shim::machine.threads) {
        block.sync_arrived = 0;
        block.sync_generation++;
    } else {
        while (block.sync_generation == generation) shim::give_way();
    }
}
template <int COUNT>
void more_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "registers");
}
template <int COUNT>
void fewer_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "registers");
}
DEVICE int shuffle(int x, int from) {
    u32 in[2] = {(u32)x, (u32)from};
    return *shim::together("shuffle", in, 2, [](shim::Meeting& m) {
        for (int i = 0; i < 32; i++) m.out[i][0] = m.in[m.in[i][1] & 31][0];
    });
}
DEVICE u32 shuffle_up(u32 x, int by) {
    int lane = shim::machine.current->thread & 31;
    return shuffle(x, lane >= by ? lane - by : lane);
}
DEVICE float shuffle_xor(float x, int mask) { return as_float(shuffle(as_bits(x), (shim::machine.current->thread & 31) ^ mask)); }
DEVICE u32 ballot(bool x) {
    u32 in = x;
    return *shim::together("ballot", &in, 1, [](shim::Meeting& m) {
        u32 all = 0;
        for (int i = 0; i < 32; i++) all |= m.in[i][0] << i;
        for (int i = 0; i < 32; i++) m.out[i][0] = all;
    });
}
DEVICE void atomic_or(u32* at, u32 x) { *at |= x; }
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 in[10] = {a[0], a[1], a[2], a[3], b0, b1, as_bits(d[0]), as_bits(d[1]), as_bits(d[2]), as_bits(d[3])};
    u32* out = shim::together("mma", in, 10, [](shim::Meeting& m) {
        float a[16][16], b[8][16];
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 6; r++)
                for (int h = 0; h < 2; h++) {
                    float x = bf16_value(m.in[lane][r] >> 16 * h & 0xFFFF);
                    int g = lane >> 2, t = lane & 3;
                    if (r < 4)
                        a[g + 8 * (r & 1)][2 * t + h + 8 * (r >> 1)] = x;
                    else
                        b[g][2 * t + h + 8 * (r - 4)] = x;
                }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const float *x = a[(lane >> 2) + 8 * (i >> 1)], *y = b[2 * (lane & 3) + (i & 1)];
                float sum = as_float(m.in[lane][6 + i]);
                for (int k = 0; k < 16; k++) sum += x[k] * y[k];
                m.out[lane][i] = as_bits(sum);
            }
        shim::machine.mmas++;
    });
    for (int i = 0; i < 4; i++) d[i] = as_float(out[i]);
}
DEVICE void load_matrices(u32 (&x)[4], u32 at) {
    u32* out = shim::together("ldmatrix", &at, 1, [](shim::Meeting& m) {
        u32 addresses[32];
        for (int i = 0; i < 32; i++) addresses[i] = m.in[i][0];
        shim::count_banks(addresses);
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < 32; lane++) {
                u16 two[2];
                for (int h = 0; h < 2; h++) memcpy(two + h, shim::at(addresses[8 * i + 2 * (lane & 3) + h], 16, 16) + 2 * (lane >> 2), 2);
                m.out[lane][i] = two[0] | (u32)two[1] << 16;
            }
    });
    for (int i = 0; i < 4; i++) x[i] = out[i];
}
DEVICE void load_shared(u32 (&x)[4], u32 at) {
    shim::together("ld.shared", &at, 1, [](shim::Meeting& m) {
        u32 addresses[32];
        for (int i = 0; i < 32; i++) addresses[i] = m.in[i][0];
        shim::count_banks(addresses);
    });
    memcpy(x, shim::at(at, 16, 16), 16);
}
DEVICE void store_shared(u32 at, const u32 (&x)[4]) {
    shim::together("st.shared", &at, 1, [](shim::Meeting& m) {
        u32 addresses[32];
        for (int i = 0; i < 32; i++) addresses[i] = m.in[i][0];
        shim::count_banks(addresses);
    });
    memcpy(shim::at(at, 16, 16), x, 16);
}
DEVICE void store_word(u32 at, u32 x) { memcpy(shim::at(at, 4, 4), &x, 4); }
DEVICE u32 load_word(u32 at) {
    u32 x;
    memcpy(&x, shim::at(at, 4, 4), 4);
    return x;
}
DEVICE void load_global(u32* x, const void* at) {
    if ((u64)at % 16) shim::fail("a vector of global memory that is not aligned");
    memcpy(x, at, 16);
}
DEVICE void barrier_init(u32 at, u32 count) {
    auto& b = shim::barrier_at(at);
    if (b.made) shim::fail("a barrier is made twice");
    b = {true, (int)count, (int)count, 0, 0};
}
DEVICE void barrier_end(u32 at) {
    auto& b = shim::barrier_at(at);
    if (!b.made || b.tx) shim::fail("a barrier ends that is not at rest");
    b.made = false;
}
DEVICE void barriers_made() {}
DEVICE void barrier_arrive(u32 at, u32 count) {
    auto& b = shim::barrier_at(at);
    if (!b.made || !count) shim::fail("an arrival at no barrier, or of none");
    b.pending -= count;
    shim::turn(b);
}
DEVICE void barrier_expect(u32 at, u32 bytes) {
    auto& b = shim::barrier_at(at);
    b.tx += bytes;
    barrier_arrive(at, 1);
}
DEVICE void barrier_wait(u32 at, u32 parity) {
    auto& b = shim::barrier_at(at);
    shim::wait_until([&] {
        if (!b.made) shim::fail("waiting for no barrier");
        return (b.phase & 1) != parity;
    });
}
// [0] address, [1..4] sizes, [5..7] strides in bytes, [8..11] box: bf16 with a 128-byte swizzle, zeros outside.
template <class Map>
static void load_box(u32 at, const Map* map, int x, int row, int head, int page, u32 barrier) {
    const u64* d = (const u64*)map->opaque;
    auto& m = shim::machine;
    if (at % 128) shim::fail("a box of TMA must lie at a multiple of 128 bytes");
    if (d[8] * 2 > 128 || d[10] != 1 || d[11] != 1) shim::fail("a box of another shape");
    m.boxes++;
    m.flying.push_back({(int)(m.random() % 40), [=] {
        for (u64 r = 0; r < d[9]; r++)
            for (u64 c = 0; c < d[8]; c++) {
                int64_t place[4] = {(int64_t)(x + c), (int64_t)(row + r), head, page};
                bool inside = true;
                for (int i = 0; i < 4; i++) inside &= place[i] >= 0 && (u64)place[i] < d[1 + i];
                u16 value = 0;
                if (inside) memcpy(&value, (const char*)d[0] + 2 * place[0] + d[5] * place[1] + d[6] * place[2] + d[7] * place[3], 2);
                u32 address = at + r * 128 + c * 2;
                address ^= (address >> 7 & 7) << 4;
                memcpy(shim::at(address, 2, 2), &value, 2);
            }
        auto& b = shim::barrier_at(barrier);
        if (!b.made) shim::fail("a copy for no barrier");
        b.tx -= d[8] * d[9] * 2;
        shim::turn(b);
    }});
}
