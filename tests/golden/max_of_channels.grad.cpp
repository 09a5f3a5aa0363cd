// fusegen 0.1.0   chain 61cf382a6af0   signature forward+backward: d_out float32, d_x float32, out float32, saved_argmax float32, saved_max float32, x float32; 64-bit offsets
//   max(1) | tanh
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
__attribute__((simd("notinbranch"))) float tanhf(float) noexcept;
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

// The largest number at each of so many places.
template <typename Value, Index places>
struct PeakLanes {
  Value best[places];
  explicit PeakLanes(Index width) { std::fill(best, best + padded(width),
      -std::numeric_limits<Value>::infinity()); }
  void add(const Value* line, Index width, Index at = 0) {
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) best[at + i] = larger(best[at + i], line[i]);
  }
  Value max(Index i) const { return best[i]; }
  Peak<Value> at(Index i) const { return {best[i]}; }
};

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_column_stage_2(const float x, const float peak_2,
    const float position_along, float& peak_3_term) {
  peak_3_term = (x >= peak_2 || x != x) ? -position_along : -INFINITY;
}

static inline __attribute__((always_inline)) void forward_column_row_values(const float peak,
    const float peak_3, float& out, float& saved_max, float& saved_argmax) {
  // tanh
  out = tanhf(peak);
  saved_max = peak;
  saved_argmax = -peak_3;
}

static void forward_column(const float* __restrict__ x, float* __restrict__ out,
    float* __restrict__ saved_max, float* __restrict__ saved_argmax, const ForwardSizes sizes, int threads) {
  const Positions position_along{};
  expect(out, sizes.outer.value * sizes.inner.value);
  expect(saved_max, sizes.outer.value * sizes.inner.value);
  expect(saved_argmax, sizes.outer.value * sizes.inner.value);
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
      PeakLanes<float, kLine> peak_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index inner = first;
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        peak_lanes.add(x_line, width);
      }
      float peak_line[kLine];
      for (Index i = 0; i < padded(width); ++i) peak_line[i] = static_cast<float>(peak_lanes.max(i));
      float peak_2_line[kLine];
      for (Index i = 0; i < padded(width); ++i) peak_2_line[i] = static_cast<float>(peak_lanes.max(i));
      PeakLanes<float, kLine> peak_3_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index inner = first;
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        const float position_along_value = widen(position_along[middle]);
        float peak_3_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          const float peak_2_value = peak_2_line[i];
          float peak_3_term_value;
          forward_column_stage_2(x_value, peak_2_value, position_along_value, peak_3_term_value);
          peak_3_term_line[i] = peak_3_term_value;
        }
        peak_3_lanes.add(peak_3_term_line, width);
      }
      float peak_3_line[kLine];
      for (Index i = 0; i < padded(width); ++i) peak_3_line[i] = static_cast<float>(peak_3_lanes.max(i));
      {
        const Index inner = first;
        float out_room[kLine];
        float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
        float saved_max_room[kLine];
        float* const saved_max_line = target<1>(saved_max + (outer) * sizes.inner.value + inner, width,
            saved_max_room);
        float saved_argmax_room[kLine];
        float* const saved_argmax_line = target<1>(saved_argmax + (outer) * sizes.inner.value + inner, width,
            saved_argmax_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float peak_value = peak_line[i];
          const float peak_3_value = peak_3_line[i];
          float out_value;
          float saved_max_value;
          float saved_argmax_value;
          forward_column_row_values(peak_value, peak_3_value, out_value, saved_max_value, saved_argmax_value);
          out_line[i] = out_value;
          saved_max_line[i] = saved_max_value;
          saved_argmax_line[i] = saved_argmax_value;
        }
        store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
        store<1>(saved_max_line, width, saved_max + (outer) * sizes.inner.value + inner);
        store<1>(saved_argmax_line, width, saved_argmax + (outer) * sizes.inner.value + inner);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_pointwise_values(const float d_out,
    const float saved_max, float& common_scratch) {
  // tanh
  const float after_tanh = tanhf(saved_max);
  // backward, down to max(1)
  common_scratch = d_out * (1.0f - after_tanh * after_tanh);
}

static void backward_pointwise(const float* __restrict__ d_out, const float* __restrict__ saved_max,
    float* __restrict__ common_scratch, const BackwardSizes sizes, int threads) {
  expect(common_scratch, sizes.outer.value * sizes.inner.value);
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
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float saved_max_room[kLine];
      const float* const saved_max_line = load<1>(saved_max + (outer) * sizes.inner.value + inner, width,
          saved_max_room);
      float common_scratch_room[kLine];
      float* const common_scratch_line = target<1>(common_scratch + (outer) * sizes.inner.value + inner,
          width, common_scratch_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float saved_max_value = saved_max_line[i];
        float common_scratch_value;
        backward_pointwise_values(d_out_value, saved_max_value, common_scratch_value);
        common_scratch_line[i] = common_scratch_value;
      }
      store<1>(common_scratch_line, width, common_scratch + (outer) * sizes.inner.value + inner);
    }
  }
}

static inline __attribute__((always_inline)) void backward_pointwise_2_values(const float position_along,
    const float saved_argmax, const float common, float& d_x) {
  d_x = position_along == saved_argmax ? common : 0.0f;
}

static void backward_pointwise_2(const float* __restrict__ saved_argmax, const float* __restrict__ common,
    float* __restrict__ d_x, const BackwardSizes sizes, int threads) {
  const Positions position_along{};
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
      const float position_along_value = widen(position_along[middle]);
      float saved_argmax_room[kLine];
      const float* const saved_argmax_line = load<1>(saved_argmax + (outer) * sizes.inner.value + inner,
          width, saved_argmax_room);
      float common_room[kLine];
      const float* const common_line = load<1>(common + (outer) * sizes.inner.value + inner, width,
          common_room);
      float d_x_room[kLine];
      float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float saved_argmax_value = saved_argmax_line[i];
        const float common_value = common_line[i];
        float d_x_value;
        backward_pointwise_2_values(position_along_value, saved_argmax_value, common_value, d_x_value);
        d_x_line[i] = d_x_value;
      }
      store<1>(d_x_line, width, d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, out, saved_max, saved_argmax, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const saved_max = reinterpret_cast<float*>(a[2]);
  auto* const saved_argmax = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_column(x, out, saved_max, saved_argmax, sizes, threads);
  return 0;
}

// a: saved_max, saved_argmax, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const saved_max = reinterpret_cast<const float*>(a[0]);
  auto* const saved_argmax = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const BackwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  backward_pointwise(d_out, saved_max, common_scratch, sizes, threads);
  backward_pointwise_2(saved_argmax, common_scratch, d_x, sizes, threads);
  return 0;
}
