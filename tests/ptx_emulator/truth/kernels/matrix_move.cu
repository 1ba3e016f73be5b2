// ldmatrix, stmatrix and movmatrix. `offsets` [32] are the byte offsets each lane gives as a row address; registers are
// [count, 32 lanes].
#include "common.cuh"

#define OUT1 "=r"(r[0])
#define OUT2 "=r"(r[0]), "=r"(r[1])
#define OUT4 "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
#define LIST_OUT1 "{%0}, [%1]"
#define LIST_OUT2 "{%0,%1}, [%2]"
#define LIST_OUT4 "{%0,%1,%2,%3}, [%4]"

#define LDMATRIX(name, count, suffix)                                                                               \
    extern "C" __global__ void name(const uint8_t *in, const uint32_t *offsets, uint32_t *out) {                    \
        __shared__ __align__(128) uint8_t smem[1024];                                                               \
        const int lane = threadIdx.x;                                                                               \
        truth::copy_words(smem, in, sizeof(smem));                                                                  \
        __syncthreads();                                                                                            \
        uint32_t r[count];                                                                                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x" #count suffix ".shared.b16 " LIST_OUT##count ";"               \
                     : OUT##count                                                                                   \
                     : "r"(truth::shared_address(smem) + offsets[lane])                                             \
                     : "memory");                                                                                   \
        for (int i = 0; i < count; ++i) out[i * 32 + lane] = r[i];                                                  \
    }

LDMATRIX(ldmatrix_x1, 1, "")
LDMATRIX(ldmatrix_x2, 2, "")
LDMATRIX(ldmatrix_x4, 4, "")
LDMATRIX(ldmatrix_x1_trans, 1, ".trans")
LDMATRIX(ldmatrix_x2_trans, 2, ".trans")
LDMATRIX(ldmatrix_x4_trans, 4, ".trans")

#define IN1 "r"(in[lane])
#define IN2 IN1, "r"(in[32 + lane])
#define IN4 IN2, "r"(in[64 + lane]), "r"(in[96 + lane])
#define LIST_IN1 "[%0], {%1}"
#define LIST_IN2 "[%0], {%1,%2}"
#define LIST_IN4 "[%0], {%1,%2,%3,%4}"

#define STMATRIX(name, count, suffix)                                                                                \
    extern "C" __global__ void name(const uint32_t *in, const uint32_t *offsets, uint8_t *out) {                     \
        __shared__ __align__(128) uint8_t smem[1024];                                                                \
        const int lane = threadIdx.x;                                                                                \
        truth::fill_words(smem, 0xA5A5A5A5u, sizeof(smem));                                                          \
        __syncwarp();                                                                                                \
        asm volatile("stmatrix.sync.aligned.m8n8.x" #count suffix ".shared.b16 " LIST_IN##count ";" ::"r"(           \
                         truth::shared_address(smem) + offsets[lane]),                                               \
                     IN##count                                                                                       \
                     : "memory");                                                                                    \
        __syncwarp();                                                                                                \
        truth::copy_words(out, smem, sizeof(smem));                                                                  \
    }

STMATRIX(stmatrix_x1, 1, "")
STMATRIX(stmatrix_x2, 2, "")
STMATRIX(stmatrix_x4, 4, "")
STMATRIX(stmatrix_x1_trans, 1, ".trans")
STMATRIX(stmatrix_x2_trans, 2, ".trans")
STMATRIX(stmatrix_x4_trans, 4, ".trans")

extern "C" __global__ void movmatrix(const uint32_t *in, uint32_t *out) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(in[threadIdx.x]));
    out[threadIdx.x] = r;
}
