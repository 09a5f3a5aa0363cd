// fusegen 0.1.0   chain 1fe48fbfef5b   signature forward+backward: d_mean_operand float32, d_out float32, d_std_operand float32, mean_operand float32, out float32, std_operand float32, x uint8; 64-bit offsets
//   to('bfloat16') | div(255) | sub_channel(mean) | div_channel(std)
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

// A value as it would come back from memory.
template <typename Stored, typename Value>
inline Value rounded_to(Value x) {
  return static_cast<Value>(widen(narrow<Stored>(x)));
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
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x,
    const float mean_operand, const float std_operand, float& out) {
  // to('bfloat16')
  const float after_to = rounded_to<bfloat16>(x);
  // div(255)
  const float after_div = after_to / 255.0f;
  // sub_channel(mean)
  const float after_sub_channel = after_div - mean_operand;
  // div_channel(std)
  out = after_sub_channel / std_operand;
}

static void forward_pointwise(const uint8_t* __restrict__ x, const float* __restrict__ mean_operand,
    const float* __restrict__ std_operand, float* __restrict__ out, const ForwardSizes sizes, int threads) {
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
      const float mean_operand_value = widen(mean_operand[middle]);
      const float std_operand_value = widen(std_operand[middle]);
      float out_room[kLine];
      float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        float out_value;
        forward_pointwise_values(x_value, mean_operand_value, std_operand_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_inner_values(const float x,
    const float mean_operand, const float d_out, float& total_2_term) {
  // to('bfloat16')
  const float after_to = rounded_to<bfloat16>(x);
  // div(255)
  const float after_div = after_to / 255.0f;
  // sub_channel(mean)
  const float after_sub_channel = after_div - mean_operand;
  total_2_term = after_sub_channel * d_out;
}

static void backward_inner(const float* __restrict__ d_out, const uint8_t* __restrict__ x,
    const float* __restrict__ mean_operand, Sum* __restrict__ total_partials,
    Sum* __restrict__ total_2_partials, const BackwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Sum total_sum;
    Sum total_2_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
      const float mean_operand_value = widen(mean_operand[middle]);
      float total_2_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float d_out_value = d_out_line[i];
        float total_2_term_value;
        backward_inner_values(x_value, mean_operand_value, d_out_value, total_2_term_value);
        total_2_term_line[i] = total_2_term_value;
      }
      total_sum.add(d_out_line, width);
      total_2_sum.add(total_2_term_line, width);
    }
    total_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_sum;
    total_2_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_2_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    const float std_operand, const float total_2, float& d_mean_operand, float& d_std_operand) {
  d_mean_operand = -(total / std_operand);
  d_std_operand = -(total_2 / std_operand / std_operand);
}

static void backward_finalise(const float* __restrict__ std_operand, float* __restrict__ d_mean_operand,
    float* __restrict__ d_std_operand, const Sum* __restrict__ total_partials,
    const Sum* __restrict__ total_2_partials, const BackwardSizes sizes, Index slots, int threads) {
  expect(d_mean_operand, sizes.middle.value);
  expect(d_std_operand, sizes.middle.value);
  const Index columns = 1, results = sizes.middle.value;
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
    const Index middle = first;
    float std_operand_room[kLine];
    const float* const std_operand_line = load<1>(std_operand + middle, width, std_operand_room);
    float d_mean_operand_room[kLine];
    float* const d_mean_operand_line = target<1>(d_mean_operand + middle, width, d_mean_operand_room);
    float d_std_operand_room[kLine];
    float* const d_std_operand_line = target<1>(d_std_operand + middle, width, d_std_operand_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float std_operand_value = std_operand_line[i];
      const float total_2_value = total_2_line[i];
      float d_mean_operand_value;
      float d_std_operand_value;
      backward_finalise_values(total_value, std_operand_value, total_2_value, d_mean_operand_value,
          d_std_operand_value);
      d_mean_operand_line[i] = d_mean_operand_value;
      d_std_operand_line[i] = d_std_operand_value;
    }
    store<1>(d_mean_operand_line, width, d_mean_operand + middle);
    store<1>(d_std_operand_line, width, d_std_operand + middle);
  }
}

}  // namespace

// a: x, mean_operand, std_operand, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const mean_operand = reinterpret_cast<const float*>(a[1]);
  auto* const std_operand = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_pointwise(x, mean_operand, std_operand, out, sizes, threads);
  return 0;
}

// a: x, mean_operand, std_operand, d_out, d_mean_operand, d_std_operand, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const mean_operand = reinterpret_cast<const float*>(a[1]);
  auto* const std_operand = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_mean_operand = reinterpret_cast<float*>(a[4]);
  auto* const d_std_operand = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  const Index total_2_partials_slots = sizes.outer.value * pieces_of(sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  backward_inner(d_out, x, mean_operand, total_partials, total_2_partials, sizes, threads);
  backward_finalise(std_operand, d_mean_operand, d_std_operand, total_partials, total_2_partials, sizes,
      total_partials_slots, threads);
  return 0;
}
