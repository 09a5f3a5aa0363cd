// fusegen 0.1.0   chain 1fe48fbfef5b   signature forward: mean_operand float32, out float32, std_operand float32, x uint8; 64-bit offsets
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
