// Clusters of two: distributed shared memory, remote barriers, multicast, st.async and copies between the CTAs.
#include "common.cuh"

namespace truth {

__device__ __forceinline__ uint32_t load_cluster(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

}  // namespace truth

// Each CTA of 64 threads reads, writes and counts in the other one's memory. out [2, 4, 64].
extern "C" __global__ void peer_memory(const uint32_t *in, uint32_t *out) {
    __shared__ uint32_t mine[64], written[64], counted[64];
    const uint32_t rank = truth::cluster_rank(), t = threadIdx.x, other = rank ^ 1;
    mine[t] = in[rank * 64 + t];
    counted[t] = t;
    truth::cluster_sync();
    const uint32_t peer = truth::peer_address(truth::shared_address(mine), other);
    const uint32_t read = truth::load_cluster(peer + 4 * (63 - t));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(
                     truth::peer_address(truth::shared_address(written + t), other)),
                 "r"(read * 3 + rank)
                 : "memory");
    uint32_t old;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "r"(truth::peer_address(truth::shared_address(counted + t), other)), "r"(100 + t)
                 : "memory");
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(
                     truth::peer_address(truth::shared_address(counted + t / 8), other)),
                 "r"(1000 * t)
                 : "memory");
    // The generic form of mapa, and a load through the generic address.
    uint64_t generic;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(reinterpret_cast<uint64_t>(mine + t)), "r"(other));
    const uint32_t again = *reinterpret_cast<const uint32_t *>(generic);
    uint32_t owner;
    asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(peer));
    truth::cluster_sync();
    uint32_t *row = out + rank * 4 * 64;
    row[t] = written[t];
    row[64 + t] = counted[t];
    row[128 + t] = again * 4 + owner;
    row[192 + t] = t < 8 ? 0 : old;  // the first eight are counted in any order
}

// Each CTA loads its half of the box into both (multicast); both barriers see both halves.
extern "C" __global__ void multicast(const __grid_constant__ CUtensorMap map, uint32_t rows, uint32_t bytes,
                                     uint8_t *out) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), rank = truth::cluster_rank();
    if (threadIdx.x == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
    }
    truth::cluster_sync();
    if (threadIdx.x == 0) {
        truth::arrive_expect(barrier, 2 * bytes);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(truth::shared_address(smem + rank * bytes)),
                     "l"(&map), "r"(0), "r"(rank * rows), "r"(barrier), "h"(static_cast<uint16_t>(3))
                     : "memory");
    }
    truth::wait(barrier, 0);
    truth::copy_words(out + rank * 2 * bytes, smem, 2 * bytes);
    truth::cluster_sync();
}

// A bulk copy without a map, multicast to both CTAs by rank 0 alone; rank 1 only waits.
extern "C" __global__ void multicast_bulk(const uint8_t *in, uint32_t bytes, uint8_t *out) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), rank = truth::cluster_rank();
    if (threadIdx.x == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
        truth::arrive_expect(barrier, bytes);
    }
    truth::cluster_sync();
    if (rank == 0 && threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1], %2, [%3], %4;" ::"r"(truth::shared_address(smem)),
                     "l"(in), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
                     : "memory");
    truth::wait(barrier, 0);
    truth::copy_words(out + rank * bytes, smem, bytes);
    truth::cluster_sync();
}

// Ping-pong: the threads of each CTA write to the other one and arrive on its barrier, `rounds` times.
extern "C" __global__ void remote_arrive(uint32_t *out, uint32_t rounds) {
    __shared__ uint32_t box[32];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), rank = truth::cluster_rank();
    const uint32_t t = threadIdx.x, other = rank ^ 1;
    if (t == 0) {
        truth::barrier_init(barrier, 32);
        truth::barrier_init_fence();
    }
    truth::cluster_sync();
    const uint32_t peer_box = truth::peer_address(truth::shared_address(box), other);
    const uint32_t peer_barrier = truth::peer_address(barrier, other);
    uint32_t value = t + 1;
    for (uint32_t i = 0; i < rounds; ++i) {
        const bool sends = (i % 2) == rank;
        if (sends) {
            asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_box + 4 * ((t + 1) % 32)), "r"(value)
                         : "memory");
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_barrier) : "memory");
        } else {
            truth::wait_cluster(barrier, (i / 2) % 2);
            value = box[t] * 5 + rank;
        }
    }
    out[rank * 32 + t] = value;
    truth::cluster_sync();
}

