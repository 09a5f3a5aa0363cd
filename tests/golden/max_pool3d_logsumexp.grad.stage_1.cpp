// fusegen 0.1.0   chain ee8e183d22fc   signature forward+backward: d_out float32, d_x float32, out float32, winner_index uint8, x float32; 64-bit offsets
//   max_pool3d(2)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>

#ifdef __linux__
#include <sys/mman.h>
#endif

using Index = int64_t;

namespace {

struct Size {
  Index value;
};

inline Index divide(Index n, Size d) { return n / d.value; }

template <typename To, typename From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  __builtin_memcpy(&bits, &x, sizeof(To));
  return bits;
}

template <typename Stored>
inline Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
inline Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  Index used = 0;
  template <typename T>
  T* take(Index count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<Index>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// Work is cut into pieces that depend on the sizes alone, never on the number of threads: so are the results.
constexpr Index kPiece = 16384;

inline Index pieces_of(Index length) { return std::max<Index>(1, (length + kPiece - 1) / kPiece); }

// Below this many elements one thread does it all: waking another costs more.
constexpr Index kSerial = 16384;

// How many blocks of rows leave partials of their own, where columns are added up; in as many tasks anyway.
inline Index slots_of(Index rows, Index columns, Index tasks = 1) {
  return std::max<Index>(1, std::min<Index>(std::min<Index>(rows, 64 / tasks), rows * columns / kPiece));
}

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

inline Index padded(Index width) { return (width + 15) / 16 * 16; }

// The end of a line is filled up with copies of its last element.
template <typename Value>
inline void pad(Value* line, Index width) {
  const Value last = line[width - 1];
  for (Index i = width; i < padded(width); ++i) line[i] = last;
}

// Elements of the arithmetic's own type that fill whole vectors are worked on where they lie.
template <Index stride, typename Stored, typename Value>
inline bool is_line(Index width) {
  return std::is_same<Stored, Value>::value && stride == 1 && width == padded(width);
}

// A line to read; room is where it is put if it cannot stay.
template <Index stride, typename Stored, typename Value>
inline const Value* load(const Stored* from, Index width, Value* room) {
  if (is_line<stride, Stored, Value>(width)) return reinterpret_cast<const Value*>(from);
#pragma omp simd
  for (Index i = 0; i < width; ++i) room[i] = static_cast<Value>(widen(from[i * stride]));
  pad(room, width);
  return room;
}

// A line to be written before store.
template <Index stride, typename Stored, typename Value>
inline Value* target(Stored* to, Index width, Value* room) {
  return is_line<stride, Stored, Value>(width) ? reinterpret_cast<Value*>(to) : room;
}

template <Index stride, typename Stored, typename Value>
inline void store(const Value* line, Index width, Stored* to) {
  if (is_line<stride, Stored, Value>(width)) return;
#pragma omp simd
  for (Index i = 0; i < width; ++i) to[i * stride] = narrow<Stored>(line[i]);
}

// Windows that lie side by side, taken apart: a line for each position in them.
template <Index size, typename Stored, typename Value, Index side>
inline void split(const Stored* from, Index count, Value (*rooms)[side], Index place) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) rooms[j][place + i] = static_cast<Value>(widen(from[i * size + j]));
  }
}

// And put together again.
template <Index size, typename Stored, typename Value, Index side>
inline void join(const Value (*rooms)[side], Index place, Index count, Stored* to) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) to[i * size + j] = narrow<Stored>(rooms[j][place + i]);
  }
}

