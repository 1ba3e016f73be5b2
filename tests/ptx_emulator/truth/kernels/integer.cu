// Integer instructions, one output row per instruction in the order written: the names in the cases follow it.
#include "common.cuh"

// All rows read x, y, z (and w, a small number) of their column.
#define ROW(text) asm volatile(text : "=r"(r) : "r"(x), "r"(y), "r"(z), "r"(w)); out[(row++) * 64 + i] = r;

extern "C" __global__ void words(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x, x = in[i], y = in[64 + i], z = in[128 + i], w = in[192 + i];
    uint32_t r, row = 0;
    ROW("mul.lo.u32 %0, %1, %2;")
    ROW("mul.hi.u32 %0, %1, %2;")
    ROW("mul.hi.s32 %0, %1, %2;")
    ROW("mad.lo.s32 %0, %1, %2, %3;")
    ROW("mad.hi.u32 %0, %1, %2, %3;")
    ROW("mad.hi.s32 %0, %1, %2, %3;")
    ROW("mul24.lo.u32 %0, %1, %2;")
    ROW("mul24.hi.s32 %0, %1, %2;")
    ROW("mad24.lo.s32 %0, %1, %2, %3;")
    ROW("sad.u32 %0, %1, %2, %3;")
    ROW("sad.s32 %0, %1, %2, %3;")
    ROW("div.u32 %0, %1, %4;")
    ROW("div.s32 %0, %1, %4;")
    ROW("rem.u32 %0, %1, %4;")
    ROW("rem.s32 %0, %1, %4;")
    ROW("abs.s32 %0, %1;")
    ROW("neg.s32 %0, %1;")
    ROW("min.u32 %0, %1, %2;")
    ROW("max.s32 %0, %1, %2;")
    ROW("add.sat.s32 %0, %1, %2;")
    ROW("sub.sat.s32 %0, %1, %2;")
    ROW("popc.b32 %0, %1;")
    ROW("clz.b32 %0, %1;")
    ROW("brev.b32 %0, %1;")
    ROW("bfind.u32 %0, %1;")
    ROW("bfind.s32 %0, %1;")
    ROW("bfind.shiftamt.u32 %0, %1;")
    ROW("bfe.u32 %0, %1, %4, 9;")
    ROW("bfe.s32 %0, %1, %4, 9;")
    ROW("bfe.s32 %0, %1, 27, %4;")
    ROW("bfi.b32 %0, %1, %2, %4, 7;")
    ROW("bfi.b32 %0, %1, %2, 13, %4;")
    ROW("prmt.b32 %0, %1, %2, %3;")
    ROW("prmt.b32.f4e %0, %1, %2, %3;")
    ROW("prmt.b32.b4e %0, %1, %2, %3;")
    ROW("prmt.b32.rc8 %0, %1, %2, %3;")
    ROW("prmt.b32.ecl %0, %1, %2, %3;")
    ROW("prmt.b32.ecr %0, %1, %2, %3;")
    ROW("prmt.b32.rc16 %0, %1, %2, %3;")
    ROW("lop3.b32 %0, %1, %2, %3, 0x96;")
    ROW("lop3.b32 %0, %1, %2, %3, 0xca;")
    ROW("lop3.b32 %0, %1, %2, %3, 0x1b;")
    ROW("shf.l.wrap.b32 %0, %1, %2, %4;")
    ROW("shf.r.wrap.b32 %0, %1, %2, %4;")
    ROW("shf.l.clamp.b32 %0, %1, %2, %4;")
    ROW("shf.r.clamp.b32 %0, %1, %2, %4;")
    ROW("shl.b32 %0, %1, %4;")
    ROW("shr.u32 %0, %1, %4;")
    ROW("shr.s32 %0, %1, %4;")
    ROW("not.b32 %0, %1;")
    ROW("cnot.b32 %0, %4;")
    ROW("szext.wrap.s32 %0, %1, %4;")
    ROW("szext.clamp.u32 %0, %1, %4;")
    ROW("bmsk.wrap.b32 %0, %4, 5;")
    ROW("bmsk.clamp.b32 %0, %4, %4;")
    ROW("dp4a.u32.u32 %0, %1, %2, %3;")
    ROW("dp4a.s32.s32 %0, %1, %2, %3;")
    ROW("dp4a.u32.s32 %0, %1, %2, %3;")
    ROW("dp2a.lo.s32.s32 %0, %1, %2, %3;")
    ROW("dp2a.hi.u32.s32 %0, %1, %2, %3;")
    ROW("slct.u32.s32 %0, %1, %2, %3;")
    ROW("set.gt.u32.s32 %0, %1, %2;")
    ROW("set.lo.and.u32.u32 %0, %1, %2, 1;")
    ROW("min.s16x2 %0, %1, %2;")
    ROW("max.u16x2 %0, %1, %2;")
    ROW("add.u16x2 %0, %1, %2;")
    ROW("min.relu.s32 %0, %1, %2;")
    ROW("max.relu.s16x2 %0, %1, %2;")
    ROW("{.reg .pred p, q; setp.lt.s32 p|q, %1, %2; selp.b32 %0, %3, 7, p; @q add.u32 %0, %0, 1;}")
    ROW("{.reg .pred p; setp.ge.u32 p, %1, %2; setp.ne.xor.s32 p, %3, 0, p; selp.b32 %0, 1, 0, p;}")
    ROW("{.reg .b16 h, l; mov.b32 {l, h}, %1; mov.b32 %0, {h, l};}")
    ROW("{.reg .b8 a, b, c, d; .reg .b16 e; mov.b32 {a, b, c, d}, %1; mov.b32 %0, {d, c, b, a};}")
    ROW("fns.b32 %0, %1, 5, 2;")
}

