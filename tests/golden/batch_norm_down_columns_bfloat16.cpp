// fusegen 0.1.0   chain 5c336f119df5   signature forward: bias bfloat16, new_running_mean bfloat16, new_running_var bfloat16, out bfloat16, running_mean bfloat16, running_var bfloat16, weight bfloat16, x bfloat16; 64-bit offsets
//   batch_norm(running_mean, running_var, weight, bias, training=True) | relu
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

// NaN in either argument is the result, as in torch. In two selections, for gcc makes branches of `or`.
template <typename Value>
inline Value maximum(Value a, Value b) {
  const Value first = a > b ? a : b;
  return a != a ? a : first;
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
  Size outer, inner;
};

static void forward_outer(const bfloat16* __restrict__ x, Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    MomentsLanes<float, kBeside> mean_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float x_room[kLine];
        const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
        mean_lanes.add(x_line, width, first - begin);
      }
      mean_lanes.next(end - begin);
    }
    mean_lanes.finish(end - begin);
    for (Index i = 0; i < end - begin; ++i) mean_partials[block * columns + begin + i] = mean_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float running_mean, const float variance, const float count_of_outer, const float running_var,
    float& new_running_mean, float& new_running_var, float& common_scratch, float& mean_scratch) {
  new_running_mean = mean * 0.1f + running_mean * 0.9f;
  new_running_var = variance * (count_of_outer / (count_of_outer - 1.0f)) * 0.1f + running_var * 0.9f;
  common_scratch = 1.0f / sqrtf(variance + 1e-05f);
  mean_scratch = mean;
}

static void forward_finalise(const bfloat16* running_mean, const bfloat16* running_var,
    bfloat16* new_running_mean, bfloat16* new_running_var, float* __restrict__ common_scratch,
    float* __restrict__ mean_scratch, const Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  const float count_of_outer_value = static_cast<float>(sizes.outer.value);
  expect(new_running_mean, sizes.inner.value);
  expect(new_running_var, sizes.inner.value);
  expect(common_scratch, sizes.inner.value);
  expect(mean_scratch, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Moments<float> mean_sums[kResults];
    merge_slots(mean_sums, mean_partials, first, width, columns, slots);
    float mean_line[kResults];
    for (Index i = 0; i < width; ++i) mean_line[i] = static_cast<float>(mean_sums[i].mean());
    float variance_line[kResults];
    for (Index i = 0; i < width; ++i) variance_line[i] = static_cast<float>(mean_sums[i].variance());
    pad(mean_line, width);
    pad(variance_line, width);
    const Index inner = first;
    float running_mean_room[kLine];
    const float* const running_mean_line = load<1>(running_mean + inner, width, running_mean_room);
    float running_var_room[kLine];
    const float* const running_var_line = load<1>(running_var + inner, width, running_var_room);
    float new_running_mean_room[kLine];
    float* const new_running_mean_line = target<1>(new_running_mean + inner, width, new_running_mean_room);
    float new_running_var_room[kLine];
    float* const new_running_var_line = target<1>(new_running_var + inner, width, new_running_var_room);
    float common_scratch_room[kLine];
    float* const common_scratch_line = target<1>(common_scratch + inner, width, common_scratch_room);
    float mean_scratch_room[kLine];
    float* const mean_scratch_line = target<1>(mean_scratch + inner, width, mean_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float mean_value = mean_line[i];
      const float running_mean_value = running_mean_line[i];
      const float variance_value = variance_line[i];
      const float running_var_value = running_var_line[i];
      float new_running_mean_value;
      float new_running_var_value;
      float common_scratch_value;
      float mean_scratch_value;
      forward_finalise_values(mean_value, running_mean_value, variance_value, count_of_outer_value,
          running_var_value, new_running_mean_value, new_running_var_value, common_scratch_value,
          mean_scratch_value);
      new_running_mean_line[i] = new_running_mean_value;
      new_running_var_line[i] = new_running_var_value;
      common_scratch_line[i] = common_scratch_value;
      mean_scratch_line[i] = mean_scratch_value;
    }
    store<1>(new_running_mean_line, width, new_running_mean + inner);
    store<1>(new_running_var_line, width, new_running_var + inner);
    store<1>(common_scratch_line, width, common_scratch + inner);
    store<1>(mean_scratch_line, width, mean_scratch + inner);
  }
}

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float mean,
    const float common, const float weight, const float bias, float& out) {
  // batch_norm(running_mean, running_var, weight, bias, training=True)
  const float after_batch_norm = (x - mean) * common * weight + bias;
  // relu
  out = maximum(after_batch_norm, 0.0f);
}

static void forward_pointwise(const bfloat16* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ common, const bfloat16* __restrict__ weight, const bfloat16* __restrict__ bias,
    bfloat16* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index outer = row;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float mean_room[kLine];
      const float* const mean_line = load<1>(mean + inner, width, mean_room);
      float common_room[kLine];
      const float* const common_line = load<1>(common + inner, width, common_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float mean_value = mean_line[i];
        const float common_value = common_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float out_value;
        forward_pointwise_values(x_value, mean_value, common_value, weight_value, bias_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, running_mean, running_var, weight, bias, out, new_running_mean, new_running_var, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const running_mean = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const running_var = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[3]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[4]);
  auto* const out = reinterpret_cast<bfloat16*>(a[5]);
  auto* const new_running_mean = reinterpret_cast<bfloat16*>(a[6]);
  auto* const new_running_var = reinterpret_cast<bfloat16*>(a[7]);
  const bool is_measuring = a[8] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const ForwardSizes sizes{ {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  const Index mean_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  forward_outer(x, mean_partials, sizes, threads);
  forward_finalise(running_mean, running_var, new_running_mean, new_running_var, common_scratch,
      mean_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_pointwise(x, mean_scratch, common_scratch, weight, bias, out, sizes, threads);
  return 0;
}
