// What `cuda_attend.cu` asks of a GPU beside `cuda_arithmetic.h`, and a scheduler that runs the threads of a cluster as fibers.
//
// Whatever waits (barriers, votes, shuffles, MMAs) hands over to another fiber, in an order that is drawn anew in every round, and some
// warps run far ahead of others, so that a missing barrier shows. A bulk copy leaves rubbish where its bytes will be, until somebody waits
// for it; so does shared memory that nobody wrote. An MMA sums in double and rounds once: bits are those of the hardware where sums are
// exact.
#undef _FORTIFY_SOURCE // jumps between stacks
#include <setjmp.h>
#include <ucontext.h>

#include <vector>

#include "cuda_arithmetic.h"

#define KERNEL static void

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Place { int x; };
static Place threadIdx, blockIdx;

struct Meeting { // of threads: whoever comes last lets all go on
    int arrived = 0;
    long turn = 0;
};

struct Warp : Meeting {
    struct Given { float c[4]; uint4 a; u32 b[2]; float x; int i; } given[2][32];
    float result[2][32][4];
};

struct Copy { char* to; const void* from; };

struct Cta {
    std::vector<char> memory;
    char* shared;
    Meeting named[16];
    Warp warps[32];
    Copy copies[64]; // by the place of their barrier
};

struct Fiber { ucontext_t start; jmp_buf here; std::vector<char> stack; int cta, thread; bool started, done; };

static std::vector<Cta> ctas;
static std::vector<Fiber> fibers;
static Meeting whole_cluster;
static Fiber* me;
static jmp_buf scheduler;
static long events;

[[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "cuda_on_cpu: %s (block %d, thread %d)\n", what, blockIdx.x, threadIdx.x);
    exit(3);
}

static Cta& cta() { return ctas[me->cta]; }
static int lane_of() { return me->thread % 32; }

static void hand_over() {
    if (!_setjmp(me->here)) _longjmp(scheduler, 1);
}

[[noreturn]] static void finish() {
    me->done = true;
    _longjmp(scheduler, 1);
}

static void arrive(Meeting& m, int threads) {
    events++;
    if (++m.arrived > threads) fail("more threads at a barrier than it is for");
    if (m.arrived == threads) { m.arrived = 0; m.turn++; }
}

static void meet(Meeting& m, int threads) {
    long turn = m.turn;
    arrive(m, threads);
    while (m.turn == turn) hand_over();
}

static void poison(void* p, size_t bytes) { memset(p, 0xA7, bytes); }

// Deposits `given`, waits for the whole warp; returns which half of the buffers holds what all gave.
template <class Last>
static int together(const Warp::Given& given, Last last) {
    Warp& warp = cta().warps[me->thread / 32];
    int half = warp.turn & 1;
    warp.given[half][lane_of()] = given;
    if (warp.arrived == 31) last(warp, half);
    meet(warp, 32);
    return half;
}

static void nothing_more(Warp&, int) {}
static const Warp::Given* of_all(const Warp::Given& given) {
    int half = together(given, nothing_more);
    return cta().warps[me->thread / 32].given[half];
}

static float shuffle_xor(float x, int lanes) { Warp::Given g{}; g.x = x; return of_all(g)[lane_of() ^ lanes].x; }
static int shuffle(int x, int lane) { Warp::Given g{}; g.i = x; return of_all(g)[lane].i; }

static u32 ballot(bool x) {
    Warp::Given g{};
    g.i = x;
    const Warp::Given* all = of_all(g);
    u32 found = 0;
    for (int i = 0; i < 32; i++) found |= (u32)all[i].i << i;
    return found;
}

static void warp_sync() { of_all({}); }

static void multiply(Warp& warp, int half) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Warp::Given& x = warp.given[half][lane];
        int g = lane / 4, t = lane % 4;
        const u32 words[4] = {x.a.x, x.a.y, x.a.z, x.a.w};
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 2; i++) a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + i] = bf16_value(words[r] >> (16 * i) & 0xFFFF);
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < 2; i++) b[2 * t + 8 * r + i][g] = bf16_value(x.b[r] >> (16 * i) & 0xFFFF);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            float total = warp.given[half][lane].c[i];  // in the order of `ordered_attention`
            for (int k = 0; k < 16; k++) total += a[row][k] * b[k][column];
            warp.result[half][lane][i] = total;
        }
}