// Fresh memory comes in pages of 4 KiB, whose faults cost more than most chains (writing 55 MB: 15 ms, and 4
// in large pages). So large outputs ask for those, as torch's allocator does under THP_MEM_ALLOC_ENABLE.
template <typename Stored>
inline void expect(Stored* output, Index count) {
#ifdef __linux__
  constexpr uintptr_t kPage = 65536;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(output) + kPage - 1) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(output + count) / kPage * kPage;
  if (begin + (4u << 20) <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// The first maximum and where it stood; a NaN beats every number, as in torch.
template <typename Value>
struct Maximum {
  Value best = -std::numeric_limits<Value>::infinity();
  int position_of_best = 0;
  void add(Value value, int position) {
    const bool beats = value > best || value != value;
    best = beats ? value : best;
    position_of_best = beats ? position : position_of_best;
  }
  Value max() const { return best; }
  int argmax() const { return position_of_best; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float peak,
    const int winner_index_2, float& out, int& winner_index) {
  out = peak;
  winner_index = winner_index_2;
}

static void forward_window(const float* __restrict__ x, float* __restrict__ out,
    uint8_t* __restrict__ winner_index, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(winner_index, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  constexpr Index kSide = 512;  // lines that fit the fastest cache
  const Index length = sizes.inner.value, lines = (length + kSide - 1) / kSide;
  const Index together = std::max<Index>(1, kSide / std::max<Index>(1, length));
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length * 8 > kSerial)
  for (Index task = 0; task < (rows + together - 1) / together * lines; ++task) {
    const Index top = task / lines * together, bottom = std::min(rows, top + together);
    const Index first = task % lines * kSide, piece = std::min(kSide, length - first);
    const Index width = (bottom - top) * piece;
    float x_rooms[8][kSide];
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (int position_value = 0; position_value < 8; position_value += 2) {
        const Index above_window_3 = position_value / 2;
        const Index window_3 = position_value - above_window_3 * 2;
        const Index above_window_2 = above_window_3 / 2;
        const Index window_2 = above_window_3 - above_window_2 * 2;
        const Index window_1 = above_window_2;
        const Index inner = first;
        split<2>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3), piece, x_rooms + position_value, place);
      }
    }
    for (auto& line : x_rooms) pad(line, width);
    float peak_line[kSide];
    int winner_index_2_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      Maximum<float> peak_sum;
#pragma GCC unroll 8
      for (int position_value = 0; position_value < 8; ++position_value) {
        const float x_value = x_rooms[position_value][i];
        float peak_term_value;
        forward_window_stage_1(x_value, peak_term_value);
        peak_sum.add(peak_term_value, position_value);
      }
      peak_line[i] = static_cast<float>(peak_sum.max());
      winner_index_2_line[i] = static_cast<int>(peak_sum.argmax());
    }
    float out_line[kSide];
    int winner_index_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float peak_value = peak_line[i];
      const int winner_index_2_value = winner_index_2_line[i];
      float out_value;
      int winner_index_value;
      forward_window_row_values(peak_value, winner_index_2_value, out_value, winner_index_value);
      out_line[i] = out_value;
      winner_index_line[i] = winner_index_value;
    }
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(out_line[place + i]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          winner_index[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<uint8_t>(winner_index_line[place + i]);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void backward_window_values(const int position,
    const int winner_index, const float d_out, float& d_x) {
  d_x = position == winner_index ? d_out : 0.0f;
}

static void backward_window(const uint8_t* __restrict__ winner_index, const float* __restrict__ d_out,
    float* __restrict__ d_x, const BackwardSizes sizes, int threads) {
  expect(d_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value * 2 * 2 * 2);
  constexpr Index kSide = 512;  // lines that fit the fastest cache
  const Index length = sizes.inner.value, lines = (length + kSide - 1) / kSide;
  const Index together = std::max<Index>(1, kSide / std::max<Index>(1, length));
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length * 8 > kSerial)
  for (Index task = 0; task < (rows + together - 1) / together * lines; ++task) {
    const Index top = task / lines * together, bottom = std::min(rows, top + together);
    const Index first = task % lines * kSide, piece = std::min(kSide, length - first);
    const Index width = (bottom - top) * piece;
    int winner_index_line[kSide];
    float d_out_line[kSide];
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          winner_index_line[place + i] = widen(winner_index[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          d_out_line[place + i] = widen(d_out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
    }
    pad(winner_index_line, width);
    pad(d_out_line, width);
    float d_x_rooms[8][kSide];
    for (int position_value = 0; position_value < 8; ++position_value) {
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const int winner_index_value = winner_index_line[i];
        const float d_out_value = d_out_line[i];
        float d_x_value;
        backward_window_values(position_value, winner_index_value, d_out_value, d_x_value);
        d_x_rooms[position_value][i] = d_x_value;
      }
    }
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (int position_value = 0; position_value < 8; position_value += 2) {
        const Index above_window_3 = position_value / 2;
        const Index window_3 = position_value - above_window_3 * 2;
        const Index above_window_2 = above_window_3 / 2;
        const Index window_2 = above_window_3 - above_window_2 * 2;
        const Index window_1 = above_window_2;
        const Index inner = first;
        join<2>(d_x_rooms + position_value, place, piece,
            d_x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3));
      }
    }
  }
}

}  // namespace

// a: x, out, winner_index, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  forward_window(x, out, winner_index, sizes, threads);
  return 0;
}

// a: winner_index, d_out, d_x, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  backward_window(winner_index, d_out, d_x, sizes, threads);
  return 0;
}
