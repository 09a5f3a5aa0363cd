// fusegen 0.1.0   chain 97467a09e48a   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 64-bit offsets
//   gelu | group_norm(4, weight, bias)
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

// So many results of partials are worked on by one thread at a time.
constexpr Index kResults = 256;

// Slot by slot, in each of which the partials of neighbouring columns lie together.
template <typename Kind>
inline void merge_slots(Kind* sums, const Kind* partials, Index first, Index width, Index columns,
    Index slots) {
  for (Index i = 0; i < width;) {
    const Index above = (first + i) / columns, column = (first + i) % columns;
    const Index run = std::min(width - i, columns - column);
    for (Index slot = 0; slot < slots; ++slot) {
      const Kind* const from = partials + (above * slots + slot) * columns + column;
      for (Index j = 0; j < run; ++j) sums[i + j].merge(from[j]);
    }
    i += run;
  }
}

inline Index padded(Index width) { return (width + 15) / 16 * 16; }

// What a thread keeps of its rows; by malloc, as no module is linked with the C++ library.
template <typename Value>
struct Values {
  Value* const at;
  explicit Values(Index count) : at(static_cast<Value*>(std::malloc(static_cast<std::size_t>(count) * sizeof(Value)))) {
    if (at == nullptr) std::abort();
  }
  Values(const Values&) = delete;
  ~Values() { std::free(at); }
};

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

struct Sum {
  double total = 0;
  void merge(const Sum& other) { total += other.total; }
  template <typename Value>
  void add(const Value* line, Index width) {
    total += sum_of(line, width);
  }
  double sum() const { return total; }
};

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

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, float& mean_term,
    float& carried_after_gelu) {
  // gelu
  mean_term = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  carried_after_gelu = mean_term;
}

