// The low-rank products of one linear layer: y += x A B for every token with its own adapter's A and
// B, in place. Each adapter's weights are read where they lie, without copies, and those of a slice
// stay in the cache while its tokens pass, four at a time; pieces and the slices of a packed layer
// are shared out among the threads. float32, or bfloat16 with sums in
// float32: x A is rounded to bfloat16, as vLLM's operator does, and the sum once.
//
// Plain C++ with GCC's vectors, which clang has too: no header of PyTorch, seconds to compile.
// native.py compiles and calls it, and has the layout of Slice and Piece a second time.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 16;   // of a vector
constexpr int kTokens = 4;   // that meet a vector of weights while it is in a register
constexpr int kRows = 4;     // of A at once
constexpr int kVectors = 4;  // of a row of y at once

using Floats = float __attribute__((vector_size(4 * kLanes), aligned(4)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes), aligned(4)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes), aligned(2)));

struct BFloat16 {
  uint16_t bits;
};

Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

Floats load(const BFloat16* from) {
  const Halves halves = *reinterpret_cast<const Halves*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

void store(float* to, Floats numbers) { *reinterpret_cast<Floats*>(to) = numbers; }

void store(BFloat16* to, Floats numbers) {  // rounded to the nearest, ties to even; NaN stays NaN
  const Words bits = reinterpret_cast<Words>(numbers);
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words chosen = numbers == numbers ? nearest : (bits >> 16) | 0x40;
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(chosen, Halves);
}

// One number, by way of a vector: at the ends of rows that are no whole number of vectors.
template <typename T>
float load_one(const T* from) {
  T padded[kLanes] = {};
  padded[0] = *from;
  return load(padded)[0];
}

template <typename T>
void store_one(T* to, float number) {
  T padded[kLanes];
  store(padded, Floats{number});
  *to = padded[0];
}

template <typename T>
float rounded_to(float number) {
  T narrow;
  store_one(&narrow, number);
  return load_one(&narrow);
}

template <int lanes>
float sum_of(const float* numbers) {  // halved again and again, which compilers make shuffles of
  float halves[lanes / 2];
  for (int lane = 0; lane < lanes / 2; ++lane) {
    halves[lane] = numbers[lane] + numbers[lane + lanes / 2];
  }
  return sum_of<lanes / 2>(halves);
}

template <>
float sum_of<1>(const float* numbers) {
  return numbers[0];
}

float sum(Floats numbers) {
  float lanes[kLanes];
  store(lanes, numbers);
  return sum_of<kLanes>(lanes);
}

// low[token, row] = x[token] A[row], for some rows of A; x [tokens, width], low [tokens, rank].
template <typename T, int tokens, int rows>
void dot_rows(const float* x, int64_t width, const T* a, float* low, int rank) {
  Floats sums[tokens][rows] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats numbers[tokens];
    for (int token = 0; token < tokens; ++token) numbers[token] = load(x + token * width + i);
    for (int row = 0; row < rows; ++row) {
      __builtin_prefetch(a + (row + rows) * width + i);
      const Floats weights = load(a + row * width + i);
      for (int token = 0; token < tokens; ++token) sums[token][row] += numbers[token] * weights;
    }
  }
  for (int token = 0; token < tokens; ++token) {
    for (int row = 0; row < rows; ++row) {
      float total = sum(sums[token][row]);
      for (int64_t k = i; k < width; ++k) {
        total += x[token * width + k] * load_one(a + row * width + k);
      }
      low[token * rank + row] = rounded_to<T>(total);
    }
  }
}

template <typename T, int tokens>
void shrink(const float* x, int64_t width, const T* a, float* low, int rank) {
  int row = 0;
  for (; row + kRows <= rank; row += kRows) {
    dot_rows<T, tokens, kRows>(x, width, a + row * width, low + row, rank);
  }
  for (; row < rank; ++row) dot_rows<T, tokens, 1>(x, width, a + row * width, low + row, rank);
}

