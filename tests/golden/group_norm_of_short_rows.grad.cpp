// fusegen 0.1.0   chain d386628db37e   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 64-bit offsets
//   group_norm(64, weight, bias) | silu
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

// How many blocks of rows leave partials of their own, where columns are added up; in as many tasks anyway.
inline Index slots_of(Index rows, Index columns, Index tasks = 1) {
  return std::max<Index>(1, std::min<Index>(std::min<Index>(rows, 64 / tasks), rows * columns / kPiece));
}

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

// So many columns are added up side by side.
constexpr Index kBeside = 4 * kLine;

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

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // group_norm(64, weight, bias)
  const float after_group_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // silu
  out = after_group_norm * (1.0f / (1.0f + exp_of(-after_group_norm)));
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  expect(saved_mean, sizes.outer.value * sizes.middle.value);
  expect(saved_variance, sizes.outer.value * sizes.middle.value);
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
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
        const Index above_middle = divide(row, sizes.middle);
        const Index middle = row - above_middle * sizes.middle.value;
        const Index outer = above_middle;
        Moments<float> mean_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          mean_sum.add(x_line, width);
        }
        mean_of_rows[row - top] = static_cast<float>(mean_sum.mean());
        variance_of_rows[row - top] = static_cast<float>(mean_sum.variance());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_middle = divide(row, sizes.middle);
        const Index middle = row - above_middle * sizes.middle.value;
        const Index outer = above_middle;
        const float mean_value = mean_of_rows[row - top];
        const float variance_value = variance_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + (middle) * sizes.inner.value + inner, width,
              weight_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + (middle) * sizes.inner.value + inner, width,
              bias_room);
          float out_room[kLine];
          float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
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
              out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
        }
        {
          const Index above_middle = divide(row, sizes.middle);
          const Index middle = row - above_middle * sizes.middle.value;
          const Index outer = above_middle;
          const float mean_value = mean_of_rows[row - top];
          const float variance_value = variance_of_rows[row - top];
          float saved_mean_value;
          float saved_variance_value;
          forward_row_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
          saved_mean[(outer) * sizes.middle.value + middle] = narrow<float>(saved_mean_value);
          saved_variance[(outer) * sizes.middle.value + middle] = narrow<float>(saved_variance_value);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float x,
    const float saved_mean, const float saved_variance, const float weight, const float bias,
    float& total_term, float& total_2_term, float& carried) {
  // group_norm(64, weight, bias)
  const float difference = x - saved_mean;
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float after_group_norm = difference * inverse_root * weight + bias;
  // backward, down to group_norm(64, weight, bias)
  const float sigmoid_value = 1.0f / (1.0f + exp_of(-after_group_norm));
  const float product = d_out * after_group_norm * (1.0f - sigmoid_value) * sigmoid_value;
  const float d_after_group_norm = d_out * sigmoid_value + product;
  const float product_2 = d_after_group_norm * weight;
  total_term = product_2 * difference;
  total_2_term = product_2;
  carried = product_2 * inverse_root;
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float saved_mean,
    const float total, const float saved_variance, const float count_of_inner, const float carried,
    const float total_2, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product = 2.0f * (-0.5f * (total * inverse_root) * (inverse_root * inverse_root));
  const float quotient = 1.0f / count_of_inner;
  d_x = (x - saved_mean) * (product * quotient) + carried - total_2 * inverse_root * quotient;
}

