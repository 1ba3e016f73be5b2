// mbarrier objects used by hand: counts, phases, transaction bytes, dropped arrivals, both ways of waiting.
// A state is opaque, so that only what is derived from it is shown.
#include "common.cuh"

namespace truth {

__device__ __forceinline__ uint64_t arrive_state(uint32_t barrier) {
    uint64_t state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
    return state;
}

__device__ __forceinline__ uint64_t arrive_count(uint32_t barrier, uint32_t count) {
    uint64_t state;
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1], %2;"
                 : "=l"(state)
                 : "r"(barrier), "r"(count)
                 : "memory");
    return state;
}

__device__ __forceinline__ uint64_t arrive_no_complete(uint32_t barrier, uint32_t count) {
    uint64_t state;
    asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], %2;"
                 : "=l"(state)
                 : "r"(barrier), "r"(count)
                 : "memory");
    return state;
}

__device__ __forceinline__ uint64_t arrive_drop(uint32_t barrier, uint32_t count) {
    uint64_t state;
    asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1], %2;" : "=l"(state) : "r"(barrier), "r"(count) : "memory");
    return state;
}

__device__ __forceinline__ uint32_t pending(uint64_t state) {
    uint32_t count;
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
    return count;
}

__device__ __forceinline__ uint32_t done(uint32_t barrier, uint64_t state) {
    uint32_t result;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "mbarrier.test_wait.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(result)
                 : "r"(barrier), "l"(state)
                 : "memory");
    return result;
}

__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void complete(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ uint32_t parities(uint32_t barrier) {
    return test_wait(barrier, 0) + 2 * test_wait(barrier, 1);
}

}  // namespace truth

// One thread drives one barrier; out [40] lists what it sees, step by step.
extern "C" __global__ void single_thread(uint32_t *out) {
    __shared__ __align__(8) uint64_t storage;
    const uint32_t b = truth::shared_address(&storage);
    int i = 0;
    truth::barrier_init(b, 3);
    out[i++] = truth::parities(b);  // before any phase completed
    const uint64_t first = truth::arrive_state(b);
    out[i++] = truth::pending(first);
    out[i++] = truth::done(b, first);
    const uint64_t second = truth::arrive_no_complete(b, 1);
    out[i++] = truth::pending(second);
    const uint64_t third = truth::arrive_state(b);
    out[i++] = truth::pending(third);
    out[i++] = truth::done(b, first) + 2 * truth::done(b, third);
    out[i++] = truth::parities(b);

    // Bytes hold the phase open after all arrivals.
    truth::expect(b, 64);
    const uint64_t all = truth::arrive_count(b, 3);
    out[i++] = truth::pending(all);
    out[i++] = truth::done(b, all);
    truth::complete(b, 48);
    out[i++] = truth::done(b, all);
    truth::complete(b, 16);
    out[i++] = truth::done(b, all);
    out[i++] = truth::parities(b);

    // Bytes may complete before they are expected.
    truth::complete(b, 32);
    out[i++] = truth::parities(b);
    truth::arrive_count(b, 2);
    uint64_t last;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], %2;" : "=l"(last) : "r"(b), "r"(32) : "memory");
    out[i++] = truth::pending(last);
    out[i++] = truth::done(b, last);
    out[i++] = truth::parities(b);

    // A dropped arrival counts in this phase and is missing from the next ones.
    const uint64_t dropped = truth::arrive_drop(b, 1);
    out[i++] = truth::pending(dropped);
    const uint64_t rest = truth::arrive_count(b, 2);
    out[i++] = truth::done(b, rest);
    const uint64_t next = truth::arrive_state(b);
    out[i++] = truth::pending(next);
    out[i++] = truth::done(b, next);
    const uint64_t ends = truth::arrive_state(b);
    out[i++] = truth::pending(ends);
    out[i++] = truth::done(b, ends);
    out[i++] = truth::parities(b);

    // The same memory holds a fresh barrier after inval.
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(b) : "memory");
    truth::barrier_init(b, 1);
    out[i++] = truth::parities(b);
    const uint64_t only = truth::arrive_state(b);
    out[i++] = truth::pending(only);
    out[i++] = truth::done(b, only);
    // Expecting nothing is an arrival like any other.
    truth::arrive_expect(b, 0);
    out[i++] = truth::parities(b);
}

// 128 threads meet `rounds` times; every thread waits by state, and reads what another one wrote.
extern "C" __global__ void many_threads(const uint32_t *in, uint32_t *out, uint32_t rounds) {
    __shared__ uint32_t values[2][128];
    __shared__ __align__(8) uint64_t storage;
    const uint32_t b = truth::shared_address(&storage), t = threadIdx.x;
    if (t == 0) truth::barrier_init(b, 128);
    __syncthreads();
    uint32_t value = in[t];
    for (uint32_t i = 0; i < rounds; ++i) {
        values[i % 2][t] = value;
        const uint64_t state = truth::arrive_state(b);
        uint32_t waiting;
        do {
            asm volatile("{\n\t"
                         ".reg .pred p;\n\t"
                         "mbarrier.try_wait.acquire.cta.shared::cta.b64 p, [%1], %2, %3;\n\t"
                         "selp.u32 %0, 0, 1, p;\n\t"
                         "}"
                         : "=r"(waiting)
                         : "r"(b), "l"(state), "r"(1000)
                         : "memory");
        } while (waiting);
        value = values[i % 2][(t * 5 + 17) % 128] + 3 * i;
    }
    out[t] = value;
}

// Four warps, one arrival each; the warps differ in how long they work, chosen by `work` [4, rounds].
extern "C" __global__ void uneven_warps(const uint32_t *work, uint32_t *out, uint32_t rounds) {
    __shared__ uint32_t sums[2][4];
    __shared__ __align__(8) uint64_t storage;
    const uint32_t b = truth::shared_address(&storage), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) truth::barrier_init(b, 4);
    __syncthreads();
    uint32_t value = warp + 1;
    for (uint32_t i = 0; i < rounds; ++i) {
        for (uint32_t j = 0; j < work[warp * rounds + i]; ++j) value = value * 1664525u + 1013904223u;
        __nanosleep(20 * warp);
        __syncwarp();  // the other lanes have read the round before
        if (lane == 0) {
            sums[i % 2][warp] = value;
            truth::arrive(b);
        }
        truth::wait(b, i % 2);
        value = sums[i % 2][(warp + 1) % 4] ^ (value >> 3);
    }
    out[threadIdx.x] = value + lane;
}
