// fusegen 0.1.0   chain 7856e0743087   signature forward: bias float64, out float64, weight float64, x float64; 64-bit offsets
//   layernorm(weight, bias) | gelu
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
__attribute__((simd("notinbranch"))) double erf(double) noexcept;
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
  Size outer, inner;
};

static void forward_inner(const double* __restrict__ x, Moments<double>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index outer = row;
    Moments<double> mean_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      double x_room[kLine];
      const double* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      mean_sum.add(x_line, width);
    }
    mean_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = mean_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const double mean,
    const double variance, double& mean_scratch, double& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(double* __restrict__ mean_scratch, double* __restrict__ variance_scratch,
    const Moments<double>* __restrict__ mean_partials, const ForwardSizes sizes, Index slots, int threads) {
  expect(mean_scratch, sizes.outer.value);
  expect(variance_scratch, sizes.outer.value);
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Moments<double> mean_sums[kResults];
    merge_slots(mean_sums, mean_partials, first, width, columns, slots);
    double mean_line[kResults];
    for (Index i = 0; i < width; ++i) mean_line[i] = static_cast<double>(mean_sums[i].mean());
    double variance_line[kResults];
    for (Index i = 0; i < width; ++i) variance_line[i] = static_cast<double>(mean_sums[i].variance());
    pad(mean_line, width);
    pad(variance_line, width);
    const Index outer = first;
    double mean_scratch_room[kLine];
    double* const mean_scratch_line = target<1>(mean_scratch + outer, width, mean_scratch_room);
    double variance_scratch_room[kLine];
    double* const variance_scratch_line = target<1>(variance_scratch + outer, width, variance_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const double mean_value = mean_line[i];
      const double variance_value = variance_line[i];
      double mean_scratch_value;
      double variance_scratch_value;
      forward_finalise_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch_line[i] = mean_scratch_value;
      variance_scratch_line[i] = variance_scratch_value;
    }
    store<1>(mean_scratch_line, width, mean_scratch + outer);
    store<1>(variance_scratch_line, width, variance_scratch + outer);
  }
}

static inline __attribute__((always_inline)) void forward_pointwise_values(const double x, const double mean,
    const double variance, const double weight, const double bias, double& out) {
  // layernorm(weight, bias)
  const double after_layernorm = (x - mean) * (1.0 / sqrt(variance + 1e-05)) * weight + bias;
  // gelu
  out = after_layernorm * 0.5 * (1.0 + erf(after_layernorm * 0.7071067811865476));
}

static void forward_pointwise(const double* __restrict__ x, const double* __restrict__ mean,
    const double* __restrict__ variance, const double* __restrict__ weight, const double* __restrict__ bias,
    double* __restrict__ out, const ForwardSizes sizes, int threads) {
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
      double x_room[kLine];
      const double* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      const double mean_value = widen(mean[outer]);
      const double variance_value = widen(variance[outer]);
      double weight_room[kLine];
      const double* const weight_line = load<1>(weight + inner, width, weight_room);
      double bias_room[kLine];
      const double* const bias_line = load<1>(bias + inner, width, bias_room);
      double out_room[kLine];
      double* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const double x_value = x_line[i];
        const double weight_value = weight_line[i];
        const double bias_value = bias_line[i];
        double out_value;
        forward_pointwise_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const double*>(a[0]);
  auto* const weight = reinterpret_cast<const double*>(a[1]);
  auto* const bias = reinterpret_cast<const double*>(a[2]);
  auto* const out = reinterpret_cast<double*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]} };
  const int threads = static_cast<int>(a[7]);
  const Index mean_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  auto* const mean_partials = scratch.take<Moments<double>>(static_cast<int64_t>(sizes.outer.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<double>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<double>(static_cast<int64_t>(sizes.outer.value));
  if (is_measuring) return scratch.used;
  forward_inner(x, mean_partials, sizes, threads);
  forward_finalise(mean_scratch, variance_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_pointwise(x, mean_scratch, variance_scratch, weight, bias, out, sizes, threads);
  return 0;
}
