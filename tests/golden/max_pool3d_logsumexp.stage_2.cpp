// fusegen 0.1.0   chain 7b526fa76f77   signature forward: out float32, x float32; 64-bit offsets
//   logsumexp(1, keepdim=True) | relu
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

static inline __attribute__((always_inline)) void forward_column_stage_2_once(const float peak,
    float& chosen) {
  chosen = fabsf(peak) == INFINITY ? 0.0f : peak;
}

static inline __attribute__((always_inline)) void forward_column_stage_2(const float x, const float chosen,
    float& total_term) {
  total_term = exp_of(x - chosen);
}

static inline __attribute__((always_inline)) void forward_column_row_values(const float total,
    const float peak, float& out) {
  // logsumexp(1, keepdim=True)
  const float after_logsumexp = logf(total) + (fabsf(peak) == INFINITY ? 0.0f : peak);
  // relu
  out = after_logsumexp <= 0.0f ? 0.0f : after_logsumexp;
}

static void forward_column(const float* __restrict__ x, float* __restrict__ out, const ForwardSizes sizes,
    int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
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
      SumLanes<kLine> total_lanes(width);
      {  // what does not vary along a row is found once
        const Index inner = first;
        float chosen_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float peak_value = peak_line[i];
          float chosen_value;
          forward_column_stage_2_once(peak_value, chosen_value);
          chosen_line[i] = chosen_value;
        }
        for (Index r = 0; r < length; ++r) {
          const Index middle = r;
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float chosen_value = chosen_line[i];
            float total_term_value;
            forward_column_stage_2(x_value, chosen_value, total_term_value);
            total_term_line[i] = total_term_value;
          }
          total_lanes.add(total_term_line, width);
        }
      }
      float total_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_line[i] = static_cast<float>(total_lanes.sum(i));
      {
        const Index inner = first;
        float out_room[kLine];
        float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float total_value = total_line[i];
          const float peak_value = peak_line[i];
          float out_value;
          forward_column_row_values(total_value, peak_value, out_value);
          out_line[i] = out_value;
        }
        store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
      }
    }
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  if (is_measuring) return scratch.used;
  forward_column(x, out, sizes, threads);
  return 0;
}
