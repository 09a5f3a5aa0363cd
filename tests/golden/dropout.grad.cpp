// fusegen 0.1.0   chain 8c68499c9411   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, noise noise, out float32, x float32; 64-bit offsets
//   gelu | dropout(0.1, noise) | add_channel(bias)
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
template <Index places, typename Total = double>
struct SumLanes {
  Total total[places];
  explicit SumLanes(Index width) { std::fill(total, total + padded(width), Total()); }
  template <typename Value>
  void add(const Value* line, Index width, Index at = 0) {
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) total[at + i] += line[i];
  }
  Total sum(Index i) const { return total[i]; }
  Sum at(Index i) const { return {total[i]}; }
};

// Two neighbours have their bits of one hash: the seed is stepped on by the pair's place, and mixed, as splitmix64 has it.
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

inline uint64_t stepped_on(int64_t seed,
    uint64_t pair) { return static_cast<uint64_t>(seed) + (pair + 1) * kStep; }

inline uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// Noise is 32 bits: a number in [0, 1), times 2^32.
inline uint32_t noise_at(int64_t seed, uint64_t place) {
  const uint64_t bits = mixed(stepped_on(seed, place / 2));
  return static_cast<uint32_t>(place % 2 == 0 ? bits : bits >> 32);
}

struct ForwardSizes {
  Size outer, middle, inner;
};

struct ForwardDrawnNoise {
  const int64_t* seed;
  ForwardSizes sizes;
  Index from = 0;
  inline Index place(Index offset) const {
    const Index above_inner = divide(offset, sizes.inner);
    const Index inner = offset - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    return ((outer) * sizes.inner.value + inner) * sizes.middle.value + middle;
  }
  template <typename Offset>
  inline ForwardDrawnNoise operator+(Offset offset) const {
    return {seed, sizes, from + static_cast<Index>(offset)};
  }
  template <typename Offset>
  inline uint32_t operator[](Offset offset) const { return noise_at(*seed,
      place(from + static_cast<Index>(offset))); }
};

template <Index stride, typename Value>
inline const Value* load(ForwardDrawnNoise from, Index width, Value* room) {
  for (Index i = 0; i < width; ++i) room[i] = from[i * stride];
  pad(room, width);
  return room;
}

template <Index size, typename Value, Index side>
inline void split(ForwardDrawnNoise from, Index count, Value (*rooms)[side], Index place) {
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) rooms[j][place + i] = from[i * size + j];
  }
}

static inline __attribute__((always_inline)) void forward_pointwise_values(const uint32_t noise,
    const float x, const float bias, float& out) {
  // gelu
  const float after_gelu = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  // dropout(0.1, noise)
  const float after_dropout = noise >= 429496832u ? after_gelu * 1.11111116f : 0.0f;
  // add_channel(bias)
  out = after_dropout + bias;
}

static void forward_pointwise(const ForwardDrawnNoise noise, const float* __restrict__ x,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes sizes, int threads) {
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
      uint32_t noise_room[kLine];
      const uint32_t* const noise_line = load<1>(noise + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, noise_room);
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
      float bias_room[kLine];
      const float* const bias_line = load<1>(bias + inner, width, bias_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const uint32_t noise_value = noise_line[i];
        const float x_value = x_line[i];
        const float bias_value = bias_line[i];
        float out_value;
        forward_pointwise_values(noise_value, x_value, bias_value, out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

struct BackwardDrawnNoise {
  const int64_t* seed;
  BackwardSizes sizes;
  Index from = 0;
  inline Index place(Index offset) const {
    const Index above_inner = divide(offset, sizes.inner);
    const Index inner = offset - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    return ((outer) * sizes.inner.value + inner) * sizes.middle.value + middle;
  }
  template <typename Offset>
  inline BackwardDrawnNoise operator+(Offset offset) const {
    return {seed, sizes, from + static_cast<Index>(offset)};
  }
  template <typename Offset>
  inline uint32_t operator[](Offset offset) const { return noise_at(*seed,
      place(from + static_cast<Index>(offset))); }
};

template <Index stride, typename Value>
inline const Value* load(BackwardDrawnNoise from, Index width, Value* room) {
  for (Index i = 0; i < width; ++i) room[i] = from[i * stride];
  pad(room, width);
  return room;
}

template <Index size, typename Value, Index side>
inline void split(BackwardDrawnNoise from, Index count, Value (*rooms)[side], Index place) {
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) rooms[j][place + i] = from[i * size + j];
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const uint32_t noise,
    const float d_out, const float x, float& d_x) {
  // backward, down to gelu
  const float d_after_gelu = (noise >= 429496832u ? d_out : 0.0f) * 1.11111116f;
  const float product = x * 0.707106769f;
  const float product_2 = d_after_gelu * (x * 0.5f) * (1.12837923f * exp_of(-(product * product)));
  d_x = product_2 * 0.707106769f + d_after_gelu * (1.0f + erf_of(product)) * 0.5f;
}

static void backward_outer(const float* __restrict__ d_out, const BackwardDrawnNoise noise,
    const float* __restrict__ x, float* __restrict__ d_x, Sum* __restrict__ total_partials,
    const BackwardSizes sizes, int threads) {
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  const Index kept = 1, rows = sizes.outer.value * sizes.middle.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    SumLanes<kBeside> total_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index above_middle = divide(row, sizes.middle);
      const Index middle = row - above_middle * sizes.middle.value;
      const Index outer = above_middle;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
        uint32_t noise_room[kLine];
        const uint32_t* const noise_line = load<1>(noise + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, noise_room);
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        float d_x_room[kLine];
        float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const uint32_t noise_value = noise_line[i];
          const float d_out_value = d_out_line[i];
          const float x_value = x_line[i];
          float d_x_value;
          backward_outer_values(noise_value, d_out_value, x_value, d_x_value);
          d_x_line[i] = d_x_value;
        }
        store<1>(d_x_line, width, d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
        total_lanes.add(d_out_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_partials[block * columns + begin + i] = total_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

static void backward_finalise(float* __restrict__ d_bias, const Sum* __restrict__ total_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_bias, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index inner = first;
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + inner, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float d_bias_value;
      backward_finalise_values(total_value, d_bias_value);
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_bias_line, width, d_bias + inner);
  }
}

}  // namespace

// a: x, noise, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const ForwardDrawnNoise noise{reinterpret_cast<const int64_t*>(a[1]), sizes};
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_pointwise(noise, x, bias, out, sizes, threads);
  return 0;
}

// a: x, noise, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_bias = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ {a[6]}, {a[7]}, {a[8]} };
  const BackwardDrawnNoise noise{reinterpret_cast<const int64_t*>(a[1]), sizes};
  const int threads = static_cast<int>(a[9]);
  const Index total_partials_slots = slots_of(sizes.outer.value * sizes.middle.value, sizes.inner.value,
      1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_outer(d_out, noise, x, d_x, total_partials, sizes, threads);
  backward_finalise(d_bias, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
