// The low-rank products of one linear layer: y += x A B for every token with its own adapter's A
// and B, in place. Each adapter's weights are read where they lie, without copies, and stay in the
// cache while its tokens pass, four at a time. Meanwhile those of the next one are fetched, a line
// for each line multiplied: with few tokens an adapter the arithmetic hides behind the memory. The
// threads share out the pieces of each slice of a packed layer. float32, or bfloat16 with sums in
// float32: x A is rounded to bfloat16, as vLLM's operator does, and the sum once.
//
// Plain C++ with GCC's vectors, which clang has too: no header of PyTorch, seconds to compile.
// native.py compiles and calls it, and has the layout of Slice and Piece a second time.

#include <cstdint>
#include <vector>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 is taken out of the low and high half of a word, by the order of bytes"
#endif

namespace {

// Of a vector of floats: those of a register, since GCC keeps longer ones in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTokens = 4;  // that meet a vector of weights while it is in a register
constexpr int kRows = 4;    // of A at once
constexpr int kPieces = 8;  // a thread, from which on the next one's weights are fetched

// By `typedef`: clang forgets the alignment in `using`.
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

struct BFloat16 {
  uint16_t bits;
};

// Of a register, so many vectors of floats: of bfloat16 the even numbers and the odd ones.
template <typename T>
constexpr int kParts = sizeof(float) / sizeof(T);

template <typename T>
Floats rounded_to(Floats numbers) {
  return numbers;
}

// To the nearest, ties to even. NaN stays NaN: the last bits of one that was bfloat16 are zero, so
// that nothing is carried.
template <>
Floats rounded_to<BFloat16>(Floats numbers) {
  const Words bits = reinterpret_cast<Words>(numbers);
  return reinterpret_cast<Floats>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

void load(const float* from, Floats* parts) { *parts = *reinterpret_cast<const Floats*>(from); }

void load(const BFloat16* from, Floats* parts) {
  const Words pairs = *reinterpret_cast<const Words*>(from);
  parts[0] = reinterpret_cast<Floats>(pairs << 16);
  parts[1] = reinterpret_cast<Floats>(pairs & 0xffff0000);
}

void store(float* to, const Floats* parts) { *reinterpret_cast<Floats*>(to) = *parts; }

void store(BFloat16* to, const Floats* parts) {
  const Words even = reinterpret_cast<Words>(rounded_to<BFloat16>(parts[0]));
  const Words odd = reinterpret_cast<Words>(rounded_to<BFloat16>(parts[1]));
  *reinterpret_cast<Words*>(to) = even >> 16 | odd;
}

// One number, by way of a vector: at the ends of rows that are no whole number of vectors.
template <typename T>
float load_one(const T* from) {
  T padded[kParts<T> * kLanes] = {};
  padded[0] = *from;
  Floats parts[kParts<T>];
  load(padded, parts);
  return parts[0][0];
}

template <typename T>
void store_one(T* to, float number) {
  T padded[kParts<T> * kLanes];
  const Floats parts[kParts<T>] = {Floats{number}};
  store(padded, parts);
  *to = padded[0];
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
  store(lanes, &numbers);
  return sum_of<kLanes>(lanes);
}

// Into the second cache: the first holds no two adapters.
template <typename T>
void fetch(const T* from) {
  __builtin_prefetch(from, 0, 2);
}

// A and B of a slot in a slice, the first `rank` rows of each.
template <typename T>
struct Weights {
  const T* a;
  const T* b;
  int rank;
};

// low[token, row] = x[token] A[row], for some rows of A; low [tokens, rank]. `next`: the rows to
// fetch.
template <typename T, int tokens, int rows>
void dot_rows(const T* const* x, int64_t width, const T* a, const T* next, float* low, int rank) {
  constexpr int kStep = kParts<T> * kLanes;
  Floats sums[tokens][rows] = {};
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) {
    Floats numbers[tokens][kParts<T>];
    for (int token = 0; token < tokens; ++token) load(x[token] + i, numbers[token]);
    for (int row = 0; row < rows; ++row) {
      const int64_t at = row * width + i;
      fetch(next + at);
      Floats weights[kParts<T>];
      load(a + at, weights);
      for (int token = 0; token < tokens; ++token) {
        for (int part = 0; part < kParts<T>; ++part) {
          sums[token][row] += numbers[token][part] * weights[part];
        }
      }
    }
  }
  for (int token = 0; token < tokens; ++token) {
    for (int row = 0; row < rows; ++row) {
      float total = sum(sums[token][row]);
      for (int64_t k = i; k < width; ++k) {
        total += load_one(x[token] + k) * load_one(a + row * width + k);
      }
      low[token * rank + row] = total;
    }
  }
}

// What the next adapter does not have is not fetched: what is in the cache is named instead.
template <typename T, int tokens>
void shrink(const T* const* x, int64_t width, Weights<T> own, Weights<T> next, float* low) {
  const int rank = own.rank;
  int row = 0;
  for (; row + kRows <= rank; row += kRows) {
    const int64_t at = row * width;
    const T* const ahead = row + kRows <= next.rank ? next.a : own.a;
    dot_rows<T, tokens, kRows>(x, width, own.a + at, ahead + at, low + row, rank);
  }
  for (; row < rank; ++row) {
    const int64_t at = row * width;
    const T* const ahead = row < next.rank ? next.a : own.a;
    dot_rows<T, tokens, 1>(x, width, own.a + at, ahead + at, low + row, rank);
  }
  for (int i = 0; i < tokens * rank; i += kLanes) {
    Floats numbers;
    load(low + i, &numbers);
    numbers = rounded_to<T>(numbers);
    store(low + i, &numbers);
  }
}

// y[token] += low[token] B; low [tokens, rank], B [rank, width].
template <typename T, int tokens>
void expand(const float* low, Weights<T> own, Weights<T> next, int64_t width, T* const* y) {
  const int rank = own.rank;
  const T* const b = own.b;
  constexpr int kStep = kParts<T> * kLanes;
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) {
    Floats sums[tokens][kParts<T>];
    for (int token = 0; token < tokens; ++token) load(y[token] + i, sums[token]);
    for (int row = 0; row < rank; ++row) {
      const int64_t at = row * width + i;
      fetch((row < next.rank ? next.b : b) + at);
      Floats weights[kParts<T>];
      load(b + at, weights);
      for (int token = 0; token < tokens; ++token) {
        for (int part = 0; part < kParts<T>; ++part) {
          sums[token][part] += low[token * rank + row] * weights[part];
        }
      }
    }
    for (int token = 0; token < tokens; ++token) store(y[token] + i, sums[token]);
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
void multiply(const T* const* x, int64_t in, Weights<T> own, Weights<T> next, int64_t out,
              float* low, T* const* y) {
  shrink<T, tokens>(x, in, own, next, low);
  expand<T, tokens>(low, own, next, out, y);
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

template <typename T>
Weights<T> weights_of(const Slice& slice, int64_t slot, int64_t in, int64_t max_rank) {
  const int64_t row = slot * max_rank;
  return {static_cast<const T*>(slice.a) + row * in,
          static_cast<const T*>(slice.b) + row * slice.width, slice.ranks[slot]};
}

template <typename T>
void add_piece(T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t in, const Slice& slice,
               Weights<T> own, Weights<T> next, const Piece& piece, const int32_t* tokens,
               float* low) {
  for (int done = 0; done < piece.count; done += kTokens) {
    const int count = piece.count - done < kTokens ? piece.count - done : kTokens;
    const T* rows[kTokens];
    T* sums[kTokens];
    for (int token = 0; token < count; ++token) {
      const int64_t number = tokens[piece.first + done + token];
      rows[token] = x + number * x_stride;
      sums[token] = y + number * y_stride + slice.first;
    }
    switch (count) {
      case 1: multiply<T, 1>(rows, in, own, next, slice.width, low, sums); break;
      case 2: multiply<T, 2>(rows, in, own, next, slice.width, low, sums); break;
      case 3: multiply<T, 3>(rows, in, own, next, slice.width, low, sums); break;
      default: multiply<T, 4>(rows, in, own, next, slice.width, low, sums);
    }
  }
}

// The first piece from `p` on that has weights in the slice; `count` if there is none.
int64_t with_weights(const Slice& slice, const Piece* pieces, int64_t p, int64_t count) {
  while (p < count && slice.ranks[pieces[p].slot] == 0) ++p;
  return p;
}

// Guided: neighbours go to one thread, since it fetches the next one's weights. With few pieces a
// thread the next one is mostly another's, and nothing is fetched.
template <typename T>
void add(T* y, int64_t y_stride, const T* x, int64_t x_stride, int64_t in, int64_t max_rank,
         const Slice* slices, int64_t slice_count, const Piece* pieces, int64_t piece_count,
         const int32_t* tokens, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> low(kTokens * max_rank + kLanes);
    for (int64_t s = 0; s < slice_count; ++s) {
#pragma omp for schedule(guided) nowait
      for (int64_t p = 0; p < piece_count; ++p) {
        const auto own = weights_of<T>(slices[s], pieces[p].slot, in, max_rank);
        if (own.rank == 0) continue;
        int64_t after = with_weights(slices[s], pieces, p + 1, piece_count);
        if (after == piece_count || piece_count < kPieces * threads) after = p;
        const auto next = weights_of<T>(slices[s], pieces[after].slot, in, max_rank);
        add_piece(y, y_stride, x, x_stride, in, slices[s], own, next, pieces[p], tokens,
                  low.data());
      }
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
