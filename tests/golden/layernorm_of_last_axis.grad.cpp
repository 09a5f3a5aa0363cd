// fusegen 0.1.0   chain 3ef4da3fd893   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, weight float32, x float32; 64-bit offsets
//   layernorm(64, weight, bias) | gelu | mul(0.5)
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#ifdef __linux__
#include <sys/mman.h>
#endif

using Index = int64_t;

// Vector variants of these stand in glibc's libmvec; the attribute lets loops use them.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
extern "C" {
__attribute__((simd("notinbranch"))) float erff(float) noexcept;
__attribute__((simd("notinbranch"))) float expf(float) noexcept;
}
#endif
#endif

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

// How many blocks of rows leave partials of their own, where columns are added up.
inline Index slots_of(Index rows, Index columns) {
  return std::max<Index>(1, std::min<Index>(std::min<Index>(rows, 64), rows * columns / kPiece));
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

template <typename Value>
inline double sum_of(const Value* line, Index width) {
  Value total = 0;
#pragma omp simd reduction(+ : total)
  for (Index i = 0; i < width; ++i) total += line[i];
  return total;
}

struct Sum {
  double total = 0;
  void merge(const Sum& other) { total += other.total; }
  template <typename Value>
  void add(const Value* line, Index width) {
    total += sum_of(line, width);
  }
  double sum() const { return total; }
};

// A sum for each place of a line.
struct SumLanes {
  double total[kLine];
  explicit SumLanes(Index width) { std::fill(total, total + padded(width), 0.0); }
  template <typename Value>
  void add(const Value* line, Index width) {
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) total[i] += line[i];
  }
  double sum(Index i) const { return total[i]; }
  Sum at(Index i) const { return {total[i]}; }
};

