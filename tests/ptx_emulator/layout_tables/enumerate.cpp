// Writes down the operand layouts of the tensor-core instructions as CuTe's layout algebra states them.
//
// This program is ours; it instantiates the layouts of an installed CuTe and evaluates them on the host, coordinate by
// coordinate. No GPU is needed. `enumerate FILE` writes records, each a text line
//     NAME DIM0 DIM1 ...
// followed by DIM0*DIM1*... little-endian int32 in C order. pack.py turns them into the committed file; its docstring
// has the command lines. (CuTe prints a complaint to stdout whenever a shared-memory address is taken on the host; only
// the strides of the descriptors are read, so it does not matter.)
//
// Record names and index order (see tables.py for their meaning):
//   tmem_d/CASE/VALUE/mM/nN/tileT   [3: lane, column, bit in column][row][n]
//   tmem_a/CASE/BYTES/mM            [3][row][k]
//   registers/SHAPE/COUNT[/packed]  [2: lane, column][register][half][thread]
//   copy/SHAPE                      [2: source row, lane][value]  (tcgen05.cp)
//   shared/GENERATION/MAJOR/SWIZZLE/BITS/ORDER/ROWS   [rows][k] byte offsets
//   descriptor/... (same path)      [2 + steps]: low and high word for start 0, then each K step's start in bytes
//   instruction/KIND/A/B/D          [case][5: M, N, A MN-major, B MN-major, word]
//   wgmma_d/N, wgmma_a/BITS         [2: row, column][value][thread of 128]
//   mma/SHAPE/BITS/{a,b,c}          [2: m or n, k or n][value][thread of 32]
//   {ld,st}matrix/KIND/COUNT        [2: thread whose address names the row, byte in row][register][byte][thread]

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

using namespace cute;

namespace {

using Table = std::vector<int32_t>;

std::FILE* output = nullptr;

void emit(std::string const& name, std::vector<int> const& dims, Table const& table) {
  size_t count = 1;
  std::string line = name;
  for (int dim : dims) {
    line += ' ' + std::to_string(dim);
    count *= dim;
  }
  if (count != table.size()) {
    std::fprintf(stderr, "%s: %zu values, dimensions say %zu\n", name.c_str(), table.size(), count);
    std::abort();
  }
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), output);
  std::fwrite(table.data(), sizeof(int32_t), table.size(), output);
}

// A tensor-memory address in bits: lane stride 2^21, column stride 32.
struct Cell {
  int lane, column, bit;
  explicit Cell(int64_t bits) : lane(int(bits >> 21)), column(int(bits & 0x1fffff) / 32), bit(int(bits & 31)) {}
};

template <int... N, class Body>
void for_each_n(std::integer_sequence<int, N...>, Body body) {
  (body(Int<N>{}), ...);
}

template <int First, int Step, int... I>
auto steps_impl(std::integer_sequence<int, I...>) -> std::integer_sequence<int, (First + Step * I)...>;
// First, First + Step, ..., 256
template <int First, int Step>
using steps = decltype(steps_impl<First, Step>(std::make_integer_sequence<int, (256 - First) / Step + 1>{}));

// ---- tensor memory: accumulators and operand A ----------------------------------------------------------------------

template <class Fragment, int M, int N, int Rows, int Tiles>
void tensor_memory(std::string const& name, int value_bits, int tile) {
  auto tensor = Fragment::make(make_shape(make_shape(Int<M>{}, Int<N>{}), Int<Tiles>{}, Int<1>{}));
  auto layout = tensor.layout();
  Table table(3 * Rows * N);
  for (int row = 0; row < Rows; ++row) {
    for (int n = 0; n < N; ++n) {
      Cell cell(int64_t(layout(make_coord(row, n), tile, 0)) * value_bits);
      table[(0 * Rows + row) * N + n] = cell.lane;
      table[(1 * Rows + row) * N + n] = cell.column;
      table[(2 * Rows + row) * N + n] = cell.bit;
    }
  }
  emit(name, {3, Rows, N}, table);
}

