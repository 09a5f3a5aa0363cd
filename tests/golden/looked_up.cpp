// fusegen 0.1.0   chain 91f228b727bf   signature forward: out bfloat16, x bfloat16; 64-bit offsets
//   keep(y) | argmax(-1, keepdim=True) | keep(y_2) | recall(y) | log_softmax(-1) | gather(-1, y_2)
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
    const float position_along, float& total_term, float& peak_2_term) {
  total_term = exp_of(x - peak);
  peak_2_term = (x >= peak || x != x) ? -position_along : -INFINITY;
}

static inline __attribute__((always_inline)) void forward_row_stage_3(const float position_along,
    const float peak_2, const float x, const float peak, const float total, float& total_2_term) {
  // argmax(-1, keepdim=True)
  const float after_argmax = -peak_2;
  // log_softmax(-1)
  const float after_log_softmax = x - peak - logf(total);
  total_2_term = position_along == after_argmax ? after_log_softmax : 0.0f;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float peak_2,
    const float count_of_inner, const float total_2, float& out) {
  // argmax(-1, keepdim=True)
  const float after_argmax = -peak_2;
  // gather(-1, y_2)
  out = after_argmax >= 0.0f && after_argmax < count_of_inner ? total_2 : NAN;
}

static void forward_row(const bfloat16* __restrict__ x, bfloat16* __restrict__ out, const ForwardSizes sizes,
    int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions position_along{};
  expect(out, sizes.outer.value);
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
      float total_of_rows[kTogether];
      float peak_2_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const float peak_value = peak_of_rows[row - top];
        Sum total_sum;
        Peak<float> peak_2_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          float position_along_room[kLine];
          const float* const position_along_line = load<1>(position_along + inner, width,
              position_along_room);
          float total_term_line[kLine];
          float peak_2_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float position_along_value = position_along_line[i];
            float total_term_value;
            float peak_2_term_value;
            forward_row_stage_2(x_value, peak_value, position_along_value, total_term_value,
                peak_2_term_value);
            total_term_line[i] = total_term_value;
            peak_2_term_line[i] = peak_2_term_value;
          }
          total_sum.add(total_term_line, width);
          peak_2_sum.add(peak_2_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
        peak_2_of_rows[row - top] = static_cast<float>(peak_2_sum.max());
      }
      float total_2_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const float peak_value = peak_of_rows[row - top];
        const float total_value = total_of_rows[row - top];
        const float peak_2_value = peak_2_of_rows[row - top];
        Sum total_2_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          float position_along_room[kLine];
          const float* const position_along_line = load<1>(position_along + inner, width,
              position_along_room);
          float total_2_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float position_along_value = position_along_line[i];
            const float x_value = x_line[i];
            float total_2_term_value;
            forward_row_stage_3(position_along_value, peak_2_value, x_value, peak_value, total_value,
                total_2_term_value);
            total_2_term_line[i] = total_2_term_value;
          }
          total_2_sum.add(total_2_term_line, width);
        }
        total_2_of_rows[row - top] = static_cast<float>(total_2_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        {
          const Index outer = row;
          const float peak_2_value = peak_2_of_rows[row - top];
          const float total_2_value = total_2_of_rows[row - top];
          float out_value;
          forward_row_row_values(peak_2_value, count_of_inner_value, total_2_value, out_value);
          out[outer] = narrow<bfloat16>(out_value);
        }
      }
    }
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const out = reinterpret_cast<bfloat16*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]} };
  const int threads = static_cast<int>(a[5]);
  if (is_measuring) return scratch.used;
  forward_row(x, out, sizes, threads);
  return 0;
}