static void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    Warp::Given g{};
    memcpy(g.c, c, sizeof g.c);
    g.a = a;
    g.b[0] = b0;
    g.b[1] = b1;
    int half = together(g, multiply);
    memcpy(c, cta().warps[me->thread / 32].result[half][lane_of()], sizeof g.c);
}

static void block_sync() { meet(cta().named[0], THREADS); }
static void named_sync(int id, int threads) { meet(cta().named[id], threads); }
static void named_arrive(int id, int threads) { arrive(cta().named[id], threads); }
static void cluster_sync() { meet(whole_cluster, THREADS * CTAS); }
static float remote_float(const void* p, int rank) { return *(const float*)(ctas[rank].shared + ((const char*)p - cta().shared)); }
static float4 remote_float4(const void* p, int rank) { return *(const float4*)(ctas[rank].shared + ((const char*)p - cta().shared)); }

enum : u64 { MADE = 0x1111, ASKED, OPEN };
static void barrier_init(u64* barrier) { *barrier = MADE; }
static void barriers_made() {}

static Copy& copy_of(u64* barrier) { return cta().copies[barrier - (u64*)(cta().shared + BARRIERS)]; }

static void copy_plane(void* to, const void* from, u64* barrier) {
    if (*barrier != MADE) fail("a barrier that was not made, or is in use");
    if ((uintptr_t)from % 16 || ((char*)to - cta().shared) % 16) fail("a bulk copy needs 16-byte addresses");
    *barrier = ASKED;
    poison(to, PLANE);
    copy_of(barrier) = {(char*)to, from};
    events++;
}

static void wait_for(u64* barrier) {
    while (*barrier == MADE) hand_over();
    if (*barrier == ASKED) {
        memcpy(copy_of(barrier).to, copy_of(barrier).from, PLANE);
        *barrier = OPEN;
        events++;
    }
    if (*barrier != OPEN) fail("waiting for no barrier");
}

static void after_the_kernel_before() {}
static char* shared_memory() { return cta().shared; }

static void run_cluster(int first, unsigned seed, void (*body)()) {
    u64 state = seed;
    auto random = [&state] { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; };
    ctas.clear();
    ctas.resize(CTAS);
    for (Cta& c : ctas) {
        c.memory.resize(SHARED_BYTES + 128);
        poison(c.memory.data(), c.memory.size());
        c.shared = (char*)(((uintptr_t)c.memory.data() + 127) & ~(uintptr_t)127);
    }
    whole_cluster = {};
    fibers.resize(CTAS * THREADS);
    for (int i = 0; i < CTAS * THREADS; i++) {
        Fiber& f = fibers[i];
        f.stack.resize(1 << 15);
        f.cta = i / THREADS;
        f.thread = i % THREADS;
        f.done = false;
        f.started = false;
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.data();
        f.start.uc_stack.ss_size = f.stack.size();
        makecontext(&f.start, body, 0);
    }
    std::vector<int> order(CTAS * THREADS / 32); // warps come in any order; the lanes of one after the other
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    for (size_t left = fibers.size(); left;) {
        long before = events;
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random() % i]);
        for (int warp : order)
            for (int turns = random() % 8 ? 1 : 500; turns; turns--) { // now and then one runs far ahead
                long moved = events;
                for (int lane = 0; lane < 32; lane++) {
                    me = &fibers[warp * 32 + lane];
                    if (me->done) continue;
                    threadIdx.x = me->thread;
                    blockIdx.x = first + me->cta;
                    if (!_setjmp(scheduler)) { // comes back when the fiber hands over
                        if (me->started) _longjmp(me->here, 1);
                        me->started = true;
                        setcontext(&me->start);
                    }
                    if (me->done) left--, events++;
                }
                if (moved == events) break;
            }
        if (before == events && left) fail("nobody goes on");
    }
}