// st.async and red.async: the bytes complete a transaction on the barrier that lies beside the data.
extern "C" __global__ void store_async(const uint32_t *in, uint32_t *out) {
    __shared__ __align__(16) uint32_t single[32], pair[64], quad[128], sum[4];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), rank = truth::cluster_rank();
    const uint32_t t = threadIdx.x, other = rank ^ 1;
    if (t < 4) sum[t] = 1000 + rank;
    if (t == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
        truth::arrive_expect(barrier, 32 * (4 + 8 + 16 + 4));
    }
    truth::cluster_sync();
    const uint32_t at = truth::peer_address(barrier, other);
    const uint32_t *v = in + rank * 256 + 8 * t;
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     truth::peer_address(truth::shared_address(single + t), other)),
                 "r"(v[0]), "r"(at)
                 : "memory");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(
                     truth::peer_address(truth::shared_address(pair + 2 * t), other)),
                 "r"(v[1]), "r"(v[2]), "r"(at)
                 : "memory");
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            truth::peer_address(truth::shared_address(quad + 4 * t), other)),
        "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(at)
        : "memory");
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(
                     truth::peer_address(truth::shared_address(sum + t % 4), other)),
                 "r"(v[7]), "r"(at)
                 : "memory");
    truth::wait_cluster(barrier, 0);
    uint32_t *row = out + rank * 228;
    row[t] = single[t];
    for (int i = 0; i < 2; ++i) row[32 + 2 * t + i] = pair[2 * t + i];
    for (int i = 0; i < 4; ++i) row[96 + 4 * t + i] = quad[4 * t + i];
    if (t < 4) row[224 + t] = sum[t];
    truth::cluster_sync();
}

// Shared memory to the other CTA's shared memory: a copy, and a reduction onto what lies there.
extern "C" __global__ void bulk_to_peer(const uint32_t *in, uint32_t *out) {
    __shared__ __align__(128) uint32_t source[128], copied[128], reduced[128];
    __shared__ __align__(8) uint64_t barrier_storage;
    const uint32_t barrier = truth::shared_address(&barrier_storage), rank = truth::cluster_rank();
    const uint32_t t = threadIdx.x, other = rank ^ 1, bytes = sizeof(source);
    for (uint32_t i = t; i < 128; i += 32) {
        source[i] = in[rank * 128 + i];
        reduced[i] = i;
    }
    if (t == 0) {
        truth::barrier_init(barrier, 1);
        truth::barrier_init_fence();
        truth::arrive_expect(barrier, 2 * bytes);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    truth::cluster_sync();
    if (t == 0) {
        const uint32_t at = truth::peer_address(barrier, other);
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                         "r"(truth::peer_address(truth::shared_address(copied), other)),
                     "r"(truth::shared_address(source)), "r"(bytes), "r"(at)
                     : "memory");
        asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
                     "[%0], [%1], %2, [%3];" ::"r"(truth::peer_address(truth::shared_address(reduced), other)),
                     "r"(truth::shared_address(source)), "r"(bytes), "r"(at)
                     : "memory");
    }
    truth::wait_cluster(barrier, 0);
    for (uint32_t i = t; i < 128; i += 32) {
        out[rank * 256 + i] = copied[i];
        out[rank * 256 + 128 + i] = reduced[i];
    }
    truth::cluster_sync();
}

// Special registers of a grid of clusters; one row of 16 words per CTA, in linear CTA order.
extern "C" __global__ void cluster_registers(uint32_t *out) {
    uint32_t *row = out + (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * 16;
#define SHOW(slot, reg)                                      \
    {                                                        \
        uint32_t value;                                      \
        asm volatile("mov.u32 %0, %%" reg ";" : "=r"(value)); \
        row[slot] = value;                                   \
    }
    SHOW(0, "cluster_ctarank")
    SHOW(1, "cluster_nctarank")
    SHOW(2, "cluster_ctaid.x")
    SHOW(3, "cluster_ctaid.y")
    SHOW(4, "cluster_ctaid.z")
    SHOW(5, "cluster_nctaid.x")
    SHOW(6, "cluster_nctaid.y")
    SHOW(7, "clusterid.x")
    SHOW(8, "clusterid.y")
    SHOW(9, "clusterid.z")
    SHOW(10, "nclusterid.x")
    SHOW(11, "nclusterid.y")
    SHOW(12, "nclusterid.z")
    SHOW(13, "ctaid.x")
    SHOW(14, "nctaid.y")
#undef SHOW
    uint32_t is_explicit;
    asm volatile("{\n\t.reg .pred p;\n\tmov.pred p, %%is_explicit_cluster;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(is_explicit));
    row[15] = is_explicit;
}
