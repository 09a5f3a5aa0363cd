// fusegen 0.1.0   chain 1a9079741c43   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 64-bit offsets
//   layernorm(weight, bias, axis=1) | gelu
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

// The same where rows are worked on as a whole, for each index that sums keep: four for few rows, eight of eight rows
// or more each, and beyond one for 32 rows, for partials are written and read.
inline Index slots_of_rows(Index rows, Index kept) {
  const Index few = std::max<Index>(std::min<Index>(rows, 4), std::min<Index>(rows / 8, 8));
  return std::min<Index>(std::max<Index>(1, 64 / kept), std::max<Index>(rows / 32, few));
}

constexpr Index kUnmerged = 16;

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

// Strided rows go side by side, so many that they still lie in a core's cache when the next stage comes, and that there
// are tasks for many cores.
inline Index columns_together(Index above, Index length, Index beside) {
  const Index fit = std::min<Index>(32768 / std::max<Index>(1, length), above * beside / 128);
  return std::min<Index>(kLine, std::max<Index>(64, fit / 16 * 16));
}

inline Index blocks_of(Index above, Index length, Index beside) {
  const Index side = columns_together(above, length, beside);
  return (beside + side - 1) / side;
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

// A few rows are added up in the arithmetic's type, and then to the sums of all.
template <typename Value>
inline void add_to_columns(Value* block, const Value* line, Index width) {
#pragma omp simd
  for (Index i = 0; i < width; ++i) block[i] += line[i];
}

template <typename Value>
inline void merge_columns(Sum* sums, Value* block, Index length) {
#pragma omp simd
  for (Index i = 0; i < length; ++i) {
    sums[i].total += block[i];
    block[i] = Value();
  }
}

// A sum for each of so many places.
template <Index places, typename Total = double>
struct SumLanes {
  Total total[places];
  explicit SumLanes(Index width) { std::fill(total, total + padded(width), Total()); }
  template <typename Value>
  void add(const Value* line, Index width, Index at = 0) {
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) total[at + i] += line[i];
  }
  Total sum(Index i) const { return total[i]; }
  Sum at(Index i) const { return {total[i]}; }
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

// Moments for each of so many places. Some lines together are taken as distances from the first of them.
template <typename Value, Index places>
struct MomentsLanes {
  double count = 0, centre[places], distances[places];
  int together = 0;
  Value about[places], drift[places], squares[places];
  explicit MomentsLanes(Index width) {
    std::fill(centre, centre + padded(width), 0.0);
    std::fill(distances, distances + padded(width), 0.0);
  }
  void add(const Value* line, Index width, Index at = 0) {
    if (together == 0) {
      std::copy(line, line + padded(width), about + at);
      std::fill(drift + at, drift + at + padded(width), Value());
      std::fill(squares + at, squares + at + padded(width), Value());
      return;
    }
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const Value distance = line[i] - about[at + i];
      drift[at + i] += distance;
      squares[at + i] += distance * distance;
    }
  }
  void next(Index width) {
    if (++together == 16) finish(width);
  }
  // Merges the last lines with those before.
  void finish(Index width) {
    if (together == 0) return;
    const double n = together, all = count + n, share = n / all;
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const double mean_drift = drift[i] / n, gap = about[i] + mean_drift - centre[i];
      distances[i] += squares[i] - drift[i] * mean_drift + gap * gap * count * share;
      centre[i] += gap * share;
    }
    count = all;
    together = 0;
  }
  double mean(Index i) const { return centre[i]; }
  double variance(Index i) const { return distances[i] / count; }
  Moments<Value> at(Index i) const { return {count, centre[i], distances[i]}; }
};

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_column_values_once(const float variance,
    float& inverse_root) {
  inverse_root = 1.0f / sqrtf(variance + 1e-05f);
}

static inline __attribute__((always_inline)) void forward_column_values(const float x, const float mean,
    const float inverse_root, const float weight, const float bias, float& out) {
  // layernorm(weight, bias, axis=1)
  const float after_layernorm = (x - mean) * inverse_root * weight + bias;
  // gelu
  out = after_layernorm * 0.5f * (1.0f + erf_of(after_layernorm * 0.707106769f));
}

