// fusegen 0.1.0   chain 61178dd74499   signature forward+backward: bias bfloat16, d_bias bfloat16, d_out bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, saved_mean float32, saved_mean_ float32, saved_variance float32, weight bfloat16, x bfloat16; 64-bit offsets
//   layernorm(weight, bias) | mean(1)
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

struct bfloat16 {
  uint16_t bits;
};

inline float widen(bfloat16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }

template <>
inline bfloat16 narrow<bfloat16, float>(float x) {
  const uint32_t bits = bits_of<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : rounded)};
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

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, float& total_term) {
  // layernorm(weight, bias)
  total_term = (x - mean) * (1.0f / sqrtf(variance + 1e-05f));
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

static void forward_row(const bfloat16* __restrict__ x, float* __restrict__ saved_mean,
    float* __restrict__ saved_variance, Sum* __restrict__ total_partials, const ForwardSizes sizes,
    int threads) {
  expect(saved_mean, sizes.outer.value * sizes.middle.value);
  expect(saved_variance, sizes.outer.value * sizes.middle.value);
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index kept = sizes.outer.value, each = rows / kept, slots = slots_of_rows(each, kept),
      tasks = kept * slots;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> total_block(length);
    std::fill(total_block.at, total_block.at + length, float());
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index kept_index = task / slots, slot = task % slots, begin = kept_index * each;
      Sum* const total_columns = total_partials + (slot * kept + kept_index) * length;
      std::fill(total_columns, total_columns + length, Sum());
      const Index last = begin + each * (slot + 1) / slots;
      for (Index top = begin + each * slot / slots, unmerged = 0; top < last; top += together) {
        const Index bottom = std::min(last, top + together);
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
            float total_term_line[kLine];
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float x_value = x_line[i];
              float total_term_value;
              forward_row_values(x_value, mean_value, variance_value, total_term_value);
              total_term_line[i] = total_term_value;
            }
            add_to_columns(total_block.at + first, total_term_line, width);
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
        unmerged += bottom - top;
        if (unmerged < kUnmerged && bottom < last) continue;
        merge_columns(total_columns, total_block.at, length);
        unmerged = 0;
      }
    }
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float total,
    const float count_of_middle, const float weight, const float bias, float& out, float& saved_mean_) {
  // mean(1)
  out = total / count_of_middle * weight + bias;
  saved_mean_ = total / count_of_middle;
}

static void forward_finalise(const bfloat16* __restrict__ weight, const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ out, float* __restrict__ saved_mean_, const Sum* __restrict__ total_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  expect(out, sizes.outer.value * sizes.inner.value);
  expect(saved_mean_, sizes.outer.value * sizes.inner.value);
  const Index columns = sizes.outer.value * sizes.inner.value,
      results = sizes.outer.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    float weight_line[kLine];
    gather<2>(weight, first, width, {sizes.outer.value, sizes.inner.value}, {0, 1}, weight_line);
    float bias_line[kLine];
    gather<2>(bias, first, width, {sizes.outer.value, sizes.inner.value}, {0, 1}, bias_line);
    float out_room[kLine];
    float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
    float saved_mean__room[kLine];
    float* const saved_mean__line = target<1>(saved_mean_ + (outer) * sizes.inner.value + inner, width,
        saved_mean__room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float weight_value = weight_line[i];
      const float bias_value = bias_line[i];
      float out_value;
      float saved_mean__value;
      forward_finalise_values(total_value, count_of_middle_value, weight_value, bias_value, out_value,
          saved_mean__value);
      out_line[i] = out_value;
      saved_mean__line[i] = saved_mean__value;
    }
    store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    store<1>(saved_mean__line, width, saved_mean_ + (outer) * sizes.inner.value + inner);
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float weight,
    const float x, const float saved_mean, float& total_term) {
  total_term = d_out * weight * (x - saved_mean);
}

static inline __attribute__((always_inline)) void backward_row_row_values(const float total,
    float& total_scratch) {
  total_scratch = total;
}

static void backward_row(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ weight,
    const bfloat16* __restrict__ x, const float* __restrict__ saved_mean, float* __restrict__ total_scratch,
    const BackwardSizes sizes, int threads) {
  expect(total_scratch, sizes.outer.value * sizes.middle.value);
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_middle = divide(row, sizes.middle);
        const Index middle = row - above_middle * sizes.middle.value;
        const Index outer = above_middle;
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
              d_out_room);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + inner, width, weight_room);
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float d_out_value = d_out_line[i];
            const float weight_value = weight_line[i];
            const float x_value = x_line[i];
            float total_term_value;
            backward_row_stage_1(d_out_value, weight_value, x_value, saved_mean_value, total_term_value);
            total_term_line[i] = total_term_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        {
          const Index above_middle = divide(row, sizes.middle);
          const Index middle = row - above_middle * sizes.middle.value;
          const Index outer = above_middle;
          const float total_value = total_of_rows[row - top];
          float total_scratch_value;
          backward_row_row_values(total_value, total_scratch_value);
          total_scratch[(outer) * sizes.middle.value + middle] = narrow<float>(total_scratch_value);
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_inner_values(const float d_out,
    const float weight, float& total_2_term) {
  total_2_term = d_out * weight;
}

static void backward_inner(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ weight,
    Sum* __restrict__ total_2_partials, const BackwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index outer = row;
    Sum total_2_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float total_2_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float weight_value = weight_line[i];
        float total_2_term_value;
        backward_inner_values(d_out_value, weight_value, total_2_term_value);
        total_2_term_line[i] = total_2_term_value;
      }
      total_2_sum.add(total_2_term_line, width);
    }
    total_2_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_2_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_2,
    float& total_2_scratch) {
  total_2_scratch = total_2;
}

