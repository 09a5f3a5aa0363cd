// fusegen 0.1.0   chain ed67c91b5cb2   signature forward+backward: d_out bfloat16, d_x bfloat16, labels int64, out bfloat16, saved_bound float32, saved_sum float32, saved_sum__ float32, x bfloat16; 64-bit offsets
//   cross_entropy(labels)
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
__attribute__((simd("notinbranch"))) float logf(float) noexcept;
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

// Positions along axes, as if they lay in memory.
struct Positions {
  Index first = 0;
  Positions operator+(Index by) const { return {first + by}; }
  Index operator[](Index i) const { return first + i; }
};

template <Index stride, typename Value>
inline const Value* load(Positions from, Index width, Value* room) {
#pragma omp simd
  for (Index i = 0; i < width; ++i) room[i] = static_cast<Value>(from[i * stride]);
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
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_row_stage_2(const float x, const float peak,
    const int position_along, const int labels, float& total_2_term, float& total_term) {
  const float power = exp2f((x - peak) * 0.721347511f);
  total_2_term = power * power;
  total_term = position_along == labels ? x : 0.0f;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float peak,
    const float total_2, const int labels, const float count_of_inner, const float total, float& saved_bound,
    float& saved_sum, float& common_scratch, float& common_2_scratch) {
  saved_bound = peak;
  saved_sum = total_2;
  const bool is_equal = labels == -100.0f;
  const float chosen = labels >= 0.0f && labels < count_of_inner ? logf(total_2) - (total - peak) : NAN;
  common_scratch = is_equal ? 0.0f : chosen;
  common_2_scratch = is_equal ? 0.0f : 1.0f;
}

static void forward_row(const bfloat16* __restrict__ x, const int64_t* __restrict__ labels,
    float* __restrict__ saved_bound, float* __restrict__ saved_sum, float* __restrict__ common_scratch,
    float* __restrict__ common_2_scratch, const ForwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions position_along{};
  expect(saved_bound, sizes.outer.value);
  expect(saved_sum, sizes.outer.value);
  expect(common_scratch, sizes.outer.value);
  expect(common_2_scratch, sizes.outer.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float peak_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        Peak<float> peak_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          peak_sum.add(x_line, width);
        }
        peak_of_rows[row - top] = static_cast<float>(peak_sum.max());
      }
      float total_2_of_rows[kTogether];
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const float peak_value = peak_of_rows[row - top];
        Sum total_2_sum;
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          int position_along_room[kLine];
          const int* const position_along_line = load<1>(position_along + inner, width, position_along_room);
          const int labels_value = widen(labels[outer]);
          float total_2_term_line[kLine];
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const int position_along_value = position_along_line[i];
            float total_2_term_value;
            float total_term_value;
            forward_row_stage_2(x_value, peak_value, position_along_value, labels_value, total_2_term_value,
                total_term_value);
            total_2_term_line[i] = total_2_term_value;
            total_term_line[i] = total_term_value;
          }
          total_2_sum.add(total_2_term_line, width);
          total_sum.add(total_term_line, width);
        }
        total_2_of_rows[row - top] = static_cast<float>(total_2_sum.sum());
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        {
          const Index outer = row;
          const float peak_value = peak_of_rows[row - top];
          const float total_2_value = total_2_of_rows[row - top];
          const float total_value = total_of_rows[row - top];
          const int labels_value = widen(labels[outer]);
          float saved_bound_value;
          float saved_sum_value;
          float common_scratch_value;
          float common_2_scratch_value;
          forward_row_row_values(peak_value, total_2_value, labels_value, count_of_inner_value, total_value,
              saved_bound_value, saved_sum_value, common_scratch_value, common_2_scratch_value);
          saved_bound[outer] = narrow<float>(saved_bound_value);
          saved_sum[outer] = narrow<float>(saved_sum_value);
          common_scratch[outer] = narrow<float>(common_scratch_value);
          common_2_scratch[outer] = narrow<float>(common_2_scratch_value);
        }
      }
    }
  }
}