static inline __attribute__((always_inline)) void forward_column_row_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

static void forward_column(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  expect(saved_mean, sizes.outer.value * sizes.inner.value);
  expect(saved_variance, sizes.outer.value * sizes.inner.value);
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index above_index = task / blocks, first = task % blocks * side;
      const Index width = std::min(side, beside - first);
      const Index outer = above_index;
      MomentsLanes<float, kLine> mean_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index inner = first;
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        mean_lanes.add(x_line, width);
        mean_lanes.next(width);
      }
      mean_lanes.finish(width);
      float mean_line[kLine];
      for (Index i = 0; i < padded(width); ++i) mean_line[i] = static_cast<float>(mean_lanes.mean(i));
      float variance_line[kLine];
      for (Index i = 0; i < padded(width); ++i) variance_line[i] = static_cast<float>(mean_lanes.variance(i));
      {  // what does not vary along a row is found once
        const Index inner = first;
        float inverse_root_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float variance_value = variance_line[i];
          float inverse_root_value;
          forward_column_values_once(variance_value, inverse_root_value);
          inverse_root_line[i] = inverse_root_value;
        }
        for (Index r = 0; r < length; ++r) {
          const Index middle = r;
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          const float weight_value = widen(weight[middle]);
          const float bias_value = widen(bias[middle]);
          float out_room[kLine];
          float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float mean_value = mean_line[i];
            const float inverse_root_value = inverse_root_line[i];
            float out_value;
            forward_column_values(x_value, mean_value, inverse_root_value, weight_value, bias_value,
                out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width,
              out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
        }
      }
      {
        const Index inner = first;
        float saved_mean_room[kLine];
        float* const saved_mean_line = target<1>(saved_mean + (outer) * sizes.inner.value + inner, width,
            saved_mean_room);
        float saved_variance_room[kLine];
        float* const saved_variance_line = target<1>(saved_variance + (outer) * sizes.inner.value + inner,
            width, saved_variance_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float mean_value = mean_line[i];
          const float variance_value = variance_line[i];
          float saved_mean_value;
          float saved_variance_value;
          forward_column_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
          saved_mean_line[i] = saved_mean_value;
          saved_variance_line[i] = saved_variance_value;
        }
        store<1>(saved_mean_line, width, saved_mean + (outer) * sizes.inner.value + inner);
        store<1>(saved_variance_line, width, saved_variance + (outer) * sizes.inner.value + inner);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_column_stage_1_once(const float saved_variance,
    float& inverse_root) {
  inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
}

static inline __attribute__((always_inline)) void backward_column_stage_1(const float d_out, const float x,
    const float saved_mean, const float inverse_root, const float weight, const float bias,
    float& total_3_term, float& total_4_term, float& carried, float& total_term, float& total_2_term) {
  // layernorm(weight, bias, axis=1)
  const float difference = x - saved_mean;
  const float product = difference * inverse_root;
  const float after_layernorm = product * weight + bias;
  // backward, down to layernorm(weight, bias, axis=1)
  const float product_2 = after_layernorm * 0.707106769f;
  const float product_3 = d_out * (after_layernorm * 0.5f) * (1.12837923f * exp_of(-(product_2 * product_2)));
  const float d_after_layernorm = product_3 * 0.707106769f + d_out * (1.0f + erf_of(product_2)) * 0.5f;
  const float product_4 = d_after_layernorm * weight;
  total_3_term = product_4 * difference;
  total_4_term = product_4;
  carried = product_4 * inverse_root;
  total_term = d_after_layernorm * product;
  total_2_term = d_after_layernorm;
}

static inline __attribute__((always_inline)) void backward_column_values_once(const float total_3,
    const float saved_variance, const float count_of_middle, const float total_4, float& product,
    float& product_2) {
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product_3 = 2.0f * (-0.5f * (total_3 * inverse_root) * (inverse_root * inverse_root));
  const float quotient = 1.0f / count_of_middle;
  product = product_3 * quotient;
  product_2 = total_4 * inverse_root * quotient;
}

static inline __attribute__((always_inline)) void backward_column_values(const float x,
    const float saved_mean, const float product, const float carried, const float product_2, float& d_x) {
  d_x = (x - saved_mean) * product + carried - product_2;
}

static void backward_column(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ saved_mean, const float* __restrict__ saved_variance,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ d_x,
    Sum* __restrict__ total_partials, Sum* __restrict__ total_2_partials, const BackwardSizes sizes,
    int threads) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
  const Index kept = 1, each = tasks / kept, slots = slots_of_rows(each, kept);
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
    const Values<float> carried_rows(length * side);
#pragma omp for schedule(static)
    for (Index share = 0; share < kept * slots; ++share) {
      const Index kept_index = share / slots, slot = share % slots, begin = kept_index * each;
      Sum* const total_columns = total_partials + (slot * kept + kept_index) * length;
      std::fill(total_columns, total_columns + length, Sum());
      Sum* const total_2_columns = total_2_partials + (slot * kept + kept_index) * length;
      std::fill(total_2_columns, total_2_columns + length, Sum());
      for (Index task = begin + each * slot / slots; task < begin + each * (slot + 1) / slots; ++task) {
        const Index above_index = task / blocks, first = task % blocks * side;
        const Index width = std::min(side, beside - first);
        const Index outer = above_index;
        SumLanes<kLine> total_3_lanes(width);
        SumLanes<kLine> total_4_lanes(width);
        {  // what does not vary along a row is found once
          const Index inner = first;
          float saved_variance_room[kLine];
          const float* const saved_variance_line = load<1>(saved_variance + (outer) * sizes.inner.value + inner, width, saved_variance_room);
          float inverse_root_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float saved_variance_value = saved_variance_line[i];
            float inverse_root_value;
            backward_column_stage_1_once(saved_variance_value, inverse_root_value);
            inverse_root_line[i] = inverse_root_value;
          }
          for (Index r = 0; r < length; ++r) {
            const Index middle = r;
            const Index place = r * side;
            const Index inner = first;
            float* const carried_line = carried_rows.at + place;
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
            float x_room[kLine];
            const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
            float saved_mean_room[kLine];
            const float* const saved_mean_line = load<1>(saved_mean + (outer) * sizes.inner.value + inner,
                width, saved_mean_room);
            const float weight_value = widen(weight[middle]);
            const float bias_value = widen(bias[middle]);
            float total_3_term_line[kLine];
            float total_4_term_line[kLine];
            float total_term_line[kLine];
            float total_2_term_line[kLine];
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float d_out_value = d_out_line[i];
              const float x_value = x_line[i];
              const float saved_mean_value = saved_mean_line[i];
              const float inverse_root_value = inverse_root_line[i];
              float total_3_term_value;
              float total_4_term_value;
              float carried_value;
              float total_term_value;
              float total_2_term_value;
              backward_column_stage_1(d_out_value, x_value, saved_mean_value, inverse_root_value,
                  weight_value, bias_value, total_3_term_value, total_4_term_value, carried_value,
                  total_term_value, total_2_term_value);
              total_3_term_line[i] = total_3_term_value;
              total_4_term_line[i] = total_4_term_value;
              carried_line[i] = carried_value;
              total_term_line[i] = total_term_value;
              total_2_term_line[i] = total_2_term_value;
            }
            total_columns[r].add(total_term_line, width);
            total_2_columns[r].add(total_2_term_line, width);
            total_3_lanes.add(total_3_term_line, width);
            total_4_lanes.add(total_4_term_line, width);
          }
        }
        float total_3_line[kLine];
        for (Index i = 0; i < padded(width); ++i) total_3_line[i] = static_cast<float>(total_3_lanes.sum(i));
        float total_4_line[kLine];
        for (Index i = 0; i < padded(width); ++i) total_4_line[i] = static_cast<float>(total_4_lanes.sum(i));
        {  // what does not vary along a row is found once
          const Index inner = first;
          float saved_variance_room[kLine];
          const float* const saved_variance_line = load<1>(saved_variance + (outer) * sizes.inner.value + inner, width, saved_variance_room);
          float product_line[kLine];
          float product_2_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float total_3_value = total_3_line[i];
            const float saved_variance_value = saved_variance_line[i];
            const float total_4_value = total_4_line[i];
            float product_value;
            float product_2_value;
            backward_column_values_once(total_3_value, saved_variance_value, count_of_middle_value,
                total_4_value, product_value, product_2_value);
            product_line[i] = product_value;
            product_2_line[i] = product_2_value;
          }
          for (Index r = 0; r < length; ++r) {
            const Index middle = r;
            const Index place = r * side;
            const Index inner = first;
            float* const carried_line = carried_rows.at + place;
            float x_room[kLine];
            const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
            float saved_mean_room[kLine];
            const float* const saved_mean_line = load<1>(saved_mean + (outer) * sizes.inner.value + inner,
                width, saved_mean_room);
            float d_x_room[kLine];
            float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float x_value = x_line[i];
              const float saved_mean_value = saved_mean_line[i];
              const float product_value = product_line[i];
              const float carried_value = carried_line[i];
              const float product_2_value = product_2_line[i];
              float d_x_value;
              backward_column_values(x_value, saved_mean_value, product_value, carried_value,
                  product_2_value, d_x_value);
              d_x_line[i] = d_x_value;
            }
            store<1>(d_x_line, width,
                d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
          }
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    const float total_2, float& d_weight, float& d_bias) {
  d_weight = total;
  d_bias = total_2;
}

