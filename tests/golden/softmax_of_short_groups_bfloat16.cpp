// fusegen 0.1.0   chain 671f358fd755   signature forward: bias bfloat16, out bfloat16, weight bfloat16, x bfloat16; 64-bit offsets
//   group_norm(16, weight, bias) | softmax(1)
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

// Vector variants of these stand in glibc's libmvec; the attribute lets loops use them.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
extern "C" {
__attribute__((simd("notinbranch"))) float exp2f(float) noexcept;
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

// Slot by slot, in each of which the partials of neighbouring columns lie together, so many for each sum.
template <typename Kind>
inline void merge_slots(Kind* sums, const Kind* partials, Index first, Index width, Index columns,
    Index slots, Index each = 1) {
  for (Index i = 0; i < width;) {
    const Index above = (first + i) / columns, column = (first + i) % columns;
    const Index run = std::min(width - i, columns - column);
    for (Index slot = 0; slot < slots; ++slot) {
      const Kind* const from = partials + ((above * slots + slot) * columns + column) * each;
      for (Index j = 0; j < run * each; ++j) sums[i + j / each].merge(from[j]);
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

// The largest number; a NaN beats every number, as in torch.
template <typename Value>
inline Value larger(Value a, Value b) {
  return b > a || b != b ? b : a;
}

template <typename Value>
struct Peak {
  Value best = -std::numeric_limits<Value>::infinity();
  void merge(const Peak& other) { best = larger(best, other.best); }
  // Behind its end a line has copies of its last element, which change nothing. At the end halves are compared, by vectors:
  // one by one, each number would wait for the one before.
  void add(const Value* line, Index width) {
    Value largest[16];
    std::copy(line, line + 16, largest);
    for (Index first = 16; first < padded(width); first += 16) {
#pragma omp simd
      for (Index i = 0; i < 16; ++i) largest[i] = larger(largest[i], line[first + i]);
    }
    best = larger(best, folded<8>(largest));
  }
  template <int half>
  static Value folded(const Value* from) {
    typedef Value Part __attribute__((vector_size(half * sizeof(Value))));
    Part low, high;
    __builtin_memcpy(&low, from, sizeof(Part));
    __builtin_memcpy(&high, from + half, sizeof(Part));
    low = (high > low) | (high != high) ? high : low;
    return half == 2 ? larger(low[0],
        low[1]) : folded<(half > 2 ? half / 2 : 2)>(reinterpret_cast<const Value*>(&low));
  }
  Value max() const { return best; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner;
};

static void forward_outer(const bfloat16* __restrict__ x, Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index kept = sizes.outer.value, rows = sizes.axis_1.value,
      columns = sizes.axis_2.value * sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index outer = kept_index;
    MomentsLanes<float, kBeside> mean_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index axis_1 = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index above_inner = divide(first, sizes.inner);
        const Index inner = first - above_inner * sizes.inner.value;
        const Index axis_2 = above_inner;
        float x_room[kLine];
        const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
        mean_lanes.add(x_line, width, first - begin);
      }
      mean_lanes.next(end - begin);
    }
    mean_lanes.finish(end - begin);
    for (Index i = 0; i < end - begin; ++i) mean_partials[block * columns + begin + i] = mean_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments<float>* __restrict__ mean_partials, const ForwardSizes sizes, Index slots, int threads) {
  expect(mean_scratch, sizes.outer.value * sizes.axis_2.value);
  expect(variance_scratch, sizes.outer.value * sizes.axis_2.value);
  const Index columns = sizes.axis_2.value, results = sizes.outer.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Moments<float> mean_sums[kResults];
    merge_slots(mean_sums, mean_partials, first, width, columns, slots, sizes.inner.value);
    float mean_line[kResults];
    for (Index i = 0; i < width; ++i) mean_line[i] = static_cast<float>(mean_sums[i].mean());
    float variance_line[kResults];
    for (Index i = 0; i < width; ++i) variance_line[i] = static_cast<float>(mean_sums[i].variance());
    pad(mean_line, width);
    pad(variance_line, width);
    const Index above_axis_2 = divide(first, sizes.axis_2);
    const Index axis_2 = first - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    float mean_scratch_room[kLine];
    float* const mean_scratch_line = target<1>(mean_scratch + (outer) * sizes.axis_2.value + axis_2, width,
        mean_scratch_room);
    float variance_scratch_room[kLine];
    float* const variance_scratch_line = target<1>(variance_scratch + (outer) * sizes.axis_2.value + axis_2,
        width, variance_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float mean_value = mean_line[i];
      const float variance_value = variance_line[i];
      float mean_scratch_value;
      float variance_scratch_value;
      forward_finalise_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch_line[i] = mean_scratch_value;
      variance_scratch_line[i] = variance_scratch_value;
    }
    store<1>(mean_scratch_line, width, mean_scratch + (outer) * sizes.axis_2.value + axis_2);
    store<1>(variance_scratch_line, width, variance_scratch + (outer) * sizes.axis_2.value + axis_2);
  }
}

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, const float mean,
    const float variance, const float weight, const float bias, float& peak_term) {
  // group_norm(16, weight, bias)
  peak_term = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
}

static inline __attribute__((always_inline)) void forward_row_stage_2(const float x, const float mean,
    const float variance, const float weight, const float bias, const float peak, float& total_term,
    float& carried) {
  // group_norm(16, weight, bias)
  const float after_group_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  const float power = exp2f((after_group_norm - peak) * 0.721347511f);
  total_term = power * power;
  carried = total_term;
}

static inline __attribute__((always_inline)) void forward_row_values(const float carried, const float total,
    float& out) {
  // softmax(1)
  out = carried / total;
}

static void forward_row(const bfloat16* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, const bfloat16* __restrict__ weight,
    const bfloat16* __restrict__ bias, bfloat16* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_rows(together * padded(length));
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float peak_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        Peak<float> peak_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          float mean_line[kLine];
          gather<2>(mean + (outer) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, mean_line);
          float variance_line[kLine];
          gather<2>(variance + (outer) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, variance_line);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + (axis_2) * sizes.inner.value + inner, width,
              weight_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + (axis_2) * sizes.inner.value + inner, width,
              bias_room);
          float peak_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float mean_value = mean_line[i];
            const float variance_value = variance_line[i];
            const float weight_value = weight_line[i];
            const float bias_value = bias_line[i];
            float peak_term_value;
            forward_row_stage_1(x_value, mean_value, variance_value, weight_value, bias_value,
                peak_term_value);
            peak_term_line[i] = peak_term_value;
          }
          peak_sum.add(peak_term_line, width);
        }
        peak_of_rows[row - top] = static_cast<float>(peak_sum.max());
      }
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float peak_value = peak_of_rows[row - top];
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_line = carried_rows.at + place + first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          float mean_line[kLine];
          gather<2>(mean + (outer) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, mean_line);
          float variance_line[kLine];
          gather<2>(variance + (outer) * sizes.axis_2.value, first, width, {sizes.axis_2.value,
              sizes.inner.value}, {1, 0}, variance_line);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + (axis_2) * sizes.inner.value + inner, width,
              weight_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + (axis_2) * sizes.inner.value + inner, width,
              bias_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float mean_value = mean_line[i];
            const float variance_value = variance_line[i];
            const float weight_value = weight_line[i];
            const float bias_value = bias_line[i];
            float total_term_value;
            float carried_value;
            forward_row_stage_2(x_value, mean_value, variance_value, weight_value, bias_value, peak_value,
                total_term_value, carried_value);
            total_term_line[i] = total_term_value;
            carried_line[i] = carried_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_1 = divide(row, sizes.axis_1);
        const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float total_value = total_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index above_inner = divide(first, sizes.inner);
          const Index inner = first - above_inner * sizes.inner.value;
          const Index axis_2 = above_inner;
          float* const carried_line = carried_rows.at + place + first;
          float out_room[kLine];
          float* const out_line = target<1>(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float carried_value = carried_line[i];
            float out_value;
            forward_row_values(carried_value, total_value, out_value);
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
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  const Index mean_partials_slots = slots_of(sizes.axis_1.value, sizes.axis_2.value * sizes.inner.value,
      sizes.outer.value * ((sizes.axis_2.value * sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  if (is_measuring) return scratch.used;
  forward_outer(x, mean_partials, sizes, threads);
  forward_finalise(mean_scratch, variance_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_row(x, mean_scratch, variance_scratch, weight, bias, out, sizes, threads);
  return 0;
}