template <class Value>
void accumulators(std::string const& value) {
  constexpr int bits = sizeof_bits_v<Value>;
  auto name = [&](char const* which, int m, int n, int tile) {
    return std::string("tmem_d/") + which + "/" + value + "/m" + std::to_string(m) + "/n" + std::to_string(n) + "/tile" +
           std::to_string(tile);
  };
  for_each_n(steps<8, 8>{}, [&](auto n) {
    constexpr int N = decltype(n)::value;
    tensor_memory<UMMA::tmem_frg_1sm<Value>, 128, N, 128, 1>(name("cta1", 128, N, 0), bits, 0);
    tensor_memory<UMMA::tmem_frg_1sm<Value>, 64, N, 64, 2>(name("cta1", 64, N, 0), bits, 0);
    tensor_memory<UMMA::tmem_frg_1sm<Value>, 64, N, 64, 2>(name("cta1", 64, N, 1), bits, 1);
  });
  // Two CTAs: M of the fragment is what one CTA holds.
  for_each_n(steps<16, 16>{}, [&](auto n) {
    constexpr int N = decltype(n)::value;
    tensor_memory<UMMA::tmem_frg_2sm<Value>, 128, N, 128, 1>(name("cta2", 256, N, 0), bits, 0);
    tensor_memory<UMMA::tmem_frg_2sm<Value>, 64, N, 64, 1>(name("cta2", 128, N, 0), bits, 0);
  });
  for_each_n(std::integer_sequence<int, 64, 128, 256>{}, [&](auto n) {
    constexpr int N = decltype(n)::value;
    tensor_memory<UMMA::tmem_frg_ws_1sm<Value>, 128, N, 128, 1>(name("ws", 128, N, 0), bits, 0);
    tensor_memory<UMMA::tmem_frg_ws_1sm<Value>, 64, N, 64, 1>(name("ws", 64, N, 0), bits, 0);
    tensor_memory<UMMA::tmem_frg_ws_1sm<Value>, 32, N, 32, 1>(name("ws", 32, N, 0), bits, 0);
  });
}

template <class Value>
void operand_a() {
  constexpr int bits = sizeof_bits_v<Value>;
  constexpr int K = 256 / bits;
  std::string tail = "/" + std::to_string(bits / 8) + "/m";
  using One = UMMA::tmem_frg_1sm<Value, Value, UMMA::TmemAllocMode::NonInterleaved>;
  using Two = UMMA::tmem_frg_2sm<Value, Value, UMMA::TmemAllocMode::Duplicated>;
  tensor_memory<One, 128, K, 128, 1>("tmem_a/cta1" + tail + "128", bits, 0);
  tensor_memory<One, 64, K, 64, 1>("tmem_a/cta1" + tail + "64", bits, 0);
  tensor_memory<Two, 128, K, 128, 1>("tmem_a/cta2" + tail + "256", bits, 0);
  tensor_memory<Two, 64, K, 128, 1>("tmem_a/cta2" + tail + "128", bits, 0);  // 64 rows, twice
}

// ---- tcgen05.ld / st: registers -------------------------------------------------------------------------------------

// The traits map (thread, bit) to a logical bit (register side) and the logical bit to a tensor-memory address.
template <class Load>
void register_map(std::string const& name, bool packed) {
  using Traits = Copy_Traits<Load>;
  typename Traits::DstLayout register_side;
  typename Traits::ValID address;
  int registers = int(size<1>(register_side)) / 32;
  int halves = packed ? 2 : 1;
  Table table(2 * registers * halves * 32);
  for (int reg = 0; reg < registers; ++reg) {
    for (int half = 0; half < halves; ++half) {
      for (int thread = 0; thread < 32; ++thread) {
        int first = 32 * reg + 16 * half, bits = 32 / halves;
        int64_t start = address(int(register_side(thread, first)));
        for (int bit = 0; bit < bits; ++bit) {
          if (address(int(register_side(thread, first + bit))) != start + bit) std::abort();
        }
        Cell cell(start);
        if (cell.bit != 0) std::abort();
        int at = (reg * halves + half) * 32 + thread;
        table[at] = cell.lane;
        table[registers * halves * 32 + at] = cell.column;
      }
    }
  }
  emit(name, {2, registers, halves, 32}, table);
}

template <class... Loads>
void register_maps(std::string const& shape, bool packed) {
  int count = 1;
  auto one = [&](auto load) {
    register_map<decltype(load)>("registers/" + shape + "/" + std::to_string(count) + (packed ? "/packed" : ""), packed);
    count *= 2;
  };
  (one(Loads{}), ...);
}

