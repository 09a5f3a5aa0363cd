// fusegen 0.1.0   chain 4a8576720123   signature forward: bias float32, out float32, x float32 with gaps; 64-bit offsets
//   add_channel(bias) | gelu | mean((2, 3))
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

// erf within 1.9 ulp: 1 - exp(-y) on the right of 0, where y is |x| times a polynomial of it.
inline float erf_of(float x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  float t = fabsf(x);
  t = t > 4.0f ? 4.0f : t;
  const float tt = t * t;
  float y = fmaf(-9.256217e-6f, tt, fmaf(1.1764081e-4f, t, -6.328351e-4f));
  y = fmaf(y, tt, fmaf(0.001667024f, t, -1.6039226e-4f));
  y = fmaf(y, tt, fmaf(-0.019153066f, t, 0.10277783f));
  y = fmaf(y, tt, fmaf(0.6366194f, t, 0.12837917f));
  y = fmaf(y, t, t);
  const float shifted = fmaf(y, -1.442695f, 0x1.8p23f);  // its last bits are n, as in exp
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, 1.9046542e-9f, fmaf(n, -0.6931472f, -y)), rr = r * r;
  float e = fmaf(0.0013814596f, rr, fmaf(0.0083687175f, r, 0.04166839f));
  e = fmaf(e, rr, fmaf(0.16666521f, r, 0.49999994f));
  e = fmaf(e, rr, r);  // exp(r) - 1, so that small results keep their digits
  const float power = bits_of<float>((bits_of<uint32_t>(shifted) << 23) + 0x3f800000);
  return copysignf(fmaf(-power, e, 1.0f - power), x);
#else
  return erff(x);
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

// Elements that lie one after the other, a run, with a gap behind it.
struct Pitch {
  Size run;
  Index gap;
};

// A tensor of such runs in the guise of a pointer to one without gaps. No pack that begins at a multiple of its size crosses
// the end of a run.
template <typename T>
struct Pitched {
  T* from;
  Pitch pitch;
  Index at = 0;
  template <typename Offset>
  inline Pitched operator+(Offset offset) const {
    return {from, pitch, at + static_cast<Index>(offset)};
  }
  inline T* here() const { return from + (at + divide(at, pitch.run) * pitch.gap); }
  template <typename Offset>
  inline T& operator[](Offset offset) const {
    return *(*this + offset).here();
  }
};

// How many elements there are to the end of a run.
template <typename T>
inline Index left_of(Pitched<T> tensor) {
  return tensor.pitch.run.value - tensor.at % tensor.pitch.run.value;
}

template <Index stride, typename T, typename Value>
inline const Value* load(Pitched<T> from, Index width, Value* room) {
  if ((width - 1) * stride < left_of(from)) return load<stride>(from.here(), width, room);
  for (Index i = 0; i < width;) {
    const Pitched<T> piece = from + i * stride;
    const Index count = std::min(width - i, (left_of(piece) + stride - 1) / stride);
    const T* const here = piece.here();
#pragma omp simd
    for (Index j = 0; j < count; ++j) room[i + j] = static_cast<Value>(widen(here[j * stride]));
    i += count;
  }
  pad(room, width);
  return room;
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
  Pitch x_pitch;
};

static inline __attribute__((always_inline)) void forward_inner_values(const float x, const float bias,
    float& total_term) {
  // add_channel(bias)
  const float after_add_channel = x + bias;
  // gelu
  total_term = after_add_channel * 0.5f * (1.0f + erf_of(after_add_channel * 0.707106769f));
}

static void forward_inner(const float* __restrict__ x_memory, const float* __restrict__ bias,
    Sum* __restrict__ total_partials, const ForwardSizes sizes, int threads) {
  const Pitched<const float> x{x_memory, sizes.x_pitch};
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
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
      const float bias_value = widen(bias[middle]);
      float total_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_line[i];
        float total_term_value;
        forward_inner_values(x_value, bias_value, total_term_value);
        total_term_line[i] = total_term_value;
      }
      total_sum.add(total_term_line, width);
    }
    total_partials[((outer) * sizes.middle.value + middle) * (1 * pieces) + (0) * pieces + piece] = total_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float total,
    const float count_of_inner, float& out) {
  // mean((2, 3))
  out = total / count_of_inner;
}

static void forward_finalise(float* __restrict__ out, const Sum* __restrict__ total_partials,
    const ForwardSizes sizes, Index slots, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(out, sizes.outer.value * sizes.middle.value);
  const Index columns = 1, results = sizes.outer.value * sizes.middle.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index above_middle = divide(first, sizes.middle);
    const Index middle = first - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    float out_room[kLine];
    float* const out_line = target<1>(out + (outer) * sizes.middle.value + middle, width, out_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float out_value;
      forward_finalise_values(total_value, count_of_inner_value, out_value);
      out_line[i] = out_value;
    }
    store<1>(out_line, width, out + (outer) * sizes.middle.value + middle);
  }
}

}  // namespace

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, run and gap of x, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, { {a[7]}, a[8]} };
  const int threads = static_cast<int>(a[9]);
  const Index total_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  forward_inner(x, bias, total_partials, sizes, threads);
  forward_finalise(out, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
