// Compares the instruction sets of this machine with the generic kernels, and rows alone with rows in a batch.
//
// A program without Python, so that it can be cross-compiled and run under an emulator:
//   compare            prints a line for each instruction set, and fails if one is wrong
// It links the kernels as they are. Inputs are fixed numbers from a small generator.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../kernel_table.h"
#include "../pack.h"
#include "../packed.h"
#include "../pages.h"
#include "../row_scratch.h"

using namespace kvilt;

namespace {

struct Random {
  uint64_t state;
  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33);
  }
  float number() { return float(bits()) / float(1u << 30) - 1.0f; }  // in [-1, 1)
};

int failures = 0;
void expect(bool holds, const KernelTable& table, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("WRONG %s: %s\n", table.isa, what.c_str());
}

// Where the blocks of a format hold float16 numbers, which random bits would make infinite.
std::vector<int> half_places(const std::string& format) {
  if (format == "Q6_K") return {208};
  if (format == "Q3_K") return {108};
  if (format == "Q2_K") return {80, 82};
  if (format == "MXFP4") return {};
  if (format == "Q4_1" || format == "Q5_1" || format == "Q4_K" || format == "Q5_K") return {0, 2};
  return {0};
}

struct Matrix {
  PackedWeight weight;
  std::vector<uint8_t> bytes;
};

Matrix random_matrix(const std::string& format, int64_t outputs, int64_t inputs, Layout layout, Random random) {
  const Packing& packing = *find_packing(format);
  const int64_t row_bytes = inputs / packing.elements * packing.bytes;
  std::vector<uint8_t> source(size_t(outputs * row_bytes));
  for (uint8_t& byte : source) byte = uint8_t(random.bits());
  const bool plain = packing.elements == 1;
  for (int64_t at = 0; at < outputs * row_bytes; at += packing.bytes) {
    for (int place : plain ? std::vector<int>{} : half_places(format)) {
      const uint16_t scale = uint16_t(0x2000 + random.bits() % 0x800);  // 0.008 to 0.03
      std::memcpy(&source[size_t(at + place)], &scale, 2);
    }
    if (format == "MXFP4") source[size_t(at)] = uint8_t(118 + random.bits() % 3);
    const float number = random.number();
    if (format == "F32") std::memcpy(&source[size_t(at)], &number, 4);
    if (format == "BF16") std::memcpy(&source[size_t(at)], reinterpret_cast<const char*>(&number) + 2, 2);
    if (format == "F16") source[size_t(at) + 1] = uint8_t(0x30 | (source[size_t(at) + 1] & 0x87));
  }
  Matrix made{{packing.kind, outputs, inputs, nullptr}, {}};
  const int64_t size = tile_bytes(packing.kind, inputs);
  made.bytes.resize(size_t(made.weight.tiles() * size));
  for (int64_t tile = 0; tile < made.weight.tiles(); ++tile)
    packing.tile(layout)(source.data(), row_bytes, outputs, inputs, tile, made.bytes.data() + tile * size);
  made.weight.data = made.bytes.data();
  return made;
}

std::vector<float> product(const KernelTable& table, const Matrix& m, const float* x, int64_t rows) {
  const int64_t inputs = m.weight.inputs, groups = (rows + kRowGroup - 1) / kRowGroup;
  RowScratch scratch(table.linear.layout);
  scratch.reserve(rows, inputs, groups);
  const QuantizedRows quantized = scratch.rows(x, inputs, 0, 0, rows);
  for (int64_t item = 0; item < table.linear.quantize_items(quantized); ++item) table.linear.quantize(quantized, item);
  std::vector<float> out(size_t(rows * m.weight.outputs));
  table.linear.linear_tiles(m.weight, 0, m.weight.tiles(), quantized, 0, groups, {nullptr, nullptr, out.data()});
  return out;
}

double distance(const std::vector<float>& found, const std::vector<float>& truth) {
  double error = 0, size = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    error += (double(found[i]) - truth[i]) * (double(found[i]) - truth[i]);
    size += double(truth[i]) * truth[i];
  }
  return std::isfinite(error) ? std::sqrt(error / size) : 1.0;
}

