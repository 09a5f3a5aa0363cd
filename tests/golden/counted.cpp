// fusegen 0.1.0   chain 9b6fc859761a   signature forward: out int64, x float32; 64-bit offsets
//   gt(0) | sum(-1)
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

struct Sum {
  double total = 0;
  void merge(const Sum& other) { total += other.total; }
  template <typename Value>
  void add(const Value* line, Index width) {
    total += sum_of(line, width);
  }
  double sum() const { return total; }
};

struct ForwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_inner_values(const float x, float& total_term) {
  // gt(0)
  const bool after_gt = x > 0.0f;
  total_term = after_gt ? 1.0f : 0.0f;
}

static void forward_inner(const float* __restrict__ x, Sum* __restrict__ total_partials,
    const ForwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index outer = row;
    Sum total_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
      float total_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        float total_term_value;
        forward_inner_values(x_value, total_term_value);
        total_term_line[i] = total_term_value;
      }
      total_sum.add(total_term_line, width);
    }
    total_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float total, int64_t& out) {
  // sum(-1)
  out = static_cast<int64_t>(total);
}

static void forward_finalise(int64_t* __restrict__ out, const Sum* __restrict__ total_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  expect(out, sizes.outer.value);
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index outer = first;
    int64_t out_room[kLine];
    int64_t* const out_line = target<1>(out + outer, width, out_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      int64_t out_value;
      forward_finalise_values(total_value, out_value);
      out_line[i] = out_value;
    }
    store<1>(out_line, width, out + outer);
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<int64_t*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]} };
  const int threads = static_cast<int>(a[5]);
  const Index total_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  forward_inner(x, total_partials, sizes, threads);
  forward_finalise(out, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