static void backward_finalise(float* __restrict__ total_2_scratch, const Sum* __restrict__ total_2_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(total_2_scratch, sizes.outer.value);
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_2_sums[kResults];
    merge_slots(total_2_sums, total_2_partials, first, width, columns, slots);
    float total_2_line[kResults];
    for (Index i = 0; i < width; ++i) total_2_line[i] = static_cast<float>(total_2_sums[i].sum());
    pad(total_2_line, width);
    const Index outer = first;
    float total_2_scratch_room[kLine];
    float* const total_2_scratch_line = target<1>(total_2_scratch + outer, width, total_2_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_2_value = total_2_line[i];
      float total_2_scratch_value;
      backward_finalise_values(total_2_value, total_2_scratch_value);
      total_2_scratch_line[i] = total_2_scratch_value;
    }
    store<1>(total_2_scratch_line, width, total_2_scratch + outer);
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float d_out,
    const float saved_mean_, float& total_3_term) {
  total_3_term = d_out * saved_mean_;
}

static void backward_outer(const bfloat16* __restrict__ d_out, const float* __restrict__ saved_mean_,
    Sum* __restrict__ total_3_partials, Sum* __restrict__ total_4_partials, const BackwardSizes sizes,
    int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    SumLanes<kBeside> total_3_lanes(end - begin);
    SumLanes<kBeside> total_4_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
            d_out_room);
        float saved_mean__room[kLine];
        const float* const saved_mean__line = load<1>(saved_mean_ + (outer) * sizes.inner.value + inner,
            width, saved_mean__room);
        float total_3_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float saved_mean__value = saved_mean__line[i];
          float total_3_term_value;
          backward_outer_values(d_out_value, saved_mean__value, total_3_term_value);
          total_3_term_line[i] = total_3_term_value;
        }
        total_3_lanes.add(total_3_term_line, width, first - begin);
        total_4_lanes.add(d_out_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_3_partials[block * columns + begin + i] = total_3_lanes.at(i);
    for (Index i = 0; i < end - begin; ++i) total_4_partials[block * columns + begin + i] = total_4_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_2_values(const float total_3,
    const float total_4, float& d_weight, float& d_bias) {
  d_weight = total_3;
  d_bias = total_4;
}

static void backward_finalise_2(bfloat16* __restrict__ d_weight, bfloat16* __restrict__ d_bias,
    const Sum* __restrict__ total_3_partials, const Sum* __restrict__ total_4_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.inner.value);
  expect(d_bias, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
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
    const Index inner = first;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + inner, width, d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + inner, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      const float total_4_value = total_4_line[i];
      float d_weight_value;
      float d_bias_value;
      backward_finalise_2_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
      d_weight_line[i] = d_weight_value;
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_weight_line, width, d_weight + inner);
    store<1>(d_bias_line, width, d_bias + inner);
  }
}

static inline __attribute__((always_inline)) void backward_pointwise_values(const float x,
    const float saved_mean, const float total, const float count_of_middle, const float saved_variance,
    const float count_of_inner, const float d_out, const float weight, const float total_2, float& d_x) {
  // backward, down to layernorm(weight, bias)
  const float d_after_layernorm = d_out * weight / count_of_middle;
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product = total / count_of_middle * inverse_root * inverse_root * inverse_root;
  const float sum = (x - saved_mean) * (-product / count_of_inner) + d_after_layernorm * inverse_root;
  d_x = sum - total_2 / count_of_middle * inverse_root / count_of_inner;
}

static void backward_pointwise(const bfloat16* __restrict__ x, const float* __restrict__ saved_mean,
    const float* __restrict__ total, const float* __restrict__ saved_variance,
    const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ weight,
    const float* __restrict__ total_2, bfloat16* __restrict__ d_x, const BackwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
      const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
      const float total_value = widen(total[(outer) * sizes.middle.value + middle]);
      const float saved_variance_value = widen(saved_variance[(outer) * sizes.middle.value + middle]);
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      const float total_2_value = widen(total_2[outer]);
      float d_x_room[kLine];
      float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float d_out_value = d_out_line[i];
        const float weight_value = weight_line[i];
        float d_x_value;
        backward_pointwise_values(x_value, saved_mean_value, total_value, count_of_middle_value,
            saved_variance_value, count_of_inner_value, d_out_value, weight_value, total_2_value, d_x_value);
        d_x_line[i] = d_x_value;
      }
      store<1>(d_x_line, width, d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, weight, bias, out, saved_mean, saved_variance, saved_mean_, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  auto* const saved_mean_ = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const ForwardSizes sizes{ {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  const Index total_partials_slots = slots_of_rows(sizes.middle.value, sizes.outer.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  forward_row(x, saved_mean, saved_variance, total_partials, sizes, threads);
  forward_finalise(weight, bias, out, saved_mean_, total_partials, sizes, total_partials_slots, threads);
  return 0;
}

// a: x, weight, saved_mean, saved_variance, saved_mean_, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[3]);
  auto* const saved_mean_ = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[7]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[8]);
  const bool is_measuring = a[9] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ {a[10]}, {a[11]}, {a[12]} };
  const int threads = static_cast<int>(a[13]);
  const Index total_2_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  const Index total_3_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_4_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value));
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * total_2_partials_slots);
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(d_out, weight, x, saved_mean, total_scratch, sizes, threads);
  backward_inner(d_out, weight, total_2_partials, sizes, threads);
  backward_finalise(total_2_scratch, total_2_partials, sizes, total_2_partials_slots, threads);
  backward_outer(d_out, saved_mean_, total_3_partials, total_4_partials, sizes, threads);
  backward_finalise_2(d_weight, d_bias, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  backward_pointwise(x, saved_mean, total_scratch, saved_variance, d_out, weight, total_2_scratch, d_x,
      sizes, threads);
  return 0;
}