static inline __attribute__((always_inline)) void forward_row_values(const float carried_after_gelu,
    const float mean, const float variance, const float weight, const float bias, float& out) {
  // group_norm(4, weight, bias)
  const float product = (carried_after_gelu - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight;
  out = product + bias;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(saved_mean, sizes.outer.value * sizes.axis_1.value);
  expect(saved_variance, sizes.outer.value * sizes.axis_1.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_after_gelu_rows(together * padded(length));
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float mean_of_rows[kTogether];
      float variance_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        Moments<float> mean_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_after_gelu_line = carried_after_gelu_rows.at + place + first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          float mean_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            float mean_term_value;
            float carried_after_gelu_value;
            forward_row_stage_1(x_value, mean_term_value, carried_after_gelu_value);
            mean_term_line[i] = mean_term_value;
            carried_after_gelu_line[i] = carried_after_gelu_value;
          }
          mean_sum.add(mean_term_line, width);
        }
        mean_of_rows[row - top] = static_cast<float>(mean_sum.mean());
        variance_of_rows[row - top] = static_cast<float>(mean_sum.variance());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float mean_value = mean_of_rows[row - top];
        const float variance_value = variance_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_after_gelu_line = carried_after_gelu_rows.at + place + first;
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
            const float carried_after_gelu_value = carried_after_gelu_line[i];
            const float weight_value = weight_line[i];
            const float bias_value = bias_line[i];
            float out_value;
            forward_row_values(carried_after_gelu_value, mean_value, variance_value, weight_value,
                bias_value, out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width,
              out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
        }
        {
          const Index above_axis_1 = divide(row, sizes.axis_1);
          const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
          const Index outer = above_axis_1;
          const float mean_value = mean_of_rows[row - top];
          const float variance_value = variance_of_rows[row - top];
          float saved_mean_value;
          float saved_variance_value;
          forward_row_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
          saved_mean[(outer) * sizes.axis_1.value + axis_1] = narrow<float>(saved_mean_value);
          saved_variance[(outer) * sizes.axis_1.value + axis_1] = narrow<float>(saved_variance_value);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float weight,
    const float x, const float saved_mean, float& total_term, float& total_2_term, float& carried) {
  // gelu
  const float after_gelu = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  total_term = d_out * weight * (after_gelu - saved_mean);
  total_2_term = d_out * weight;
  carried = 1.0f + erf_of(x * 0.707106769f);
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float carried,
    const float saved_mean, const float total, const float saved_variance, const float count_of_axis_2_inner,
    const float d_out, const float weight, const float total_2, float& d_x) {
  // gelu
  const float product = x * 0.5f;
  const float after_gelu = product * carried;
  // backward, down to gelu
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product_2 = 2.0f * (-0.5f * (total * inverse_root) * (inverse_root * inverse_root));
  const float quotient = 1.0f / count_of_axis_2_inner;
  const float sum = (after_gelu - saved_mean) * (product_2 * quotient) + d_out * weight * inverse_root;
  const float d_after_gelu = sum - total_2 * inverse_root * quotient;
  const float product_3 = x * 0.707106769f;
  const float product_4 = d_after_gelu * product * (1.12837923f * exp_of(-(product_3 * product_3)));
  d_x = product_4 * 0.707106769f + d_after_gelu * carried * 0.5f;
}

static void backward_row(const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ x, const float* __restrict__ saved_mean,
    const float* __restrict__ saved_variance, float* __restrict__ d_x, const BackwardSizes sizes,
    int threads) {
  const float count_of_axis_2_inner_value = static_cast<float>(sizes.axis_2.value * sizes.inner.value);
  expect(d_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_rows(together * padded(length));
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float total_of_rows[kTogether];
      float total_2_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        Sum total_sum;
        Sum total_2_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_line = carried_rows.at + place + first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
          float weight_line[kLine];
          gather<2>(weight + (axis_1) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, weight_line);
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_1.value + axis_1]);
          float total_term_line[kLine];
          float total_2_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float d_out_value = d_out_line[i];
            const float weight_value = weight_line[i];
            const float x_value = x_line[i];
            float total_term_value;
            float total_2_term_value;
            float carried_value;
            backward_row_stage_1(d_out_value, weight_value, x_value, saved_mean_value, total_term_value,
                total_2_term_value, carried_value);
            total_term_line[i] = total_term_value;
            total_2_term_line[i] = total_2_term_value;
            carried_line[i] = carried_value;
          }
          total_sum.add(total_term_line, width);
          total_2_sum.add(total_2_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
        total_2_of_rows[row - top] = static_cast<float>(total_2_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float total_value = total_of_rows[row - top];
        const float total_2_value = total_2_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_line = carried_rows.at + place + first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
          float weight_line[kLine];
          gather<2>(weight + (axis_1) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, weight_line);
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_1.value + axis_1]);
          const float saved_variance_value = widen(saved_variance[(outer) * sizes.axis_1.value + axis_1]);
          float d_x_room[kLine];
          float* const d_x_line = target<1>(d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float carried_value = carried_line[i];
            const float d_out_value = d_out_line[i];
            const float weight_value = weight_line[i];
            float d_x_value;
            backward_row_values(x_value, carried_value, saved_mean_value, total_value, saved_variance_value,
                count_of_axis_2_inner_value, d_out_value, weight_value, total_2_value, d_x_value);
            d_x_line[i] = d_x_value;
          }
          store<1>(d_x_line, width,
              d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_inner_values(const float d_out, const float x,
    const float saved_mean, const float saved_variance, float& total_3_term) {
  // gelu
  const float after_gelu = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  const float product = (after_gelu - saved_mean) * (1.0f / sqrtf(saved_variance + 1e-05f));
  total_3_term = d_out * product;
}

static void backward_inner(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ saved_mean, const float* __restrict__ saved_variance,
    Sum* __restrict__ total_3_partials, Sum* __restrict__ total_4_partials, const BackwardSizes sizes,
    int threads) {
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_axis_2 = divide(row, sizes.axis_2);
    const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Sum total_3_sum;
    Sum total_4_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
      float x_room[kLine];
      const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
      const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_1.value + axis_1]);
      const float saved_variance_value = widen(saved_variance[(outer) * sizes.axis_1.value + axis_1]);
      float total_3_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float x_value = x_line[i];
        float total_3_term_value;
        backward_inner_values(d_out_value, x_value, saved_mean_value, saved_variance_value,
            total_3_term_value);
        total_3_term_line[i] = total_3_term_value;
      }
      total_3_sum.add(total_3_term_line, width);
      total_4_sum.add(d_out_line, width);
    }
    total_3_partials[((axis_1) * sizes.axis_2.value + axis_2) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_3_sum;
    total_4_partials[((axis_1) * sizes.axis_2.value + axis_2) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_4_sum;
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
  expect(d_weight, sizes.axis_1.value * sizes.axis_2.value);
  expect(d_bias, sizes.axis_1.value * sizes.axis_2.value);
  const Index columns = 1, results = sizes.axis_1.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_3_sums[kResults];
    merge_slots(total_3_sums, total_3_partials, first, width, columns, slots);
    float total_3_line[kResults];
    for (Index i = 0; i < width; ++i) total_3_line[i] = static_cast<float>(total_3_sums[i].sum());
    pad(total_3_line, width);
    Sum total_4_sums[kResults];
    merge_slots(total_4_sums, total_4_partials, first, width, columns, slots);
    float total_4_line[kResults];
    for (Index i = 0; i < width; ++i) total_4_line[i] = static_cast<float>(total_4_sums[i].sum());
    pad(total_4_line, width);
    const Index above_axis_2 = divide(first, sizes.axis_2);
    const Index axis_2 = first - above_axis_2 * sizes.axis_2.value;
    const Index axis_1 = above_axis_2;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + (axis_1) * sizes.axis_2.value + axis_2, width,
        d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + (axis_1) * sizes.axis_2.value + axis_2, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      const float total_4_value = total_4_line[i];
      float d_weight_value;
      float d_bias_value;
      backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
      d_weight_line[i] = d_weight_value;
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_weight_line, width, d_weight + (axis_1) * sizes.axis_2.value + axis_2);
    store<1>(d_bias_line, width, d_bias + (axis_1) * sizes.axis_2.value + axis_2);
  }
}

}  // namespace

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, bias, out, saved_mean, saved_variance, sizes, threads);
  return 0;
}

// a: x, weight, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[3]);
  auto* const d_out = reinterpret_cast<const float*>(a[4]);
  auto* const d_x = reinterpret_cast<float*>(a[5]);
  auto* const d_weight = reinterpret_cast<float*>(a[6]);
  auto* const d_bias = reinterpret_cast<float*>(a[7]);
  const bool is_measuring = a[8] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const BackwardSizes sizes{ {a[9]}, {a[10]}, {a[11]}, {a[12]} };
  const int threads = static_cast<int>(a[13]);
  const Index total_3_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  const Index total_4_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(d_out, weight, x, saved_mean, saved_variance, d_x, sizes, threads);
  backward_inner(d_out, x, saved_mean, saved_variance, total_3_partials, total_4_partials, sizes, threads);
  backward_finalise(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}
