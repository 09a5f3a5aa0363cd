// fusegen 0.1.0   chain d26a99bf70f0   signature forward: bias bfloat16, out bfloat16, x bfloat16; 64-bit offsets
//   add_channel(bias, axis=-1) | gelu
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

// Coefficients from the lowest power on.
inline float polynomial(float, float coefficient) { return coefficient; }
template <typename... More>
inline float polynomial(float x, float coefficient, More... more) {
  return x * polynomial(x, more...) + coefficient;
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
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float bias,
    float& out) {
  // add_channel(bias, axis=-1)
  const float after_add_channel = x + bias;
  // gelu
  const float series = polynomial(fabsf(after_add_channel), -1.00008726f, -1.14964569f, -0.463089466f,
      -0.0490143038f, 0.00606240798f, -0.000345090288f);
  const float power = exp2f(series);
  out = after_add_channel * (after_add_channel < 0.0f ? power : 1.0f - power);
}

static void forward_pointwise(const bfloat16* __restrict__ x, const bfloat16* __restrict__ bias,
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
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        const float bias_value = bias_line[i];
        float out_value;
        forward_pointwise_values(x_value, bias_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  if (is_measuring) return scratch.used;
  forward_pointwise(x, bias, out, sizes, threads);
  return 0;
}
