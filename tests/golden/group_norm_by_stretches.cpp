// fusegen 0.1.0   chain a8f2b8515630   signature forward: bias float32, out float32, weight float32, x float32; 64-bit offsets
//   group_norm(8, weight, bias) | silu
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

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

// Short rows go through each stage together: what one row waits for is hidden behind the others. So many
// elements still lie in the fastest cache when the next stage comes.
constexpr Index kTogether = 64;

inline Index rows_together(Index length) {
  return std::min<Index>(kTogether, std::max<Index>(1, 4096 / std::max<Index>(1, length)));
}

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

// Goes along a line over several groups, run by run of the innermost: from one place to another, so far from the first.
template <int count, typename Run>
inline void along_groups(Index first, Index width, const Index (&sizes)[count], const Index (&steps)[count],
    Run run) {
  constexpr int last = count - 1;
  Index at[count], offset = 0;
  for (int n = last; n >= 0; --n) {
    at[n] = n == 0 ? first : first % sizes[n];
    first /= sizes[n];
    offset += at[n] * steps[n];
  }
  for (Index i = 0; i < width;) {
    const Index end = std::min(width, i + sizes[last] - at[last]);
    run(i, end, offset);
    i = end;
    offset -= at[last] * steps[last];
    at[last] = 0;
    for (int n = last - 1; n >= 0; --n) {
      offset += steps[n];
      if (++at[n] < sizes[n]) break;
      offset -= sizes[n] * steps[n];
      at[n] = 0;
    }
  }
}

// Such a line to read: along each group, its elements are so far apart, or 0 where one stands for all.
template <int count, typename Pointer, typename Value>
inline void gather(Pointer from, Index first, Index width, const Index (&sizes)[count],
                   const Index (&steps)[count], Value* line) {
  along_groups(first, width, sizes, steps, [&](Index i, Index end, Index offset) {
    const auto here = from + offset;
    for (Index j = i; j < end; ++j) line[j] = static_cast<Value>(widen(here[(j - i) * steps[count - 1]]));
  });
  pad(line, width);
}

// And to write.
template <int count, typename Stored, typename Value>
inline void scatter(const Value* line, Index first, Index width, const Index (&sizes)[count],
                    const Index (&steps)[count], Stored* to) {
  along_groups(first, width, sizes, steps, [&](Index i, Index end, Index offset) {
    for (Index j = i; j < end; ++j) to[offset + (j - i) * steps[count - 1]] = narrow<Stored>(line[j]);
  });
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

// Count, mean and the sum of squared distances from it; merged by Chan's formula.
template <typename Value>
struct Moments {
  double count = 0, centre = 0, distances = 0;
  void merge(const Moments& other) {
    if (count == 0) *this = other;
    else if (other.count != 0) {
      const double all = count + other.count, gap = other.centre - centre, share = other.count / all;
      centre += gap * share;
      distances += other.distances + gap * gap * count * share;
      count = all;
    }
  }
  // Distances about a first guess of the mean, mended by their own mean.
  void add(const Value* line, Index width) {
    const double n = static_cast<double>(width);
    const Value about = static_cast<Value>(sum_of(line, width) / n);
    Lanes<Value> lanes, all_squares, all_drift;
    for (Index i = 0; i < whole(width); i += 16) {
      lanes.load(line + i);
      lanes.at -= about;
      all_squares.at += lanes.at * lanes.at;
      all_drift.at += lanes.at;
    }
    Value squares = all_squares.sum(), drift = all_drift.sum();
    for (Index i = whole(width); i < width; ++i) {
      const Value distance = line[i] - about;
      squares += distance * distance;
      drift += distance;
    }
    const double mean_drift = drift / n;
    merge({n, about + mean_drift, squares - drift * mean_drift});
  }
  double mean() const { return centre; }
  double variance() const { return distances / count; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner;
};

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // group_norm(8, weight, bias)
  const float after_group_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // silu
  out = after_group_norm * (1.0f / (1.0f + exp_of(-after_group_norm)));
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float mean_of_rows[kTogether];
      float variance_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        Moments<float> mean_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          mean_sum.add(x_line, width);
        }
        mean_of_rows[row - top] = static_cast<float>(mean_sum.mean());
        variance_of_rows[row - top] = static_cast<float>(mean_sum.variance());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const float mean_value = mean_of_rows[row - top];
        const float variance_value = variance_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          float weight_line[kLine];
          gather<2>(weight + (axis_1) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, weight_line);
          float bias_line[kLine];
          gather<2>(bias + (axis_1) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, bias_line);
          float out_room[kLine];
          float* const out_line = target<1>(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float weight_value = weight_line[i];
            const float bias_value = bias_line[i];
            float out_value;
            forward_row_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width,
              out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
        }
      }
    }
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, bias, out, sizes, threads);
  return 0;
}