void all_register_maps() {
  using namespace SM100::TMEM::LOAD;
  register_maps<SM100_TMEM_LOAD_32dp32b1x, SM100_TMEM_LOAD_32dp32b2x, SM100_TMEM_LOAD_32dp32b4x,
                SM100_TMEM_LOAD_32dp32b8x, SM100_TMEM_LOAD_32dp32b16x, SM100_TMEM_LOAD_32dp32b32x,
                SM100_TMEM_LOAD_32dp32b64x, SM100_TMEM_LOAD_32dp32b128x>("32x32b", false);
  register_maps<SM100_TMEM_LOAD_32dp32b1x_16b, SM100_TMEM_LOAD_32dp32b2x_16b, SM100_TMEM_LOAD_32dp32b4x_16b,
                SM100_TMEM_LOAD_32dp32b8x_16b, SM100_TMEM_LOAD_32dp32b16x_16b, SM100_TMEM_LOAD_32dp32b32x_16b,
                SM100_TMEM_LOAD_32dp32b64x_16b, SM100_TMEM_LOAD_32dp32b128x_16b>("32x32b", true);
  register_maps<SM100_TMEM_LOAD_16dp32b1x, SM100_TMEM_LOAD_16dp32b2x, SM100_TMEM_LOAD_16dp32b4x,
                SM100_TMEM_LOAD_16dp32b8x, SM100_TMEM_LOAD_16dp32b16x, SM100_TMEM_LOAD_16dp32b32x,
                SM100_TMEM_LOAD_16dp32b64x, SM100_TMEM_LOAD_16dp32b128x>("16x32bx2", false);
  register_maps<SM100_TMEM_LOAD_16dp32b1x_16b, SM100_TMEM_LOAD_16dp32b2x_16b, SM100_TMEM_LOAD_16dp32b4x_16b,
                SM100_TMEM_LOAD_16dp32b8x_16b, SM100_TMEM_LOAD_16dp32b16x_16b, SM100_TMEM_LOAD_16dp32b32x_16b,
                SM100_TMEM_LOAD_16dp32b64x_16b, SM100_TMEM_LOAD_16dp32b128x_16b>("16x32bx2", true);
  register_maps<SM100_TMEM_LOAD_16dp64b1x, SM100_TMEM_LOAD_16dp64b2x, SM100_TMEM_LOAD_16dp64b4x,
                SM100_TMEM_LOAD_16dp64b8x, SM100_TMEM_LOAD_16dp64b16x, SM100_TMEM_LOAD_16dp64b32x,
                SM100_TMEM_LOAD_16dp64b64x, SM100_TMEM_LOAD_16dp64b128x>("16x64b", false);
  register_maps<SM100_TMEM_LOAD_16dp64b1x_16b, SM100_TMEM_LOAD_16dp64b2x_16b, SM100_TMEM_LOAD_16dp64b4x_16b,
                SM100_TMEM_LOAD_16dp64b8x_16b, SM100_TMEM_LOAD_16dp64b16x_16b, SM100_TMEM_LOAD_16dp64b32x_16b,
                SM100_TMEM_LOAD_16dp64b64x_16b, SM100_TMEM_LOAD_16dp64b128x_16b>("16x64b", true);
  register_maps<SM100_TMEM_LOAD_16dp128b1x, SM100_TMEM_LOAD_16dp128b2x, SM100_TMEM_LOAD_16dp128b4x,
                SM100_TMEM_LOAD_16dp128b8x, SM100_TMEM_LOAD_16dp128b16x, SM100_TMEM_LOAD_16dp128b32x,
                SM100_TMEM_LOAD_16dp128b64x>("16x128b", false);
  register_maps<SM100_TMEM_LOAD_16dp128b1x_16b, SM100_TMEM_LOAD_16dp128b2x_16b, SM100_TMEM_LOAD_16dp128b4x_16b,
                SM100_TMEM_LOAD_16dp128b8x_16b, SM100_TMEM_LOAD_16dp128b16x_16b, SM100_TMEM_LOAD_16dp128b32x_16b,
                SM100_TMEM_LOAD_16dp128b64x_16b>("16x128b", true);
  register_maps<SM100_TMEM_LOAD_16dp256b1x, SM100_TMEM_LOAD_16dp256b2x, SM100_TMEM_LOAD_16dp256b4x,
                SM100_TMEM_LOAD_16dp256b8x, SM100_TMEM_LOAD_16dp256b16x, SM100_TMEM_LOAD_16dp256b32x>("16x256b", false);
  register_maps<SM100_TMEM_LOAD_16dp256b1x_16b, SM100_TMEM_LOAD_16dp256b2x_16b, SM100_TMEM_LOAD_16dp256b4x_16b,
                SM100_TMEM_LOAD_16dp256b8x_16b, SM100_TMEM_LOAD_16dp256b16x_16b, SM100_TMEM_LOAD_16dp256b32x_16b>(
      "16x256b", true);
}