static void backward_row(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ saved_mean, const float* __restrict__ saved_variance,
    const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ d_x,
    const BackwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
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
        const Index above_middle = divide(row, sizes.middle);
        const Index middle = row - above_middle * sizes.middle.value;
        const Index outer = above_middle;
        const Index place = (row - top) * padded(length);
        Sum total_sum;
        Sum total_2_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_line = carried_rows.at + place + first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
          const float saved_variance_value = widen(saved_variance[(outer) * sizes.middle.value + middle]);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + (middle) * sizes.inner.value + inner, width,
              weight_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + (middle) * sizes.inner.value + inner, width,
              bias_room);
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
            float carried_value;
            backward_row_stage_1(d_out_value, x_value, saved_mean_value, saved_variance_value, weight_value,
                bias_value, total_term_value, total_2_term_value, carried_value);
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
        const Index above_middle = divide(row, sizes.middle);
        const Index middle = row - above_middle * sizes.middle.value;
        const Index outer = above_middle;
        const Index place = (row - top) * padded(length);
        const float total_value = total_of_rows[row - top];
        const float total_2_value = total_2_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_line = carried_rows.at + place + first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
          const float saved_variance_value = widen(saved_variance[(outer) * sizes.middle.value + middle]);
          float d_x_room[kLine];
          float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float carried_value = carried_line[i];
            float d_x_value;
            backward_row_values(x_value, saved_mean_value, total_value, saved_variance_value,
                count_of_inner_value, carried_value, total_2_value, d_x_value);
            d_x_line[i] = d_x_value;
          }
          store<1>(d_x_line, width,
              d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float d_out, const float x,
    const float saved_mean, const float saved_variance, const float weight, const float bias,
    float& total_3_term, float& total_4_term) {
  // group_norm(64, weight, bias)
  const float product = (x - saved_mean) * (1.0f / sqrtf(saved_variance + 1e-05f));
  const float after_group_norm = product * weight + bias;
  // backward, down to group_norm(64, weight, bias)
  const float sigmoid_value = 1.0f / (1.0f + exp_of(-after_group_norm));
  const float product_2 = d_out * after_group_norm * (1.0f - sigmoid_value) * sigmoid_value;
  const float d_after_group_norm = d_out * sigmoid_value + product_2;
  total_3_term = d_after_group_norm * product;
  total_4_term = d_after_group_norm;
}

static void backward_outer(const float* __restrict__ d_out, const float* __restrict__ x,
    const float* __restrict__ saved_mean, const float* __restrict__ saved_variance,
    const float* __restrict__ weight, const float* __restrict__ bias, Sum* __restrict__ total_3_partials,
    Sum* __restrict__ total_4_partials, const BackwardSizes sizes, int threads) {
  const Index kept = sizes.middle.value, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index middle = kept_index;
    SumLanes<kBeside> total_3_lanes(end - begin);
    SumLanes<kBeside> total_4_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
        const float saved_variance_value = widen(saved_variance[(outer) * sizes.middle.value + middle]);
        float weight_room[kLine];
        const float* const weight_line = load<1>(weight + (middle) * sizes.inner.value + inner, width,
            weight_room);
        float bias_room[kLine];
        const float* const bias_line = load<1>(bias + (middle) * sizes.inner.value + inner, width, bias_room);
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
          backward_outer_values(d_out_value, x_value, saved_mean_value, saved_variance_value, weight_value,
              bias_value, total_3_term_value, total_4_term_value);
          total_3_term_line[i] = total_3_term_value;
          total_4_term_line[i] = total_4_term_value;
        }
        total_3_lanes.add(total_3_term_line, width, first - begin);
        total_4_lanes.add(total_4_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_3_partials[block * columns + begin + i] = total_3_lanes.at(i);
    for (Index i = 0; i < end - begin; ++i) total_4_partials[block * columns + begin + i] = total_4_lanes.at(i);
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
  expect(d_weight, sizes.middle.value * sizes.inner.value);
  expect(d_bias, sizes.middle.value * sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.middle.value * sizes.inner.value;
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
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index middle = above_inner;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + (middle) * sizes.inner.value + inner, width,
        d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + (middle) * sizes.inner.value + inner, width, d_bias_room);
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
    store<1>(d_weight_line, width, d_weight + (middle) * sizes.inner.value + inner);
    store<1>(d_bias_line, width, d_bias + (middle) * sizes.inner.value + inner);
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
  forward_row(x, weight, bias, out, saved_mean, saved_variance, sizes, threads);
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
  const Index total_3_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      sizes.middle.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_4_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      sizes.middle.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(d_out, x, saved_mean, saved_variance, weight, bias, d_x, sizes, threads);
  backward_outer(d_out, x, saved_mean, saved_variance, weight, bias, total_3_partials, total_4_partials,
      sizes, threads);
  backward_finalise(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}
