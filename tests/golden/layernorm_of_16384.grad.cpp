// fusegen 0.1.0   chain 0c48df6ca1ed   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 64-bit offsets
//   layernorm(16384, weight, bias)
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
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // layernorm(16384, weight, bias)
  out = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
  expect(saved_mean, sizes.outer.value);
  expect(saved_variance, sizes.outer.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
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
        const Index outer = row;
        Moments<float> mean_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          mean_sum.add(x_line, width);
        }
        mean_of_rows[row - top] = static_cast<float>(mean_sum.mean());
        variance_of_rows[row - top] = static_cast<float>(mean_sum.variance());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const float mean_value = mean_of_rows[row - top];
        const float variance_value = variance_of_rows[row - top];
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
        {
          const Index outer = row;
          const float mean_value = mean_of_rows[row - top];
          const float variance_value = variance_of_rows[row - top];
          float saved_mean_value;
          float saved_variance_value;
          forward_row_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
          saved_mean[outer] = narrow<float>(saved_mean_value);
          saved_variance[outer] = narrow<float>(saved_variance_value);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float weight,
    const float x, const float saved_mean, const float saved_variance, float& total_3_term,
    float& total_4_term, float& total_term) {
  const float difference = x - saved_mean;
  total_3_term = d_out * weight * difference;
  total_4_term = d_out * weight;
  total_term = d_out * (difference * (1.0f / sqrtf(saved_variance + 1e-05f)));
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float saved_mean,
    const float total_3, const float saved_variance, const float count_of_inner, const float d_out,
    const float weight, const float total_4, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product = 2.0f * (-0.5f * (total_3 * inverse_root) * (inverse_root * inverse_root));
  const float quotient = 1.0f / count_of_inner;
  const float sum = (x - saved_mean) * (product * quotient) + d_out * weight * inverse_root;
  d_x = sum - total_4 * inverse_root * quotient;
}

static void backward_row(const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ x, const float* __restrict__ saved_mean,
    const float* __restrict__ saved_variance, float* __restrict__ d_x, Sum* __restrict__ total_partials,
    Sum* __restrict__ total_2_partials, const BackwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(d_x, sizes.outer.value * sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index kept = 1, each = rows / kept, slots = slots_of_rows(each, kept), tasks = kept * slots;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> total_block(length);
    std::fill(total_block.at, total_block.at + length, float());
    const Values<float> total_2_block(length);
    std::fill(total_2_block.at, total_2_block.at + length, float());
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index kept_index = task / slots, slot = task % slots, begin = kept_index * each;
      Sum* const total_columns = total_partials + (slot * kept + kept_index) * length;
      std::fill(total_columns, total_columns + length, Sum());
      Sum* const total_2_columns = total_2_partials + (slot * kept + kept_index) * length;
      std::fill(total_2_columns, total_2_columns + length, Sum());
      const Index last = begin + each * (slot + 1) / slots;
      for (Index top = begin + each * slot / slots, unmerged = 0; top < last; top += together) {
        const Index bottom = std::min(last, top + together);
        float total_3_of_rows[kTogether];
        float total_4_of_rows[kTogether];
        for (Index row = top; row < bottom; ++row) {
          const Index outer = row;
          Sum total_3_sum;
          Sum total_4_sum;
          for (Index first = 0; first < length; first += kLine) {
            const Index width = std::min(kLine, length - first);
            const Index inner = first;
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
                d_out_room);
            float weight_room[kLine];
            const float* const weight_line = load<1>(weight + inner, width, weight_room);
            float x_room[kLine];
            const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
            const float saved_mean_value = widen(saved_mean[outer]);
            const float saved_variance_value = widen(saved_variance[outer]);
            float total_3_term_line[kLine];
            float total_4_term_line[kLine];
            float total_term_line[kLine];
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float d_out_value = d_out_line[i];
              const float weight_value = weight_line[i];
              const float x_value = x_line[i];
              float total_3_term_value;
              float total_4_term_value;
              float total_term_value;
              backward_row_stage_1(d_out_value, weight_value, x_value, saved_mean_value,
                  saved_variance_value, total_3_term_value, total_4_term_value, total_term_value);
              total_3_term_line[i] = total_3_term_value;
              total_4_term_line[i] = total_4_term_value;
              total_term_line[i] = total_term_value;
            }
            total_3_sum.add(total_3_term_line, width);
            total_4_sum.add(total_4_term_line, width);
            add_to_columns(total_block.at + first, total_term_line, width);
            add_to_columns(total_2_block.at + first, d_out_line, width);
          }
          total_3_of_rows[row - top] = static_cast<float>(total_3_sum.sum());
          total_4_of_rows[row - top] = static_cast<float>(total_4_sum.sum());
        }
        for (Index row = top; row < bottom; ++row) {
          const Index outer = row;
          const float total_3_value = total_3_of_rows[row - top];
          const float total_4_value = total_4_of_rows[row - top];
          for (Index first = 0; first < length; first += kLine) {
            const Index width = std::min(kLine, length - first);
            const Index inner = first;
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
                d_out_room);
            float weight_room[kLine];
            const float* const weight_line = load<1>(weight + inner, width, weight_room);
            float x_room[kLine];
            const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
            const float saved_mean_value = widen(saved_mean[outer]);
            const float saved_variance_value = widen(saved_variance[outer]);
            float d_x_room[kLine];
            float* const d_x_line = target<1>(d_x + (outer) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float x_value = x_line[i];
              const float d_out_value = d_out_line[i];
              const float weight_value = weight_line[i];
              float d_x_value;
              backward_row_values(x_value, saved_mean_value, total_3_value, saved_variance_value,
                  count_of_inner_value, d_out_value, weight_value, total_4_value, d_x_value);
              d_x_line[i] = d_x_value;
            }
            store<1>(d_x_line, width, d_x + (outer) * sizes.inner.value + inner);
          }
        }
        unmerged += bottom - top;
        if (unmerged < kUnmerged && bottom < last) continue;
        merge_columns(total_columns, total_block.at, length);
        merge_columns(total_2_columns, total_2_block.at, length);
        unmerged = 0;
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
  expect(d_weight, sizes.inner.value);
  expect(d_bias, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
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
    const Index inner = first;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + inner, width, d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + inner, width, d_bias_room);
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
    store<1>(d_weight_line, width, d_weight + inner);
    store<1>(d_bias_line, width, d_bias + inner);
  }
}

}  // namespace

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, bias, out, saved_mean, saved_variance, sizes, threads);
  return 0;
}

// a: x, weight, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, inner, threads.
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
  const BackwardSizes sizes{ {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  const Index total_partials_slots = slots_of_rows(sizes.outer.value, 1)
;
  const Index total_2_partials_slots = slots_of_rows(sizes.outer.value, 1)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(d_out, weight, x, saved_mean, saved_variance, d_x, total_partials, total_2_partials, sizes,
      threads);
  backward_finalise(d_weight, d_bias, total_partials, total_2_partials, sizes, total_partials_slots, threads);
  return 0;
}