// tcgen05.cp: which source row lands in which lane. Source bits are numbered row + Rows * bit, then further row blocks.
template <class Copy, int Rows, int Bits>
void copy_map(std::string const& name) {
  using Traits = Copy_Traits<Copy>;
  typename Traits::SrcLayout source;
  typename Traits::DstLayout destination;
  typename Traits::ValID address;
  Table rows, lanes;
  for (int value = 0; value < int(size<1>(source)); ++value) {
    int from = source(0, value);
    int bit = from / Rows % Bits, row = from % Rows + Rows * (from / (Rows * Bits));
    Cell cell(address(int(destination(0, value))));
    if (cell.column * 32 + cell.bit != bit) std::abort();
    if (bit == 0) {
      rows.push_back(row);
      lanes.push_back(cell.lane);
    }
  }
  int count = int(rows.size());
  rows.insert(rows.end(), lanes.begin(), lanes.end());
  emit(name, {2, count}, rows);
}

void copy_maps() {
  using namespace SM100::TMEM::UTCCP;
  copy_map<SM100_UTCCP_128dp256bit_1cta, 128, 256>("copy/128x256b");
  copy_map<SM100_UTCCP_128dp128bit_1cta, 128, 128>("copy/128x128b");
  // Stated as the rows 0, 32, 64, 96 of 128: the four rows go to one lane of each quarter.
  copy_map<SM100_UTCCP_4dp256bit_1cta, 128, 256>("copy/4x256b");
  copy_map<SM100_UTCCP_4x32dp128bit_1cta, 32, 128>("copy/32x128b.warpx4");
  copy_map<SM100_UTCCP_2x64dp128bitlw0213_1cta, 64, 128>("copy/64x128b.warpx2::02_13");
  copy_map<SM100_UTCCP_2x64dp128bitlw0123_1cta, 32, 128>("copy/64x128b.warpx2::01_23");
}

// ---- shared memory: canonical layouts and their descriptors ---------------------------------------------------------

template <class Value, int Rows, int K, class Atom, class Order, class MakeDescriptor>
void shared_matrix(std::string const& path, Atom atom, Order order, MakeDescriptor make_descriptor) {
  constexpr int bytes = sizeof_bits_v<Value> / 8;
  constexpr int step = 32 / bytes;  // the depth of one instruction
  auto layout = tile_to_shape(atom, Shape<Int<Rows>, Int<K>>{}, order);
  auto offsets = as_position_independent_swizzle_layout(layout);
  Table table(Rows * K);
  for (int row = 0; row < Rows; ++row) {
    for (int k = 0; k < K; ++k) table[row * K + k] = int(offsets(row, k)) * bytes;
  }
  emit("shared/" + path, {Rows, K}, table);

  auto tensor = make_tensor(make_smem_ptr(static_cast<Value*>(nullptr)), layout);
  auto tile = local_tile(tensor, Shape<Int<Rows>, Int<step>>{}, make_coord(Int<0>{}, Int<0>{}));
  uint64_t bits = make_descriptor(tile);
  Table words{int32_t(bits), int32_t(bits >> 32)};
  for (int k = 0; k < K; k += step) words.push_back(int(layout.layout_b()(0, k)) * bytes);
  emit("descriptor/" + path, {int(words.size())}, words);
}

template <class Value, UMMA::Major major, int Rows, int K, class Atom>
void tcgen05_matrix(std::string const& path, Atom atom) {
  auto make = [](auto const& tile) { return uint64_t(UMMA::make_umma_desc<major>(tile).desc_); };
  std::string tail = "/" + std::to_string(sizeof_bits_v<Value>);
  std::string rows = "/" + std::to_string(Rows);
  shared_matrix<Value, Rows, K>("tcgen05/" + path + tail + "/rows_first" + rows, atom, Step<_1, _2>{}, make);
  shared_matrix<Value, Rows, K>("tcgen05/" + path + tail + "/k_first" + rows, atom, Step<_2, _1>{}, make);
}