void compare_products(const KernelTable& table, const std::string& format) {
  Random random{7};
  constexpr int64_t kRows = 21, kInputs = 512, kOutputs = 37;
  const bool rows = table.linear.layout == Layout::kRows;  // products in bfloat16
  const Matrix matrix = random_matrix(format, kOutputs, kInputs, table.linear.layout, random);
  const Matrix same = random_matrix(format, kOutputs, kInputs, Layout::kLanes, random);
  std::vector<float> x(kRows * kInputs);
  for (float& one : x) one = random.number();
  for (int64_t row = 0; row < kRows; row += 2) x[size_t(row * kInputs + 17 * row)] = 40.0f;  // blocks with remainders
  const std::vector<float> whole = product(table, matrix, x.data(), kRows);
  const double far = distance(whole, product(kGenericKernels, same, x.data(), kRows));
  expect(far < (rows ? 1e-2 : 1e-5), table, format + " differs");
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> alone = product(table, matrix, x.data() + row * kInputs, 1);
    const float* beside = whole.data() + row * kOutputs;
    expect(std::memcmp(alone.data(), beside, sizeof(float) * kOutputs) == 0, table, format + ": a row sees others");
  }
  std::vector<float> row(kInputs), generic(kInputs);
  for (int64_t output = 0; output < kOutputs; ++output) {
    table.linear.embed(matrix.weight, output, 1.0f, row.data());
    kGenericKernels.linear.embed(same.weight, output, 1.0f, generic.data());
    expect(row == generic, table, format + ": rows of the table differ");
  }
}

// Everything that is done row by row: norms, sums, gates, the largest.
void compare_rows(const KernelTable& table) {
  Random random{11};
  constexpr int64_t kCount = 203;
  std::vector<float> x(kCount), y(kCount), found(kCount), truth(kCount);
  for (float& one : x) one = 3 * random.number();
  for (float& one : y) one = 3 * random.number();
  const auto both = [&](const char* what, auto call) {
    call(table, found.data());
    call(kGenericKernels, truth.data());
    expect(distance(found, truth) < 1e-6, table, what);
  };
  both("rms_norm",
       [&](const KernelTable& t, float* out) { t.linear.rms_norm(x.data(), y.data(), 1e-5f, kCount, out); });
  both("layer_norm", [&](const KernelTable& t, float* out) {
    t.linear.layer_norm(x.data(), y.data(), x.data(), 1e-5f, kCount, out);
  });
  both("add", [&](const KernelTable& t, float* out) { t.linear.add(x.data(), y.data(), kCount, out); });
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kSwigluOai})
    both("act_mul",
         [&](const KernelTable& t, float* out) { t.lora.act_mul(x.data(), y.data(), kCount, activation, out); });
  expect(table.linear.argmax(x.data(), kCount) == kGenericKernels.linear.argmax(x.data(), kCount), table, "argmax");
}

// Attention of two heads of 48 dims over three tiles of keys, in pages that the same kernels wrote.
std::vector<float> attention(const KernelTable& table, KVDtype dtype, const std::vector<float>& kv,
                             const std::vector<float>& query, const std::vector<int64_t>& positions) {
  constexpr int64_t kDim = 48, kTokens = 300, kPageTokens = 16, kHeads = 2, kPages = (kTokens + 15) / 16;
  const Pages shape(dtype, kPages, kPageTokens, 1, kDim, kDim, nullptr, 0);
  std::vector<char> data(size_t(kPages * shape.head_bytes) + 64);
  char* aligned = data.data() + (64 - reinterpret_cast<uintptr_t>(data.data()) % 64);
  const Pages pages(dtype, kPages, kPageTokens, 1, kDim, kDim, aligned, shape.head_bytes);
  std::vector<float> scratch(size_t(4 * kDim));
  for (int64_t t = 0; t < kTokens; ++t)
    table.pages.write_token(pages, t, &kv[size_t(2 * t * kDim)], &kv[size_t((2 * t + 1) * kDim)], nullptr, t,
                            scratch.data());
  std::vector<int64_t> places(kPages + 8);
  for (int64_t i = 0; i < kPages; ++i) places[size_t(i)] = i;
  const auto tokens = int64_t(positions.size());
  const Queries queries{query.data(), kHeads * kDim, tokens, kHeads, positions.data(), places.data(), 0, nullptr};
  const Mask mask{0.14f, 0, 0, false};
  const int64_t last = *std::max_element(positions.begin(), positions.end()) / tile_tokens(pages) + 1;
  std::vector<float> record(size_t(partial_floats(queries.rows(), pages)));
  std::vector<float> room(size_t(table.pages.scratch_floats(pages, queries.rows())));
  table.pages.attention_tiles(pages, queries, mask, 0, last, false, record.data(), room.data());
  std::vector<float> out(size_t(tokens * kHeads * kDim));
  table.pages.write_means(pages, queries, record.data(), out.data(), kHeads * kDim);
  return out;
}

