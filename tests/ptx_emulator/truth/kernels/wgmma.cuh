// Warpgroup matrix multiply: operand lists, fragments, and the body that every SS kernel shares.
//
// D [64, N]: thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds, in 32-bit register r,
// row 16 w + l / 4 + 8 (r / 2 % 2), column 8 (r / 4) + 2 (l % 4) + r % 2. A 16-bit D packs two columns in a register.
// A and B reach shared memory as byte images laid out by the host; the matrix descriptors come from the host as well,
// without their start addresses.
#pragma once

#include "common.cuh"

// The asm operand list of the first n registers: %0, %1, ...
#define LIST4 "%0,%1,%2,%3"
#define LIST8 LIST4 ",%4,%5,%6,%7"
#define LIST12 LIST8 ",%8,%9,%10,%11"
#define LIST16 LIST12 ",%12,%13,%14,%15"
#define LIST32 LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64                                                                                                         \
    LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
           "%58,%59,%60,%61,%62,%63"
#define LIST128                                                                                                      \
    LIST64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,"   \
           "%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
           "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define REGS4(k, i) k(d[i]), k(d[i + 1]), k(d[i + 2]), k(d[i + 3])
#define REGS8(k, i) REGS4(k, i), REGS4(k, i + 4)
#define REGS12(k, i) REGS8(k, i), REGS4(k, i + 8)
#define REGS16(k, i) REGS8(k, i), REGS8(k, i + 8)
#define REGS32(k, i) REGS16(k, i), REGS16(k, i + 16)
#define REGS64(k, i) REGS32(k, i), REGS32(k, i + 32)
#define REGS128(k, i) REGS64(k, i), REGS64(k, i + 64)

namespace truth {

// What the host says about the operands of one product.
struct Operands {
    const uint8_t *a;      // image of A, `a_bytes` long, placed at `a_offset` of shared memory
    const uint8_t *b;      // image of B likewise
    uint64_t a_descriptor;  // all fields but the start address
    uint64_t b_descriptor;
    const int *steps;  // [k_steps, 2] byte offsets of a K step's start in A and in B
    uint32_t a_bytes, b_bytes, a_offset, b_offset, k_steps, scale_d;
};

__device__ __forceinline__ uint64_t descriptor(uint64_t fields, uint32_t address) {
    return fields | static_cast<uint64_t>((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ int row_of(int reg) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + reg / 2 % 2 * 8; }

__device__ __forceinline__ int column_of(int reg) { return reg / 4 * 8 + threadIdx.x % 4 * 2 + reg % 2; }

// A 16-bit accumulator: register r holds the two columns from 8 (r / 2) + 2 (l % 4) on.
__device__ __forceinline__ int packed_row(int reg) { return row_of(2 * reg); }
__device__ __forceinline__ int packed_column(int reg) { return column_of(2 * reg); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int Regs>
__device__ __forceinline__ void load_accumulator(float (&d)[Regs], const float *c) {
#pragma unroll
    for (int r = 0; r < Regs; ++r) d[r] = c[row_of(r) * Regs * 2 + column_of(r)];
}

template <int Regs>
__device__ __forceinline__ void store_accumulator(const float (&d)[Regs], float *out) {
#pragma unroll
    for (int r = 0; r < Regs; ++r) out[row_of(r) * Regs * 2 + column_of(r)] = d[r];
}

template <int Regs>
__device__ __forceinline__ void load_accumulator(int (&d)[Regs], const int *c) {
#pragma unroll
    for (int r = 0; r < Regs; ++r) d[r] = c[row_of(r) * Regs * 2 + column_of(r)];
}

template <int Regs>
__device__ __forceinline__ void store_accumulator(const int (&d)[Regs], int *out) {
#pragma unroll
    for (int r = 0; r < Regs; ++r) out[row_of(r) * Regs * 2 + column_of(r)] = d[r];
}

template <int Regs>
__device__ __forceinline__ void load_accumulator(uint32_t (&d)[Regs], const uint16_t *c) {
#pragma unroll
    for (int r = 0; r < Regs; ++r)
        d[r] = *reinterpret_cast<const uint32_t *>(c + packed_row(r) * Regs * 4 + packed_column(r));
}

template <int Regs>
__device__ __forceinline__ void store_accumulator(const uint32_t (&d)[Regs], uint16_t *out) {
#pragma unroll
    for (int r = 0; r < Regs; ++r)
        *reinterpret_cast<uint32_t *>(out + packed_row(r) * Regs * 4 + packed_column(r)) = d[r];
}

// Runs `multiply(d, a descriptor, b descriptor, scale-d)` over the K steps of one product.
template <int Regs, class Register, class Element, class Multiply>
__device__ __forceinline__ void product(const Operands &o, const Element *c, Element *out, Multiply multiply) {
    extern __shared__ __align__(1024) uint8_t smem[];
    copy_words(smem + o.a_offset, o.a, o.a_bytes);
    copy_words(smem + o.b_offset, o.b, o.b_bytes);
    fence_async_shared();
    __syncthreads();
    Register d[Regs];
    load_accumulator<Regs>(d, c);
    wgmma_fence();
#pragma unroll 1
    for (uint32_t k = 0; k < o.k_steps; ++k)
        multiply(d, descriptor(o.a_descriptor, shared_address(smem + o.a_offset) + o.steps[2 * k]),
                 descriptor(o.b_descriptor, shared_address(smem + o.b_offset) + o.steps[2 * k + 1]),
                 static_cast<uint32_t>(k > 0 || o.scale_d));
    wgmma_commit();
    wgmma_wait<0>();
    store_accumulator<Regs>(d, out);
}

}  // namespace truth

// One kernel: `shape` as m64n64k16, `types` as f32.bf16.bf16, `tail` the immediates after scale-d (each with its
// leading comma), `a`, `b` and `p` the numbers of the operands that follow the registers.
#define WGMMA_SS(name, shape, types, Register, Element, constraint, regs, a, b, p, tail)                              \
    extern "C" __global__ void __launch_bounds__(128) name(const truth::Operands o, const Element *c, Element *out) { \
        truth::product<regs, Register>(                                                                               \
            o, c, out, [](Register(&d)[regs], uint64_t da, uint64_t db, uint32_t scale) {                            \
                asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p ", 0;\n\t"                                   \
                             "wgmma.mma_async.sync.aligned." shape "." types " {" LIST##regs "}, %" #a ", %" #b       \
                             ", p" tail ";\n\t}"                                                                      \
                             : REGS##regs(constraint, 0)                                                              \
                             : "l"(da), "l"(db), "r"(scale));                                                         \
            });                                                                                                       \
    }