template <class Value, GMMA::Major major, int Rows, int K, class Atom>
void wgmma_matrix(std::string const& path, Atom atom) {
  auto make = [](auto const& tile) { return uint64_t(GMMA::make_gmma_desc<major>(tile).desc_); };
  std::string tail = "/" + std::to_string(sizeof_bits_v<Value>);
  std::string rows = "/" + std::to_string(Rows);
  shared_matrix<Value, Rows, K>("wgmma/" + path + tail + "/rows_first" + rows, atom, Step<_1, _2>{}, make);
  shared_matrix<Value, Rows, K>("wgmma/" + path + tail + "/k_first" + rows, atom, Step<_2, _1>{}, make);
}

// Two swizzle widths deep, so that the step from one atom to the next is in the table.
template <class Value, int Rows>
void tcgen05_k_major() {
  constexpr int K = 2 * 128 / (sizeof_bits_v<Value> / 8);
  constexpr auto major = UMMA::Major::K;
  tcgen05_matrix<Value, major, Rows, K>("k/128B", UMMA::Layout_K_SW128_Atom<Value>{});
  tcgen05_matrix<Value, major, Rows, K>("k/64B", UMMA::Layout_K_SW64_Atom<Value>{});
  tcgen05_matrix<Value, major, Rows, K>("k/32B", UMMA::Layout_K_SW32_Atom<Value>{});
  tcgen05_matrix<Value, major, Rows, K>("k/none", UMMA::Layout_K_INTER_Atom<Value>{});
}

template <class Value, int Rows>
void tcgen05_mn_major() {
  constexpr int K = 2 * 32 / (sizeof_bits_v<Value> / 8);
  constexpr auto major = UMMA::Major::MN;
  constexpr int bytes = Rows * sizeof_bits_v<Value> / 8;
  if constexpr (sizeof_bits_v<Value> == 32) {  // has this one layout, and no other type has it (PTX ISA 9.7.16.10.3)
    tcgen05_matrix<Value, major, Rows, K>("mn/128B_ATOM32B", UMMA::Layout_MN_SW128_32B_Atom<Value>{});
  } else {
    if constexpr (bytes >= 128) tcgen05_matrix<Value, major, Rows, K>("mn/128B", UMMA::Layout_MN_SW128_Atom<Value>{});
    if constexpr (bytes >= 64) tcgen05_matrix<Value, major, Rows, K>("mn/64B", UMMA::Layout_MN_SW64_Atom<Value>{});
    tcgen05_matrix<Value, major, Rows, K>("mn/32B", UMMA::Layout_MN_SW32_Atom<Value>{});
    tcgen05_matrix<Value, major, Rows, K>("mn/none", UMMA::Layout_MN_INTER_Atom<Value>{});
  }
}

