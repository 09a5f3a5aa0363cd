// fusegen 0.1.0   chain d3d0f8643367   signature forward: bias bfloat16, new_running_mean bfloat16, new_running_var bfloat16, out bfloat16, residual bfloat16, running_mean bfloat16, running_var bfloat16, weight bfloat16, x bfloat16; 64-bit offsets
//   batch_norm(running_mean, running_var, weight, bias, training=True) | add(residual) | relu
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

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

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

struct ForwardSizes {
  Size outer, middle, inner;
};

static void forward_inner(const bfloat16* __restrict__ x, Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Moments<float> mean_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
      mean_sum.add(x_line, width);
    }
    mean_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = mean_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float running_mean, const float variance, const float count_of_outer_inner,
    const float running_var, float& new_running_mean, float& new_running_var, float& mean_scratch,
    float& variance_scratch) {
  new_running_mean = mean * 0.1f + running_mean * 0.9f;
  const float product = variance * (count_of_outer_inner / (count_of_outer_inner - 1.0f));
  new_running_var = product * 0.1f + running_var * 0.9f;
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(const bfloat16* running_mean, const bfloat16* running_var,
    bfloat16* new_running_mean, bfloat16* new_running_var, float* __restrict__ mean_scratch,
    float* __restrict__ variance_scratch, const Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  const float count_of_outer_inner_value = static_cast<float>(sizes.outer.value * sizes.inner.value);
  expect(new_running_mean, sizes.middle.value);
  expect(new_running_var, sizes.middle.value);
  expect(mean_scratch, sizes.middle.value);
  expect(variance_scratch, sizes.middle.value);
  const Index columns = 1, results = sizes.middle.value;
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
    const Index middle = first;
    float running_mean_room[kLine];
    const float* const running_mean_line = load<1>(running_mean + middle, width, running_mean_room);
    float running_var_room[kLine];
    const float* const running_var_line = load<1>(running_var + middle, width, running_var_room);
    float new_running_mean_room[kLine];
    float* const new_running_mean_line = target<1>(new_running_mean + middle, width, new_running_mean_room);
    float new_running_var_room[kLine];
    float* const new_running_var_line = target<1>(new_running_var + middle, width, new_running_var_room);
    float mean_scratch_room[kLine];
    float* const mean_scratch_line = target<1>(mean_scratch + middle, width, mean_scratch_room);
    float variance_scratch_room[kLine];
    float* const variance_scratch_line = target<1>(variance_scratch + middle, width, variance_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float mean_value = mean_line[i];
      const float running_mean_value = running_mean_line[i];
      const float variance_value = variance_line[i];
      const float running_var_value = running_var_line[i];
      float new_running_mean_value;
      float new_running_var_value;
      float mean_scratch_value;
      float variance_scratch_value;
      forward_finalise_values(mean_value, running_mean_value, variance_value, count_of_outer_inner_value,
          running_var_value, new_running_mean_value, new_running_var_value, mean_scratch_value,
          variance_scratch_value);
      new_running_mean_line[i] = new_running_mean_value;
      new_running_var_line[i] = new_running_var_value;
      mean_scratch_line[i] = mean_scratch_value;
      variance_scratch_line[i] = variance_scratch_value;
    }
    store<1>(new_running_mean_line, width, new_running_mean + middle);
    store<1>(new_running_var_line, width, new_running_var + middle);
    store<1>(mean_scratch_line, width, mean_scratch + middle);
    store<1>(variance_scratch_line, width, variance_scratch + middle);
  }
}

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float mean,
    const float variance, const float weight, const float bias, const float residual, float& out) {
  // batch_norm(running_mean, running_var, weight, bias, training=True)
  const float after_batch_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // add(residual)
  const float after_add = after_batch_norm + residual;
  // relu
  out = maximum(after_add, 0.0f);
}

static void forward_pointwise(const bfloat16* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, const bfloat16* __restrict__ weight,
    const bfloat16* __restrict__ bias, const bfloat16* __restrict__ residual, bfloat16* __restrict__ out,
    const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.middle.value * sizes.inner.value);
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
      const float mean_value = widen(mean[middle]);
      const float variance_value = widen(variance[middle]);
      const float weight_value = widen(weight[middle]);
      const float bias_value = widen(bias[middle]);
      float residual_room[kLine];
      const float* const residual_line = load<1>(residual + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, residual_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float residual_value = residual_line[i];
        float out_value;
        forward_pointwise_values(x_value, mean_value, variance_value, weight_value, bias_value,
            residual_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, running_mean, running_var, weight, bias, residual, out, new_running_mean, new_running_var, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const running_mean = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const running_var = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[3]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[4]);
  auto* const residual = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const out = reinterpret_cast<bfloat16*>(a[6]);
  auto* const new_running_mean = reinterpret_cast<bfloat16*>(a[7]);
  auto* const new_running_var = reinterpret_cast<bfloat16*>(a[8]);
  const bool is_measuring = a[9] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const ForwardSizes sizes{ {a[10]}, {a[11]}, {a[12]} };
  const int threads = static_cast<int>(a[13]);
  const Index mean_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.middle.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  if (is_measuring) return scratch.used;
  forward_inner(x, mean_partials, sizes, threads);
  forward_finalise(running_mean, running_var, new_running_mean, new_running_var, mean_scratch,
      variance_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_pointwise(x, mean_scratch, variance_scratch, weight, bias, residual, out, sizes, threads);
  return 0;
}