// Count, mean and the sum of squared distances from it; merged by Chan's formula.
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
  template <typename Value>
  void add(const Value* line, Index width) {
    const double n = static_cast<double>(width);
    const Value about = static_cast<Value>(sum_of(line, width) / n);
    Value squares = 0, drift = 0;
#pragma omp simd reduction(+ : squares, drift)
    for (Index i = 0; i < width; ++i) {
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

// Moments for each place of a line, by Welford's recurrence.
struct MomentsLanes {
  double count = 0, centre[kLine], distances[kLine];
  explicit MomentsLanes(Index width) {
    std::fill(centre, centre + padded(width), 0.0);
    std::fill(distances, distances + padded(width), 0.0);
  }
  template <typename Value>
  void add(const Value* line, Index width) {
    const double share = 1 / ++count;
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const double gap = line[i] - centre[i];
      centre[i] += gap * share;
      distances[i] += gap * (line[i] - centre[i]);
    }
  }
  double mean(Index i) const { return centre[i]; }
  double variance(Index i) const { return distances[i] / count; }
  Moments at(Index i) const { return {count, centre[i], distances[i]}; }
};

struct ForwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // layernorm(64, weight, bias)
  const float after_layernorm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // gelu
  const float after_gelu = after_layernorm * 0.5f * (1.0f + erff(after_layernorm * 0.707106769f));
  // mul(0.5)
  out = after_gelu * 0.5f;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Moments mean_sum;
    for (Index first = 0; first < length; first += kLine) {
      const Index width = std::min(kLine, length - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float mean_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        mean_term_line[i] = mean_term_value;
      }
      mean_sum.add(mean_term_line, width);
    }
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    for (Index first = 0; first < length; first += kLine) {
      const Index width = std::min(kLine, length - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float out_value;
        forward_row_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void backward_row_stage_2(const float d_out, const float x,
    const float mean, const float variance, const float weight, const float bias, float& total_term,
    float& total_2_term) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float after_layernorm = difference * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  total_term = d_after_layernorm * weight * difference;
  total_2_term = d_after_layernorm * weight;
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float mean,
    const float total, const float variance, const float count_of_inner, const float d_out,
    const float weight, const float bias, const float total_2, float& d_x) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float inverse_root = 1.0f / sqrtf(variance + 1e-05f);
  const float after_layernorm = difference * inverse_root * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  const float product_3 = 2.0f * (-0.5f * total * (inverse_root * inverse_root * inverse_root));
  const float sum = difference * (product_3 / count_of_inner) + d_after_layernorm * weight * inverse_root;
  d_x = sum - total_2 * inverse_root / count_of_inner;
}

static inline __attribute__((always_inline)) void backward_row_row_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void backward_row(const float* __restrict__ x, const float* __restrict__ d_out,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ d_x,
    float* __restrict__ mean_scratch, float* __restrict__ variance_scratch, const BackwardSizes sizes,
    int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(d_x, sizes.outer.value * sizes.inner.value);
  expect(mean_scratch, sizes.outer.value);
  expect(variance_scratch, sizes.outer.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Moments mean_sum;
    for (Index first = 0; first < length; first += kLine) {
      const Index width = std::min(kLine, length - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float mean_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        float mean_term_value;
        backward_row_stage_1(x_value, mean_term_value);
        mean_term_line[i] = mean_term_value;
      }
      mean_sum.add(mean_term_line, width);
    }
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    Sum total_sum;
    Sum total_2_sum;
    for (Index first = 0; first < length; first += kLine) {
      const Index width = std::min(kLine, length - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float total_term_line[kLine];
      float total_2_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float x_value = x_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float total_term_value;
        float total_2_term_value;
        backward_row_stage_2(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
            total_term_value, total_2_term_value);
        total_term_line[i] = total_term_value;
        total_2_term_line[i] = total_2_term_value;
      }
      total_sum.add(total_term_line, width);
      total_2_sum.add(total_2_term_line, width);
    }
    const float total_value = static_cast<float>(total_sum.sum());
    const float total_2_value = static_cast<float>(total_2_sum.sum());
    for (Index first = 0; first < length; first += kLine) {
      const Index width = std::min(kLine, length - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float d_x_room[kLine];
      float* const d_x_line = target<1>(d_x + (outer) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float d_out_value = d_out_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float d_x_value;
        backward_row_values(x_value, mean_value, total_value, variance_value, count_of_inner_value,
            d_out_value, weight_value, bias_value, total_2_value, d_x_value);
        d_x_line[i] = d_x_value;
      }
      store<1>(d_x_line, width, d_x + (outer) * sizes.inner.value + inner);
    }
    {
      float mean_scratch_value;
      float variance_scratch_value;
      backward_row_row_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch[outer] = narrow<float>(mean_scratch_value);
      variance_scratch[outer] = narrow<float>(variance_scratch_value);
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float d_out, const float x,
    const float mean, const float variance, const float weight, const float bias, float& total_3_term,
    float& total_4_term) {
  // layernorm(64, weight, bias)
  const float product = (x - mean) * (1.0f / sqrtf(variance + 1e-05f));
  const float after_layernorm = product * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product_2 = after_layernorm * 0.707106769f;
  const float product_3 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product_2 * product_2)));
  const float d_after_layernorm = product_3 * 0.707106769f + d_after_gelu * (1.0f + erff(product_2)) * 0.5f;
  total_3_term = d_after_layernorm * product;
  total_4_term = d_after_layernorm;
}

static void backward_outer(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ mean, const float* __restrict__ variance, const float* __restrict__ weight,
    const float* __restrict__ bias, Sum* __restrict__ total_3_partials, Sum* __restrict__ total_4_partials,
    const BackwardSizes sizes, int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index slots = slots_of(rows, columns);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots; ++task) {
    const Index kept_index = task / slots, slot = task % slots;
    for (Index first = 0; first < columns; first += kLine) {
      const Index width = std::min(kLine, columns - first);
      SumLanes total_3_lanes(width);
      SumLanes total_4_lanes(width);
      for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
        const Index outer = row;
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
            d_out_room);
        float x_room[kLine];
        const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
        const float mean_value = widen(mean[outer]);
        const float variance_value = widen(variance[outer]);
        float weight_room[kLine];
        const float* const weight_line = load<1>(weight + inner, width, weight_room);
        float bias_room[kLine];
        const float* const bias_line = load<1>(bias + inner, width, bias_room);
        float total_3_term_line[kLine];
        float total_4_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float x_value = x_line[i];
          const float weight_value = weight_line[i];
          const float bias_value = bias_line[i];
          float total_3_term_value;
          float total_4_term_value;
          backward_outer_values(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
              total_3_term_value, total_4_term_value);
          total_3_term_line[i] = total_3_term_value;
          total_4_term_line[i] = total_4_term_value;
        }
        total_3_lanes.add(total_3_term_line, width);
        total_4_lanes.add(total_4_term_line, width);
      }
      for (Index i = 0; i < width; ++i) total_3_partials[task * columns + first + i] = total_3_lanes.at(i);
      for (Index i = 0; i < width; ++i) total_4_partials[task * columns + first + i] = total_4_lanes.at(i);
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_3,
    const float total_4, float& d_weight, float& d_bias) {
  d_weight = total_3;
  d_bias = total_4;
}

static void backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias,
    const Sum* __restrict__ total_3_partials, const Sum* __restrict__ total_4_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.inner.value);
  expect(d_bias, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_3_sum;
    for (Index slot = 0; slot < slots; ++slot) total_3_sum.merge(total_3_partials[(above * slots + slot) * columns + column]);
    Sum total_4_sum;
    for (Index slot = 0; slot < slots; ++slot) total_4_sum.merge(total_4_partials[(above * slots + slot) * columns + column]);
    const float total_3_value = static_cast<float>(total_3_sum.sum());
    const float total_4_value = static_cast<float>(total_4_sum.sum());
    const Index inner = result;
    float d_weight_value;
    float d_bias_value;
    backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
    d_weight[inner] = narrow<float>(d_weight_value);
    d_bias[inner] = narrow<float>(d_bias_value);
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]} };
  const int threads = static_cast<int>(a[7]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, bias, out, sizes, threads);
  return 0;
}

// a: x, weight, bias, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_weight = reinterpret_cast<float*>(a[5]);
  auto* const d_bias = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_3_partials_slots = slots_of(sizes.outer.value, sizes.inner.value)
;
  const Index total_4_partials_slots = slots_of(sizes.outer.value, sizes.inner.value)
;
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(x, d_out, weight, bias, d_x, mean_scratch, variance_scratch, sizes, threads);
  backward_outer(d_out, x, mean_scratch, variance_scratch, weight, bias, total_3_partials, total_4_partials,
      sizes, threads);
  backward_finalise(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}
