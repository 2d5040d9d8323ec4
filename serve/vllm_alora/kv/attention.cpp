// Attention of some rows of a step to a context that they share, and of each to its own request's
// rows up to itself, in one softmax. The context's keys and values are packed once for all rows;
// then a tile of rows meets a block of tokens while both are in the cache, with a running softmax
// (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867; Dao et al. 2022,
// https://arxiv.org/abs/2205.14135). All sums are float32. Where the processor multiplies pairs of
// bfloat16, the weights of bfloat16 values are rounded to it, as in PyTorch's kernel; else bfloat16
// is widened and nothing else is rounded.
//
// Plain C++ with GCC's vectors, which clang has too: no header of PyTorch, seconds to compile.
// native_attention.py compiles and calls it, and has the layout of Arguments a second time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 is taken out of the low and high half of a word, by the order of bytes"
#endif

namespace {

// Of a vector of floats, and how many: kRows of them, and what they are multiplied by, fit into the
// registers, of which AVX-512 and NEON have 32, others 16.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kVectors = 4;
#else
constexpr int kLanes = 4;
constexpr int kVectors = 2;
#endif
constexpr int kRows = 5;
constexpr int kColumns = kVectors * kLanes;
constexpr int kTile = 6 * kRows;
constexpr int kBlock = 256;         // tokens, a multiple of kColumns
constexpr int kLargestSize = 1024;  // of a head; all are multiples of 64
static_assert(64 % kColumns == 0 && kBlock % kColumns == 0, "heads and blocks are whole columns");

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes), aligned(4)));

struct BFloat16 {
  uint16_t bits;
};

struct Pair {  // of bfloat16, the first in the low half
  uint32_t bits;
};

// A unit is what one multiplication takes of a row: a float, or a pair of bfloat16.
template <typename Unit>
constexpr int kNumbers = sizeof(Unit) / sizeof(BFloat16);
template <>
constexpr int kNumbers<float> = 1;

float widened(float number) { return number; }