static void backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias,
    const Sum* __restrict__ total_partials, const Sum* __restrict__ total_2_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.middle.value);
  expect(d_bias, sizes.middle.value);
  const Index columns = sizes.middle.value, results = sizes.middle.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    Sum total_2_sums[kResults];
    merge_slots(total_2_sums, total_2_partials, first, width, columns, slots);
    float total_2_line[kResults];
    for (Index i = 0; i < width; ++i) total_2_line[i] = static_cast<float>(total_2_sums[i].sum());
    pad(total_2_line, width);
    const Index middle = first;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + middle, width, d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + middle, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float total_2_value = total_2_line[i];
      float d_weight_value;
      float d_bias_value;
      backward_finalise_values(total_value, total_2_value, d_weight_value, d_bias_value);
      d_weight_line[i] = d_weight_value;
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_weight_line, width, d_weight + middle);
    store<1>(d_bias_line, width, d_bias + middle);
  }
}

}  // namespace

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  if (is_measuring) return scratch.used;
  forward_column(x, weight, bias, out, saved_mean, saved_variance, sizes, threads);
  return 0;
}

// a: x, weight, bias, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const float*>(a[5]);
  auto* const d_x = reinterpret_cast<float*>(a[6]);
  auto* const d_weight = reinterpret_cast<float*>(a[7]);
  auto* const d_bias = reinterpret_cast<float*>(a[8]);
  const bool is_measuring = a[9] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ {a[10]}, {a[11]}, {a[12]} };
  const int threads = static_cast<int>(a[13]);
  const Index total_partials_slots = slots_of_rows(sizes.outer.value * blocks_of(sizes.outer.value,
      sizes.middle.value, sizes.inner.value), 1)
;
  const Index total_2_partials_slots = slots_of_rows(sizes.outer.value * blocks_of(sizes.outer.value,
      sizes.middle.value, sizes.inner.value), 1)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  backward_column(d_out, x, saved_mean, saved_variance, weight, bias, d_x, total_partials, total_2_partials,
      sizes, threads);
  backward_finalise(d_weight, d_bias, total_partials, total_2_partials, sizes, total_partials_slots, threads);
  return 0;
}