constexpr KVDtype kDtypes[] = {KVDtype::kFloat32, KVDtype::kFloat16, KVDtype::kBfloat16, KVDtype::kInt8,
                               KVDtype::kK8V4};
constexpr int64_t kNumbers = 2 * 48;  // of a token's queries, and of its keys and values
const std::vector<int64_t> positions = {0, 3, 100, 127, 128, 200, 255, 256, 257, 270, 280, 290, 298, 299};

std::vector<float> numbers(int64_t count, uint64_t seed) {
  Random random{seed};
  std::vector<float> made(static_cast<size_t>(count));
  for (float& one : made) one = 2 * random.number();
  return made;
}

// How far attention may be from the generic kernels, which are float32. Values and weights in bfloat16 have eight bits.
double attention_tolerance(const KernelTable& table, KVDtype dtype) {
  const bool pairs = std::strcmp(table.numerics, "avx512bf16") == 0 || std::strcmp(table.numerics, "amx-bf16") == 0;
  return pairs && dtype != KVDtype::kFloat32 ? 4e-3 : 1e-4;
}

void compare_attention(const KernelTable& table) {
  const std::vector<float> kv = numbers(300 * kNumbers, 5), query = numbers(int64_t(positions.size()) * kNumbers, 6);
  for (const KVDtype dtype : kDtypes) {
    const std::vector<float> whole = attention(table, dtype, kv, query, positions);
    const std::string name = "attention over dtype " + std::to_string(int(dtype));
    const double far = distance(whole, attention(kGenericKernels, dtype, kv, query, positions));
    expect(far < attention_tolerance(table, dtype), table, name + " differs by " + std::to_string(far));
    for (size_t i = 0; i < positions.size(); ++i) {
      const std::vector<float> own(query.begin() + int64_t(i) * kNumbers, query.begin() + int64_t(i + 1) * kNumbers);
      const std::vector<float> alone = attention(table, dtype, kv, own, {positions[i]});
      const bool same = std::memcmp(alone.data(), &whole[i * kNumbers], sizeof(float) * kNumbers) == 0;
      expect(same, table, name + ": a query sees others");
    }
  }
}

// Instruction sets of one name for their numerics give the same bits.
void compare_bits(const KernelTable& table, const KernelTable& same) {
  Random random{3};
  const Matrix matrix = random_matrix("Q4_K", 40, 512, table.linear.layout, random);
  const std::vector<float> x = numbers(19 * 512, 4);
  const bool equal = product(table, matrix, x.data(), 19) == product(same, matrix, x.data(), 19);
  expect(equal, table, std::string("products have not the bits of ") + same.isa);
  const std::vector<float> kv = numbers(300 * kNumbers, 5), query = numbers(int64_t(positions.size()) * kNumbers, 6);
  for (const KVDtype dtype : kDtypes)
    expect(attention(table, dtype, kv, query, positions) == attention(same, dtype, kv, query, positions), table,
           std::string("attention has not the bits of ") + same.isa);
}

}  // namespace

int main() {
  const std::vector<std::string> isas = available_isas();
  for (const std::string& isa : isas) {
    const KernelTable& table = find_kernels(isa);
    for (const char* format : {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K",
                               "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"})
      compare_products(table, format);
    compare_rows(table);
    compare_attention(table);
    for (const std::string& other : isas)
      if (std::strcmp(find_kernels(other).numerics, table.numerics) == 0) compare_bits(table, find_kernels(other));
    std::printf("%s (%s): compared\n", table.isa, table.numerics);
  }
  return failures != 0;
}
