// fusegen 0.1.0   chain 9fc699c31ba9   signature forward+backward: d_out float32, d_x float32, out float32, saved_sum_of_window float32, x float32; 64-bit offsets
//   avg_pool3d(2) | gelu
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

// erf within 1.9 ulp: 1 - exp(-y) on the right of 0, where y is |x| times a polynomial of it.
inline float erf_of(float x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  float t = fabsf(x);
  t = t > 4.0f ? 4.0f : t;
  const float tt = t * t;
  float y = fmaf(-9.256217e-6f, tt, fmaf(1.1764081e-4f, t, -6.328351e-4f));
  y = fmaf(y, tt, fmaf(0.001667024f, t, -1.6039226e-4f));
  y = fmaf(y, tt, fmaf(-0.019153066f, t, 0.10277783f));
  y = fmaf(y, tt, fmaf(0.6366194f, t, 0.12837917f));
  y = fmaf(y, t, t);
  const float shifted = fmaf(y, -1.442695f, 0x1.8p23f);  // its last bits are n, as in exp
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, 1.9046542e-9f, fmaf(n, -0.6931472f, -y)), rr = r * r;
  float e = fmaf(0.0013814596f, rr, fmaf(0.0083687175f, r, 0.04166839f));
  e = fmaf(e, rr, fmaf(0.16666521f, r, 0.49999994f));
  e = fmaf(e, rr, r);  // exp(r) - 1, so that small results keep their digits
  const float power = bits_of<float>((bits_of<uint32_t>(shifted) << 23) + 0x3f800000);
  return copysignf(fmaf(-power, e, 1.0f - power), x);
#else
  return erff(x);
#endif
}

// exp within 1.1 ulp: 2^n * exp(r), n the nearest integer to x / log(2).
inline float exp_of(float x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = fmaf(x, 1.442695f, 0x1.8p23f + 254);  // its last bits are n + 254
  const float n = shifted - (0x1.8p23f + 254);
  const float r = fmaf(n, 1.9046542e-9f, fmaf(n, -0.6931472f, x)), rr = r * r;
  float e = fmaf(0.0013814596f, rr, fmaf(0.0083687175f, r, 0.04166839f));
  e = fmaf(e, rr, fmaf(0.16666521f, r, 0.49999994f));
  e = 1.0f + fmaf(e, rr, r);
  // In two factors, for 2^n may lie beyond what a float holds where the result does not.
  const uint32_t both = bits_of<uint32_t>(shifted), half = both >> 1;
  return e * bits_of<float>(half << 23) * bits_of<float>((both - half) << 23);
#else
  return expf(x);
#endif
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

// Sixteen numbers side by side. gcc would add the ends of a reduction up one by one, through memory.
template <typename Value>
struct Lanes {
  typedef Value Pack __attribute__((vector_size(16 * sizeof(Value))));
  Pack at = {};
  void load(const Value* from) { __builtin_memcpy(&at, from, sizeof(at)); }
  Value sum() const {
    Value left[16];
    __builtin_memcpy(left, &at, sizeof(at));
    fold<8>(left);
    fold<4>(left);
    fold<2>(left);
    return left[0] + left[1];
  }
  template <int half>
  static void fold(Value* left) {
    for (int i = 0; i < half; ++i) left[i] += left[i + half];
  }
};

inline Index whole(Index width) { return width / 16 * 16; }

template <typename Value>
inline double sum_of(const Value* line, Index width) {
  Lanes<Value> lanes, next;
  for (Index i = 0; i < whole(width); i += 16) {
    next.load(line + i);
    lanes.at += next.at;
  }
  Value total = lanes.sum();
  for (Index i = whole(width); i < width; ++i) total += line[i];
  return total;
}

struct Sum {
  double total = 0;
  void merge(const Sum& other) { total += other.total; }
  template <typename Value>
  void add(const Value* line, Index width) {
    total += sum_of(line, width);
  }
  template <typename Value>
  void add(Value value, int) {
    total += value;
  }
  double sum() const { return total; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, float& total_term) {
  total_term = x;
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float total, float& out,
    float& saved_sum_of_window) {
  // avg_pool3d(2)
  const float after_avg_pool3d = total * 0.125f;
  // gelu
  out = after_avg_pool3d * 0.5f * (1.0f + erf_of(after_avg_pool3d * 0.707106769f));
  saved_sum_of_window = total;
}

static void forward_window(const float* __restrict__ x, float* __restrict__ out,
    float* __restrict__ saved_sum_of_window, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(saved_sum_of_window,
      sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
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
    float total_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      Sum total_sum;
#pragma GCC unroll 8
      for (int position_value = 0; position_value < 8; ++position_value) {
        const float x_value = x_rooms[position_value][i];
        float total_term_value;
        forward_window_stage_1(x_value, total_term_value);
        total_sum.add(total_term_value, position_value);
      }
      total_line[i] = static_cast<float>(total_sum.sum());
    }
    float out_line[kSide];
    float saved_sum_of_window_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float out_value;
      float saved_sum_of_window_value;
      forward_window_row_values(total_value, out_value, saved_sum_of_window_value);
      out_line[i] = out_value;
      saved_sum_of_window_line[i] = saved_sum_of_window_value;
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
          saved_sum_of_window[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(saved_sum_of_window_line[place + i]);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void backward_window_values(const float d_out,
    const float saved_sum_of_window, float& d_x) {
  // avg_pool3d(2)
  const float after_avg_pool3d = saved_sum_of_window * 0.125f;
  // backward, down to avg_pool3d(2)
  const float product = after_avg_pool3d * 0.707106769f;
  const float product_2 = d_out * (after_avg_pool3d * 0.5f) * (1.12837923f * exp_of(-(product * product)));
  const float d_after_avg_pool3d = product_2 * 0.707106769f + d_out * (1.0f + erf_of(product)) * 0.5f;
  d_x = d_after_avg_pool3d * 0.125f;
}

static void backward_window(const float* __restrict__ d_out, const float* __restrict__ saved_sum_of_window,
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
    float d_out_line[kSide];
    float saved_sum_of_window_line[kSide];
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
          d_out_line[place + i] = widen(d_out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          saved_sum_of_window_line[place + i] = widen(saved_sum_of_window[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
    }
    pad(d_out_line, width);
    pad(saved_sum_of_window_line, width);
    float d_x_rooms[8][kSide];
    for (int position_value = 0; position_value < 8; ++position_value) {
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float saved_sum_of_window_value = saved_sum_of_window_line[i];
        float d_x_value;
        backward_window_values(d_out_value, saved_sum_of_window_value, d_x_value);
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

// a: x, out, saved_sum_of_window, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const saved_sum_of_window = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  forward_window(x, out, saved_sum_of_window, sizes, threads);
  return 0;
}

// a: saved_sum_of_window, d_out, d_x, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const saved_sum_of_window = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  backward_window(d_out, saved_sum_of_window, d_x, sizes, threads);
  return 0;
}