#define ROW64(text) asm volatile(text : "=l"(r) : "l"(x), "l"(y), "l"(z), "r"(w)); out[(row++) * 64 + i] = r;

extern "C" __global__ void doublewords(const uint64_t *in, uint64_t *out) {
    const uint32_t i = threadIdx.x, w = static_cast<uint32_t>(in[192 + i]);
    const uint64_t x = in[i], y = in[64 + i], z = in[128 + i];
    uint64_t r;
    uint32_t row = 0;
    ROW64("mul.lo.s64 %0, %1, %2;")
    ROW64("mul.hi.u64 %0, %1, %2;")
    ROW64("mul.hi.s64 %0, %1, %2;")
    ROW64("mad.lo.u64 %0, %1, %2, %3;")
    ROW64("mad.hi.s64 %0, %1, %2, %3;")
    ROW64("{.reg .u32 a, b; cvt.u32.u64 a, %1; cvt.u32.u64 b, %2; mul.wide.u32 %0, a, b;}")
    ROW64("{.reg .s32 a, b; cvt.u32.u64 a, %1; cvt.u32.u64 b, %2; mad.wide.s32 %0, a, b, %3;}")
    ROW64("div.u64 %0, %1, %3;")
    ROW64("div.s64 %0, %1, %3;")
    ROW64("rem.u64 %0, %1, %3;")
    ROW64("rem.s64 %0, %1, %3;")
    ROW64("shl.b64 %0, %1, %4;")
    ROW64("shr.u64 %0, %1, %4;")
    ROW64("shr.s64 %0, %1, %4;")
    ROW64("brev.b64 %0, %1;")
    ROW64("{.reg .u32 a; popc.b64 a, %1; cvt.u64.u32 %0, a;}")
    ROW64("{.reg .u32 a; clz.b64 a, %3; cvt.u64.u32 %0, a;}")
    ROW64("{.reg .u32 a; bfind.s64 a, %1; cvt.s64.s32 %0, a;}")
    ROW64("bfe.s64 %0, %1, %4, 21;")
    ROW64("bfe.u64 %0, %1, 40, %4;")
    ROW64("bfi.b64 %0, %1, %2, %4, 21;")
    ROW64("min.s64 %0, %1, %2;")
    ROW64("max.u64 %0, %1, %2;")
    ROW64("abs.s64 %0, %1;")
    ROW64("{.reg .u32 a, b; mov.b64 {a, b}, %1; add.u32 a, a, b; mov.b64 %0, {b, a};}")
    ROW64("slct.u64.s32 %0, %1, %2, %4;")
    ROW64("cvt.s64.s32 %0, %4;")
    ROW64("{.reg .pred p; setp.gt.s64 p, %1, %2; selp.b64 %0, %1, %3, p;}")
}