template <class Value, int Rows>
void wgmma_k_major() {
  constexpr int K = 2 * 128 / (sizeof_bits_v<Value> / 8);
  constexpr auto major = GMMA::Major::K;
  wgmma_matrix<Value, major, Rows, K>("k/128B", GMMA::Layout_K_SW128_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, K>("k/64B", GMMA::Layout_K_SW64_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, K>("k/32B", GMMA::Layout_K_SW32_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, K>("k/none", GMMA::Layout_K_INTER_Atom<Value>{});
}

template <int Rows>
void wgmma_mn_major() {
  using Value = half_t;  // the other sizes must be K-major
  constexpr auto major = GMMA::Major::MN;
  if constexpr (Rows >= 64) wgmma_matrix<Value, major, Rows, 32>("mn/128B", GMMA::Layout_MN_SW128_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, 32>("mn/64B", GMMA::Layout_MN_SW64_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, 32>("mn/32B", GMMA::Layout_MN_SW32_Atom<Value>{});
  wgmma_matrix<Value, major, Rows, 32>("mn/none", GMMA::Layout_MN_INTER_Atom<Value>{});
}

template <int Rows>
void shared_matrices() {
  tcgen05_k_major<half_t, Rows>();
  tcgen05_k_major<float_e4m3_t, Rows>();
  tcgen05_k_major<tfloat32_t, Rows>();
  tcgen05_mn_major<half_t, Rows>();
  tcgen05_mn_major<float_e4m3_t, Rows>();
  tcgen05_mn_major<tfloat32_t, Rows>();
  wgmma_k_major<half_t, Rows>();
  wgmma_k_major<float_e4m3_t, Rows>();
  wgmma_k_major<tfloat32_t, Rows>();
  wgmma_mn_major<Rows>();
}

// ---- instruction descriptors ----------------------------------------------------------------------------------------

template <class A, class B, class D, int M, int N>
void instruction_majors(Table& table) {
  auto add = [&](uint32_t word, int a, int b) { table.insert(table.end(), {M, N, a, b, int32_t(word)}); };
  add(UMMA::make_instr_desc<A, B, D, M, N, UMMA::Major::K, UMMA::Major::K>().desc_, 0, 0);
  add(UMMA::make_instr_desc<A, B, D, M, N, UMMA::Major::MN, UMMA::Major::K>().desc_, 1, 0);
  add(UMMA::make_instr_desc<A, B, D, M, N, UMMA::Major::K, UMMA::Major::MN>().desc_, 0, 1);
  add(UMMA::make_instr_desc<A, B, D, M, N, UMMA::Major::MN, UMMA::Major::MN>().desc_, 1, 1);
}

template <class A, class B, class D>
void instructions(std::string const& name) {
  Table table;
  for_each_n(std::integer_sequence<int, 16, 64, 128, 256>{}, [&](auto n) {
    constexpr int N = decltype(n)::value;
    instruction_majors<A, B, D, 64, N>(table);
    instruction_majors<A, B, D, 128, N>(table);
  });
  emit("instruction/" + name, {int(table.size()) / 5, 5}, table);
}

void all_instructions() {
  instructions<half_t, half_t, float>("f16/f16/f16/f32");
  instructions<half_t, half_t, half_t>("f16/f16/f16/f16");
  instructions<bfloat16_t, bfloat16_t, float>("f16/bf16/bf16/f32");
  instructions<tfloat32_t, tfloat32_t, float>("tf32/tf32/tf32/f32");
  instructions<float_e4m3_t, float_e5m2_t, float>("f8f6f4/e4m3/e5m2/f32");
  instructions<float_e5m2_t, float_e4m3_t, half_t>("f8f6f4/e5m2/e4m3/f16");
  instructions<int8_t, uint8_t, int32_t>("i8/s8/u8/s32");
  instructions<uint8_t, int8_t, int32_t>("i8/u8/s8/s32");
}

// ---- register fragments ---------------------------------------------------------------------------------------------

// A layout (thread, value) -> row + Rows * column.
template <class Layout_>
void fragment(std::string const& name, Layout_ layout, int rows) {
  int threads = int(size<0>(layout)), values = int(size<1>(layout));
  Table table(2 * values * threads);
  for (int value = 0; value < values; ++value) {
    for (int thread = 0; thread < threads; ++thread) {
      int at = int(layout(thread, value));
      table[value * threads + thread] = at % rows;
      table[(values + value) * threads + thread] = at / rows;
    }
  }
  emit(name, {2, values, threads}, table);
}

template <class Op>
void mma(std::string const& name) {
  using Traits = MMA_Traits<Op>;
  typename Traits::Shape_MNK shape;
  fragment("mma/" + name + "/a", typename Traits::ALayout{}, int(get<0>(shape)));
  fragment("mma/" + name + "/b", typename Traits::BLayout{}, int(get<1>(shape)));
  fragment("mma/" + name + "/c", typename Traits::CLayout{}, int(get<0>(shape)));
}

void fragments() {
  for_each_n(steps<8, 8>{}, [&](auto n) {
    constexpr int N = decltype(n)::value;
    fragment("wgmma_d/" + std::to_string(N), SM90::GMMA::CLayout_64xN<N>{}, 64);
  });
  fragment("wgmma_a/32", SM90::GMMA::ALayout_64x8{}, 64);
  fragment("wgmma_a/16", SM90::GMMA::ALayout_64x16{}, 64);
  fragment("wgmma_a/8", SM90::GMMA::ALayout_64x32{}, 64);
  mma<SM80_16x8x8_F32F16F16F32_TN>("m16n8k8/16");
  mma<SM80_16x8x16_F32F16F16F32_TN>("m16n8k16/16");
  mma<SM80_16x8x4_F32TF32TF32F32_TN>("m16n8k4/32");
  mma<SM80_16x8x8_F32TF32TF32F32_TN>("m16n8k8/32");
  mma<SM80_8x8x16_S32S8S8S32_TN>("m8n8k16/8");
  mma<SM80_16x8x16_S32S8S8S32_TN>("m16n8k16/8");
  mma<SM80_16x8x32_S32S8S8S32_TN>("m16n8k32/8");
  mma<SM89_16x8x32_F32E4M3E4M3F32_TN>("m16n8k32/fp8");
  mma<SM80_8x8x4_F64F64F64F64_TN>("m8n8k4/64");
  mma<SM90_16x8x4_F64F64F64F64_TN>("m16n8k4/64");
  mma<SM90_16x8x8_F64F64F64F64_TN>("m16n8k8/64");
  mma<SM90_16x8x16_F64F64F64F64_TN>("m16n8k16/64");
}

// Row r of a matrix is the 16 bytes whose address thread r supplies; both sides name the same bits.
template <class AddressSide, class RegisterSide>
void matrix_map(std::string const& name, AddressSide address_side, RegisterSide register_side) {
  int registers = int(size<1>(register_side)) / 32;
  Table table(2 * registers * 4 * 32);
  for (int reg = 0; reg < registers; ++reg) {
    for (int byte = 0; byte < 4; ++byte) {
      for (int thread = 0; thread < 32; ++thread) {
        int bit = int(register_side(thread, 32 * reg + 8 * byte)), row = 0;
        while (row < 32 && !(int(address_side(row, 0)) <= bit && bit < int(address_side(row, 0)) + 128)) ++row;
        if (row == 32) std::abort();
        int at = (reg * 4 + byte) * 32 + thread;
        table[at] = row;
        table[registers * 128 + at] = (bit - int(address_side(row, 0))) / 8;
      }
    }
  }
  emit(name, {2, registers, 4, 32}, table);
}

template <class Load>
void load_matrix(std::string const& name) {
  matrix_map("ldmatrix/" + name, typename Copy_Traits<Load>::SrcLayout{}, typename Copy_Traits<Load>::DstLayout{});
}

template <class Store>
void store_matrix(std::string const& name) {
  matrix_map("stmatrix/" + name, typename Copy_Traits<Store>::DstLayout{}, typename Copy_Traits<Store>::SrcLayout{});
}

void matrix_maps() {
  load_matrix<SM75_U32x1_LDSM_N>("plain/1");
  load_matrix<SM75_U32x2_LDSM_N>("plain/2");
  load_matrix<SM75_U32x4_LDSM_N>("plain/4");
  load_matrix<SM75_U16x2_LDSM_T>("trans/1");
  load_matrix<SM75_U16x4_LDSM_T>("trans/2");
  load_matrix<SM75_U16x8_LDSM_T>("trans/4");
  store_matrix<SM90_U32x1_STSM_N>("plain/1");
  store_matrix<SM90_U32x2_STSM_N>("plain/2");
  store_matrix<SM90_U32x4_STSM_N>("plain/4");
  store_matrix<SM90_U16x2_STSM_T>("trans/1");
  store_matrix<SM90_U16x4_STSM_T>("trans/2");
  store_matrix<SM90_U16x8_STSM_T>("trans/4");
  // No 8-bit transposing loads: CuTe's traits of them contradict what Triton relies on, on hardware (see layouts.py).
  store_matrix<SM100_U8x4_STSM_T>("b8trans/1");
  store_matrix<SM100_U8x8_STSM_T>("b8trans/2");
  store_matrix<SM100_U8x16_STSM_T>("b8trans/4");
}

}  // namespace

int main(int count, char** arguments) {
  output = count == 2 ? std::fopen(arguments[1], "wb") : nullptr;
  if (output == nullptr) {
    std::fprintf(stderr, "usage: enumerate FILE\n");
    return 2;
  }
  accumulators<float>("f32");
  accumulators<half_t>("f16");
  operand_a<tfloat32_t>();
  operand_a<half_t>();
  operand_a<float_e4m3_t>();
  all_register_maps();
  copy_maps();
  shared_matrices<32>();
  shared_matrices<64>();
  shared_matrices<128>();
  shared_matrices<256>();
  all_instructions();
  fragments();
  matrix_maps();
  return std::fclose(output);
}
