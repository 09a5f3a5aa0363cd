// fusegen 0.1.0   chain 18234fecbf7d   signature forward: out bfloat16, x bfloat16; 64-bit offsets
//   unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(y_2) | recall(y) | select(-2, 1) | mul(y_2)
#include <algorithm>
#include <cmath>
#include <cstdint>
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

// A sum for each of so many places.
template <Index places>
struct SumLanes {
  double total[places];
  explicit SumLanes(Index width) { std::fill(total, total + padded(width), 0.0); }
  template <typename Value>
  void add(const Value* line, Index width, Index at = 0) {
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) total[at + i] += line[i];
  }
  double sum(Index i) const { return total[i]; }
  Sum at(Index i) const { return {total[i]}; }
};

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_outer_values(const float position_along,
    const float x, float& total_term, float& total_2_term) {
  total_term = position_along == 1.0f ? x : 0.0f;
  total_2_term = position_along == 0.0f ? x : 0.0f;
}

static void forward_outer(const bfloat16* __restrict__ x, Sum* __restrict__ total_partials,
    Sum* __restrict__ total_2_partials, const ForwardSizes sizes, int threads) {
  const Positions position_along{};
  const Index kept = sizes.outer.value, rows = sizes.middle.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index outer = kept_index;
    SumLanes<kBeside> total_lanes(end - begin);
    SumLanes<kBeside> total_2_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index middle = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        const float position_along_value = widen(position_along[middle]);
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        float total_term_line[kLine];
        float total_2_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          float total_term_value;
          float total_2_term_value;
          forward_outer_values(position_along_value, x_value, total_term_value, total_2_term_value);
          total_term_line[i] = total_term_value;
          total_2_term_line[i] = total_2_term_value;
        }
        total_lanes.add(total_term_line, width, first - begin);
        total_2_lanes.add(total_2_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_partials[block * columns + begin + i] = total_lanes.at(i);
    for (Index i = 0; i < end - begin; ++i) total_2_partials[block * columns + begin + i] = total_2_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float total,
    const float total_2, float& out) {
  // silu
  const float after_silu = total_2 * (1.0f / (1.0f + exp_of(-total_2)));
  // mul(y_2)
  out = total * after_silu;
}

static void forward_finalise(bfloat16* __restrict__ out, const Sum* __restrict__ total_partials,
    const Sum* __restrict__ total_2_partials, const ForwardSizes sizes, Index slots, int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.outer.value * sizes.inner.value;
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
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    float out_room[kLine];
    float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float total_2_value = total_2_line[i];
      float out_value;
      forward_finalise_values(total_value, total_2_value, out_value);
      out_line[i] = out_value;
    }
    store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const out = reinterpret_cast<bfloat16*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  const Index total_partials_slots = slots_of(sizes.middle.value, sizes.inner.value,
      sizes.outer.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_2_partials_slots = slots_of(sizes.middle.value, sizes.inner.value,
      sizes.outer.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  forward_outer(x, total_partials, total_2_partials, sizes, threads);
  forward_finalise(out, total_partials, total_2_partials, sizes, total_partials_slots, threads);
  return 0;
}