// Carries: 128-bit sum, difference and product by 32-bit pieces; out [12, 64].
extern "C" __global__ void carries(const uint32_t *in, uint32_t *out) {
    const uint32_t i = threadIdx.x;
    uint32_t a[4], b[4], r[4];
    for (int j = 0; j < 4; ++j) {
        a[j] = in[j * 64 + i];
        b[j] = in[(4 + j) * 64 + i];
    }
    asm volatile("add.cc.u32 %0, %4, %8;\n\taddc.cc.u32 %1, %5, %9;\n\taddc.cc.u32 %2, %6, %10;\n\taddc.u32 %3, %7, %11;"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
    for (int j = 0; j < 4; ++j) out[j * 64 + i] = r[j];
    asm volatile("sub.cc.u32 %0, %4, %8;\n\tsubc.cc.u32 %1, %5, %9;\n\tsubc.cc.u32 %2, %6, %10;\n\tsubc.u32 %3, %7, %11;"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
    for (int j = 0; j < 4; ++j) out[(4 + j) * 64 + i] = r[j];
    asm volatile("mul.lo.u32 %0, %4, %6;\n\t"
                 "mul.hi.u32 %1, %4, %6;\n\t"
                 "mad.lo.cc.u32 %1, %5, %6, %1;\n\t"
                 "madc.hi.u32 %2, %5, %6, 0;\n\t"
                 "mad.lo.cc.u32 %1, %4, %7, %1;\n\t"
                 "madc.hi.cc.u32 %2, %4, %7, %2;\n\t"
                 "addc.u32 %3, 0, 0;\n\t"
                 "mad.lo.cc.u32 %2, %5, %7, %2;\n\t"
                 "madc.hi.u32 %3, %5, %7, %3;"
                 : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
    for (int j = 0; j < 4; ++j) out[(8 + j) * 64 + i] = r[j];
}

// 16-bit and 8-bit arithmetic and every narrowing: x is a 64-bit word; out [18, 64] of 64 bits.
#define NARROW(text) asm volatile(text : "=l"(r) : "l"(x), "l"(y)); out[(row++) * 64 + i] = r;

extern "C" __global__ void narrowing(const uint64_t *in, uint64_t *out) {
    const uint32_t i = threadIdx.x;
    const uint64_t x = in[i], y = in[64 + i];
    uint64_t r;
    uint32_t row = 0;
    NARROW("{.reg .u8 a; cvt.u8.u64 a, %1; cvt.u64.u8 %0, a;}")
    NARROW("{.reg .s8 a; cvt.s8.s64 a, %1; cvt.s64.s8 %0, a;}")
    NARROW("{.reg .u16 a; cvt.u16.u64 a, %1; cvt.u64.u16 %0, a;}")
    NARROW("{.reg .s16 a; cvt.s16.s64 a, %1; cvt.s64.s16 %0, a;}")
    NARROW("{.reg .u32 a; cvt.sat.u32.s64 a, %1; cvt.u64.u32 %0, a;}")
    NARROW("{.reg .s32 a; cvt.sat.s32.s64 a, %1; cvt.s64.s32 %0, a;}")
    NARROW("{.reg .s16 a; cvt.sat.s16.s64 a, %1; cvt.s64.s16 %0, a;}")
    NARROW("{.reg .u16 a; cvt.sat.u16.s64 a, %1; cvt.u64.u16 %0, a;}")
    NARROW("{.reg .s8 a; cvt.sat.s8.s64 a, %1; cvt.s64.s8 %0, a;}")
    NARROW("{.reg .u8 a; cvt.sat.u8.s64 a, %1; cvt.u64.u8 %0, a;}")
    NARROW("cvt.sat.s64.u64 %0, %1;")
    NARROW("cvt.sat.u64.s64 %0, %1;")
    NARROW("{.reg .u16 a, b, c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; mul.lo.u16 c, a, b; cvt.u64.u16 %0, c;}")
    NARROW("{.reg .s16 a, b, c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; mul.hi.s16 c, a, b; cvt.s64.s16 %0, c;}")
    NARROW("{.reg .s16 a, b; .reg .s32 c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; mul.wide.s16 c, a, b; cvt.s64.s32 %0, c;}")
    NARROW("{.reg .u16 a, b, c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; add.u16 c, a, b; shr.u16 c, c, 3; cvt.u64.u16 %0, c;}")
    NARROW("{.reg .s16 a, b, c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; min.s16 c, a, b; shr.s16 c, c, 2; cvt.s64.s16 %0, c;}")
    NARROW("{.reg .b16 a, b, c; cvt.u16.u64 a, %1; cvt.u16.u64 b, %2; xor.b16 c, a, b; not.b16 c, c; cvt.u64.u16 %0, c;}")
}