// y[token] += low[token] B; low [tokens, rank], B [rank, width].
template <typename T, int tokens>
void expand(const float* low, int rank, const T* b, int64_t width, T* const* y) {
  constexpr int kStep = kVectors * kLanes;
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) {
    Floats sums[tokens][kVectors];
    for (int token = 0; token < tokens; ++token) {
      for (int v = 0; v < kVectors; ++v) sums[token][v] = load(y[token] + i + v * kLanes);
    }
    for (int row = 0; row < rank; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        const T* weights_at = b + row * width + i + v * kLanes;
        __builtin_prefetch(weights_at + kStep);
        const Floats weights = load(weights_at);
        for (int token = 0; token < tokens; ++token) {
          sums[token][v] += low[token * rank + row] * weights;
        }
      }
    }
    for (int token = 0; token < tokens; ++token) {
      for (int v = 0; v < kVectors; ++v) store(y[token] + i + v * kLanes, sums[token][v]);
    }
  }
  for (; i < width; ++i) {
    for (int token = 0; token < tokens; ++token) {
      float total = load_one(y[token] + i);
      for (int row = 0; row < rank; ++row) {
        total += low[token * rank + row] * load_one(b + row * width + i);
      }
      store_one(y[token] + i, total);
    }
  }
}

template <typename T, int tokens>
void multiply(const float* x, int64_t in, const T* a, const T* b, int64_t out, int rank, float* low,
              T* const* y) {
  shrink<T, tokens>(x, in, a, low, rank);
  expand<T, tokens>(low, rank, b, out, y);
}

}  // namespace

// Columns of y, and the weights of all slots for them: A [slots, max_rank, in], B [slots, max_rank,
// width], the rank of each slot's adapter there, 0 for none.
struct Slice {
  const void* a;
  const void* b;
  const int32_t* ranks;
  int64_t first;
  int64_t width;
};

// Tokens of one adapter: so many from `first` on in the list of tokens.
struct Piece {
  int32_t slot;
  int32_t first;
  int32_t count;
};

namespace {

// What a thread works in.
struct Scratch {
  std::vector<float> x;
  std::vector<float> low;
};

template <typename T>
void add_piece(T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t in, int64_t max_rank,
               const Slice& slice, const Piece& piece, const int32_t* tokens, Scratch& scratch) {
  const int rank = slice.ranks[piece.slot];
  if (rank == 0) return;
  const T* a = static_cast<const T*>(slice.a) + piece.slot * max_rank * in;
  const T* b = static_cast<const T*>(slice.b) + piece.slot * max_rank * slice.width;
  for (int done = 0; done < piece.count; done += kTokens) {
    const int count = piece.count - done < kTokens ? piece.count - done : kTokens;
    T* sums[kTokens];
    for (int token = 0; token < count; ++token) {
      const int64_t number = tokens[piece.first + done + token];
      const T* from = x + number * x_stride;
      float* to = scratch.x.data() + token * in;
      int64_t i = 0;
      for (; i + kLanes <= in; i += kLanes) store(to + i, load(from + i));
      for (; i < in; ++i) to[i] = load_one(from + i);
      sums[token] = y + number * y_stride + slice.first;
    }
    const float* rows = scratch.x.data();
    float* low = scratch.low.data();
    switch (count) {
      case 1: multiply<T, 1>(rows, in, a, b, slice.width, rank, low, sums); break;
      case 2: multiply<T, 2>(rows, in, a, b, slice.width, rank, low, sums); break;
      case 3: multiply<T, 3>(rows, in, a, b, slice.width, rank, low, sums); break;
      default: multiply<T, 4>(rows, in, a, b, slice.width, rank, low, sums);
    }
  }
}

template <typename T>
void add(T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t in, int64_t max_rank,
         const Slice* slices, int64_t slice_count, const Piece* pieces, int64_t piece_count,
         const int32_t* tokens, int threads) {
#pragma omp parallel num_threads(threads)
  {
    static thread_local Scratch scratch;
    scratch.x.resize(kTokens * in);
    scratch.low.resize(kTokens * max_rank);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < piece_count * slice_count; ++item) {
      const Piece& piece = pieces[item / slice_count];
      const Slice& slice = slices[item % slice_count];
      add_piece(y, y_stride, x, x_stride, in, max_rank, slice, piece, tokens, scratch);
    }
  }
}

}  // namespace

extern "C" void add_float32(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                            int64_t in, int64_t max_rank, const Slice* slices,
                            int64_t slice_count, const Piece* pieces, int64_t piece_count,
                            const int32_t* tokens, int32_t threads) {
  add(y, y_stride, x, x_stride, in, max_rank, slices, slice_count, pieces, piece_count, tokens,
      threads);
}

extern "C" void add_bfloat16(BFloat16* y, int64_t y_stride, const BFloat16* x, int64_t x_stride,
                             int64_t in, int64_t max_rank, const Slice* slices,
                             int64_t slice_count, const Piece* pieces, int64_t piece_count,
                             const int32_t* tokens, int32_t threads) {
  add(y, y_stride, x, x_stride, in, max_rank, slices, slice_count, pieces, piece_count, tokens,
      threads);
}