float widened(BFloat16 number) {
  const uint32_t bits = uint32_t{number.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

void store(float* to, float number) { *to = number; }

// To the nearest, ties to even.
void store(BFloat16* to, float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const bool is_nan = number != number;  // rounding could carry it to an infinity
  to->bits = is_nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
void store(float* to, Floats numbers) { *reinterpret_cast<Floats*>(to) = numbers; }

// The unit that begins here in a row.
template <typename T>
void pack(float* to, const T* from) {
  *to = widened(*from);
}
void pack(Pair* to, const BFloat16* from) { std::memcpy(to, from, sizeof *to); }

// The unit of a column: of two rows, where a unit has two numbers.
template <typename T>
void pack_column(float* to, const T* first, const T*) {
  *to = widened(*first);
}
void pack_column(Pair* to, const BFloat16* first, const BFloat16* second) {
  to->bits = first->bits | uint32_t{second->bits} << 16;
}

void pack(float* to, Floats numbers) { store(to, numbers); }
Floats repeated(float number) { return number - Floats{}; }  // + would add: -0 + 0 is 0
Floats loaded(const float* from) { return load(from); }
Floats multiply_add(Floats sums, Floats numbers, Floats columns) { return sums + numbers * columns; }

#if defined(__AVX512BF16__)
void pack(Pair* to, Floats numbers) {
  const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
}
__m512bh repeated(Pair numbers) {
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(numbers.bits));
}
__m512bh loaded(const Pair* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
Floats multiply_add(Floats sums, __m512bh numbers, __m512bh columns) {
  return _mm512_dpbf16_ps(sums, numbers, columns);
}
#endif

// sums [kRows, kColumns] = rows [kRows, steps] x columns [steps, kColumns], in units; `add`: +=.
template <bool add, typename Unit>
void multiply(const Unit* rows, int64_t row_stride, const Unit* columns, int64_t column_stride,
              int64_t steps, float* sums, int64_t sum_stride) {
  Floats totals[kRows][kVectors] = {};
  if (add) {
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) totals[row][v] = load(sums + row * sum_stride + v * kLanes);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    decltype(loaded(columns)) vectors[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = loaded(columns + step * column_stride + v * kLanes);
    }
    for (int row = 0; row < kRows; ++row) {
      const auto numbers = repeated(rows[row * row_stride + step]);
      for (int v = 0; v < kVectors; ++v) {
        totals[row][v] = multiply_add(totals[row][v], numbers, vectors[v]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) store(sums + row * sum_stride + v * kLanes, totals[row][v]);
  }
}

// e^x for x <= 0, and 1 above: 2^n times a polynomial (Cephes' expf), nearly 0 below -87. NaN stays
// NaN.
Floats exponential(Floats x) {
  const Floats smallest = repeated(-87.0f);
  x = x < smallest ? smallest : x;
  x = x > Floats{} ? Floats{} : x;
  const Floats rounder = repeated(12582912.0f);  // 1.5 * 2^23: a sum with it is a whole number
  const Floats n = x * 1.44269504f + rounder - rounder;
  const Floats f = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
  return p * reinterpret_cast<Floats>(exponent);
}

float exponential(float x) { return exponential(repeated(x))[0]; }

float sum(Floats numbers) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += numbers[lane];
  return total;
}

float maximum(const float* numbers, int64_t count) {  // a multiple of kLanes
  Floats largest = load(numbers);
  for (int64_t i = kLanes; i < count; i += kLanes) {
    const Floats others = load(numbers + i);
    largest = largest < others ? others : largest;
  }
  float most = largest[0];
  for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, largest[lane]);
  return most;
}

struct alignas(64) Line {
  char bytes[64];
};

// Numbers from the start of a cache line on: a vector that lies in two lines is two loads.
template <typename T>
class Aligned {
 public:
  explicit Aligned(size_t count = 0) { grow(count); }
  void grow(size_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (lines_.size() >= lines) return;
    lines_ = {};  // first, so that memory never holds both
    lines_ = std::vector<Line>(lines);
  }
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  T* from(size_t index) { return data() + index; }

 private:
  std::vector<Line> lines_;
};

}  // namespace

// Tensors [rows or tokens, heads, size], the numbers of all heads of a row side by side, and the
// strides of their rows. `rows` [row_count]: the rows of the step that attend to the context, and
// `first_rows`: where their requests' own rows begin. The first `sharing` heads of a query read the
// first head of the keys, and so on.
struct Arguments {
  void* output;
  const void* query;
  const void* key;
  const void* value;
  const void* context_key;
  const void* context_value;
  int64_t output_stride;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t context_key_stride;
  int64_t context_value_stride;
  const int32_t* rows;
  const int32_t* first_rows;
  int64_t row_count;
  int64_t tokens;
  int64_t key_heads;
  int64_t sharing;
  int64_t size;
  float scale;
  int32_t threads;
};

namespace {

template <typename T>
const T* at(const void* tensor, int64_t stride, int64_t row, int64_t head, int64_t size) {
  return static_cast<const T*>(tensor) + row * stride + head * size;
}

// A context as `multiply` wants it: keys [heads, groups of kColumns tokens, units of a key,
// kColumns] and values [heads, units of tokens, size]. `tokens` are whole groups, with zeros.
template <typename Unit>
struct Packed {
  Unit* keys;
  Unit* values;
  int64_t tokens;
};

template <typename T, typename Unit>
void pack_group(const Arguments& a, int64_t head, int64_t first, const Packed<Unit>& packed) {
  static const T zeros[kLargestSize] = {};
  constexpr int n = kNumbers<Unit>;
  const int64_t units = (head * packed.tokens + first) * a.size / n;
  for (int64_t t = 0; t < kColumns; ++t) {
    const T* key = zeros;
    if (first + t < a.tokens) {
      key = at<T>(a.context_key, a.context_key_stride, first + t, head, a.size);
    }
    for (int64_t u = 0; u < a.size / n; ++u) {
      pack(packed.keys + units + u * kColumns + t, key + u * n);
    }
  }
  for (int64_t t = 0; t < kColumns; t += n) {
    const T* values[2] = {zeros, zeros};
    for (int i = 0; i < n; ++i) {
      if (first + t + i >= a.tokens) continue;
      values[i] = at<T>(a.context_value, a.context_value_stride, first + t + i, head, a.size);
    }
    for (int64_t i = 0; i < a.size; ++i) {
      pack_column(packed.values + units + t / n * a.size + i, values[0] + i, values[1] + i);
    }
  }
}

// A tile of rows: each is a query's head, with its softmax so far. `largest` of its scores, `total`
// of its weights, `sums` [kTile, size] of weighted values.
template <typename Unit>
struct Tile {
  explicit Tile(int64_t size)
      : query(kTile * size), sums(kTile * size), scores(kTile * kBlock), weights(kTile * kBlock),
        products(size) {}
  Aligned<Unit> query;    // [kTile, units of a query]
  Aligned<float> sums;
  Aligned<float> scores;  // of a block, [kTile, kBlock]
  Aligned<Unit> weights;  // of a block, [kTile, units of kBlock]
  Aligned<float> products;  // [size]
  float largest[kTile];
  float total[kTile];

  // The softmax of row i goes on with a score that is larger, perhaps: what was summed is scaled.
  void rescale(int64_t i, float score, int64_t size) {
    if (score <= largest[i]) return;
    const float kept = exponential(largest[i] - score);
    total[i] *= kept;
    float* const summed = sums.from(i * size);
    for (int64_t j = 0; j < size; j += kLanes) store(summed + j, load(summed + j) * kept);
    largest[i] = score;
  }

  // The weights of row i in a block, of its scores; a multiple of kLanes.
  void weigh(int64_t i, int64_t count, float scale, int64_t size) {
    const float* const row = scores.from(i * kBlock);
    rescale(i, maximum(row, count) * scale, size);
    Floats added = {};
    for (int64_t t = 0; t < count; t += kLanes) {
      const Floats weight = exponential(load(row + t) * scale - largest[i]);
      added += weight;
      pack(weights.from((i * kBlock + t) / kNumbers<Unit>), weight);
    }
    total[i] += sum(added);
  }
};

// The softmax of row i of a tile begins: with the tokens of its own request, which are few.
template <typename T, typename Unit>
void attend_to_own(const Arguments& a, int64_t head, int64_t first, int64_t row, const T* query,
                   Tile<Unit>& tile, int64_t i) {
  float* const products = tile.products.data();
  float* const sums = tile.sums.from(i * a.size);
  std::fill(sums, sums + a.size, 0.0f);
  tile.total[i] = 0;
  tile.largest[i] = -std::numeric_limits<float>::max();
  for (int64_t token = first; token <= row; ++token) {
    const T* const key = at<T>(a.key, a.key_stride, token, head, a.size);
    const T* const value = at<T>(a.value, a.value_stride, token, head, a.size);
    for (int64_t j = 0; j < a.size; ++j) products[j] = widened(key[j]) * widened(query[j]);
    Floats parts = {};
    for (int64_t j = 0; j < a.size; j += kLanes) parts += load(products + j);
    const float score = sum(parts) * a.scale;
    tile.rescale(i, score, a.size);
    const float weight = exponential(score - tile.largest[i]);
    for (int64_t j = 0; j < a.size; ++j) sums[j] += weight * widened(value[j]);
    tile.total[i] += weight;
  }
}

template <typename T, typename Unit>
void attend_tile(const Arguments& a, int64_t head, int64_t first, const Packed<Unit>& packed,
                 Tile<Unit>& tile) {
  constexpr int n = kNumbers<Unit>;
  const int64_t steps = a.size / n;
  const int64_t count = std::min<int64_t>(kTile, a.row_count * a.sharing - first);
  const int64_t padded = (count + kRows - 1) / kRows * kRows;
  for (int64_t i = 0; i < padded; ++i) {
    const int64_t index = first + std::min(i, count - 1);
    const int64_t reader = index / a.sharing;
    const int64_t query_head = head * a.sharing + index % a.sharing;
    const T* const query = at<T>(a.query, a.query_stride, a.rows[reader], query_head, a.size);
    for (int64_t u = 0; u < steps; ++u) pack(tile.query.from(i * steps + u), query + u * n);
    attend_to_own(a, head, a.first_rows[reader], a.rows[reader], query, tile, i);
  }
  for (int64_t block = 0; block < packed.tokens; block += kBlock) {
    const int64_t width = std::min<int64_t>(kBlock, packed.tokens - block);
    const int64_t known = std::min(width, a.tokens - block);
    const int64_t units = (head * packed.tokens + block) * a.size / n;
    for (int64_t t = 0; t < width; t += kColumns) {
      for (int64_t i = 0; i < padded; i += kRows) {
        multiply<false>(tile.query.from(i * steps), steps, packed.keys + units + t * steps,
                        kColumns, steps, tile.scores.from(i * kBlock + t), kBlock);
      }
    }
    for (int64_t i = 0; i < padded; ++i) {
      float* const scores = tile.scores.from(i * kBlock);
      std::fill(scores + known, scores + width, -std::numeric_limits<float>::infinity());
      tile.weigh(i, width, a.scale, a.size);
    }
    for (int64_t i = 0; i < padded; i += kRows) {
      for (int64_t j = 0; j < a.size; j += kColumns) {
        multiply<true>(tile.weights.from(i * kBlock / n), kBlock / n, packed.values + units + j,
                       a.size, width / n, tile.sums.from(i * a.size + j), a.size);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t query_head = head * a.sharing + (first + i) % a.sharing;
    const int64_t row = a.rows[(first + i) / a.sharing];
    T* const output = static_cast<T*>(a.output) + row * a.output_stride + query_head * a.size;
    for (int64_t j = 0; j < a.size; ++j) {
      store(output + j, *tile.sums.from(i * a.size + j) / tile.total[i]);
    }
  }
}

template <typename T, typename Unit>
void attend(const Arguments& a) {
  const int64_t tokens = (a.tokens + kColumns - 1) / kColumns * kColumns;
  const int64_t rows = a.row_count * a.sharing;
  const size_t units = a.key_heads * tokens * a.size / kNumbers<Unit>;
  // Kept for the next layer: memory that is new costs as much as packing does.
  static thread_local Aligned<Unit> context;
  context.grow(2 * units);
  const Packed<Unit> packed = {context.data(), context.from(units), tokens};
#pragma omp parallel num_threads(a.threads)
  {
#pragma omp for collapse(2)
    for (int64_t head = 0; head < a.key_heads; ++head) {
      for (int64_t first = 0; first < tokens; first += kColumns) {
        pack_group<T>(a, head, first, packed);
      }
    }
    Tile<Unit> tile(a.size);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t head = 0; head < a.key_heads; ++head) {
      for (int64_t first = 0; first < rows; first += kTile) {
        attend_tile<T>(a, head, first, packed, tile);
      }
    }
  }
}

}  // namespace

extern "C" void attend_float32(const Arguments* a) { attend<float, float>(*a); }

extern "C" void attend_bfloat16(const Arguments* a) {
#if defined(__AVX512BF16__)
  attend<BFloat16, Pair>(*a);
#else
  attend<BFloat16, float>(*a);
#endif
}