static void forward_inner(const float* __restrict__ common, const float* __restrict__ common_2,
    Sum* __restrict__ total_3_partials, Sum* __restrict__ total_4_partials, const ForwardSizes sizes,
    int threads) {
  const Index rows = 1, length = sizes.outer.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    Sum total_3_sum;
    Sum total_4_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index outer = first;
      float common_room[kLine];
      const float* const common_line = load<1>(common + outer, width, common_room);
      float common_2_room[kLine];
      const float* const common_2_line = load<1>(common_2 + outer, width, common_2_room);
      total_3_sum.add(common_line, width);
      total_4_sum.add(common_2_line, width);
    }
    total_3_partials[(0) * (1 * pieces) + (0) * pieces + piece] = total_3_sum;
    total_4_partials[(0) * (1 * pieces) + (0) * pieces + piece] = total_4_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float total_3,
    const float total_4, float& out, float& saved_sum__) {
  // cross_entropy(labels)
  out = total_3 / total_4;
  saved_sum__ = total_4;
}

static void forward_finalise(bfloat16* __restrict__ out, float* __restrict__ saved_sum__,
    const Sum* __restrict__ total_3_partials, const Sum* __restrict__ total_4_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  expect(out, 1);
  expect(saved_sum__, 1);
  const Index columns = 1, results = 1;
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
    float out_room[kLine];
    float* const out_line = target<1>(out + 0, width, out_room);
    float saved_sum___room[kLine];
    float* const saved_sum___line = target<1>(saved_sum__ + 0, width, saved_sum___room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      const float total_4_value = total_4_line[i];
      float out_value;
      float saved_sum___value;
      forward_finalise_values(total_3_value, total_4_value, out_value, saved_sum___value);
      out_line[i] = out_value;
      saved_sum___line[i] = saved_sum___value;
    }
    store<1>(out_line, width, out + 0);
    store<1>(saved_sum___line, width, saved_sum__ + 0);
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_pointwise_values(const int position_along,
    const int labels, const float count_of_inner, const float d_out, const float saved_sum__,
    const float saved_sum, const float x, const float saved_bound, float& d_x) {
  const bool both_hold = labels >= 0.0f && labels < count_of_inner && !(labels == -100.0f);
  const float chosen = both_hold ? d_out / saved_sum__ : 0.0f;
  const float power = exp2f((x - saved_bound) * 0.721347511f);
  d_x = (position_along == labels ? -chosen : 0.0f) + chosen / saved_sum * (power * power);
}

static void backward_pointwise(const int64_t* __restrict__ labels, const bfloat16* __restrict__ d_out,
    const float* __restrict__ saved_sum__, const float* __restrict__ saved_sum,
    const bfloat16* __restrict__ x, const float* __restrict__ saved_bound, bfloat16* __restrict__ d_x,
    const BackwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions position_along{};
  expect(d_x, sizes.outer.value * sizes.inner.value);
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
      int position_along_room[kLine];
      const int* const position_along_line = load<1>(position_along + inner, width, position_along_room);
      const int labels_value = widen(labels[outer]);
      const float d_out_value = widen(d_out[0]);
      const float saved_sum___value = widen(saved_sum__[0]);
      const float saved_sum_value = widen(saved_sum[outer]);
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      const float saved_bound_value = widen(saved_bound[outer]);
      float d_x_room[kLine];
      float* const d_x_line = target<1>(d_x + (outer) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const int position_along_value = position_along_line[i];
        const float x_value = x_line[i];
        float d_x_value;
        backward_pointwise_values(position_along_value, labels_value, count_of_inner_value, d_out_value,
            saved_sum___value, saved_sum_value, x_value, saved_bound_value, d_x_value);
        d_x_line[i] = d_x_value;
      }
      store<1>(d_x_line, width, d_x + (outer) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, labels, out, saved_bound, saved_sum, saved_sum__, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const labels = reinterpret_cast<const int64_t*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  auto* const saved_sum__ = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  const Index total_3_partials_slots = 1 * pieces_of(sizes.outer.value)
;
  const Index total_4_partials_slots = 1 * pieces_of(sizes.outer.value)
;
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const common_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_3_partials = scratch.take<Sum>(1 * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum>(1 * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  forward_row(x, labels, saved_bound, saved_sum, common_scratch, common_2_scratch, sizes, threads);
  forward_inner(common_scratch, common_2_scratch, total_3_partials, total_4_partials, sizes, threads);
  forward_finalise(out, saved_sum__, total_3_partials, total_4_partials, sizes, total_3_partials_slots,
      threads);
  return 0;
}

// a: x, labels, saved_bound, saved_sum, saved_sum__, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const labels = reinterpret_cast<const int64_t*>(a[1]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[3]);
  auto* const saved_sum__ = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  if (is_measuring) return scratch.used;
  backward_pointwise(labels, d_out, saved_sum__, saved_sum, x, saved_bound, d_x, sizes, threads);
  return 0;
}
