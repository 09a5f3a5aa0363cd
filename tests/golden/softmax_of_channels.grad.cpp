// fusegen 0.1.0   chain 9ce7cf08a2eb   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, out float32, saved_bound float32, saved_sum float32, x float32; 64-bit offsets
//   gelu | softmax(1) | add_channel(bias)
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

// The same where rows are worked on as a whole, for each index that sums keep: four for few rows, eight of eight rows
// or more each, and beyond one for 32 rows, for partials are written and read.
inline Index slots_of_rows(Index rows, Index kept) {
  const Index few = std::max<Index>(std::min<Index>(rows, 4), std::min<Index>(rows / 8, 8));
  return std::min<Index>(std::max<Index>(1, 64 / kept), std::max<Index>(rows / 32, few));
}

constexpr Index kUnmerged = 16;

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

// What a thread keeps of its rows; by malloc, as no module is linked with the C++ library.
template <typename Value>
struct Values {
  Value* const at;
  explicit Values(Index count) : at(static_cast<Value*>(std::malloc(static_cast<std::size_t>(count) * sizeof(Value)))) {
    if (at == nullptr) std::abort();
  }
  Values(const Values&) = delete;
  ~Values() { std::free(at); }
};

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

// A few rows are added up in the arithmetic's type, and then to the sums of all.
template <typename Value>
inline void add_to_columns(Value* block, const Value* line, Index width) {
#pragma omp simd
  for (Index i = 0; i < width; ++i) block[i] += line[i];
}

template <typename Value>
inline void merge_columns(Sum* sums, Value* block, Index length) {
#pragma omp simd
  for (Index i = 0; i < length; ++i) {
    sums[i].total += block[i];
    block[i] = Value();
  }
}

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

static inline __attribute__((always_inline)) void forward_column_stage_1(const float x, float& peak_term,
    float& carried_after_gelu) {
  // gelu
  peak_term = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  carried_after_gelu = peak_term;
}

static inline __attribute__((always_inline)) void forward_column_stage_2(const float carried_after_gelu,
    const float peak, float& total_term, float& carried) {
  total_term = exp_of(carried_after_gelu - peak);
  carried = total_term;
}

static inline __attribute__((always_inline)) void forward_column_values(const float carried,
    const float total, const float bias, float& out) {
  // softmax(1)
  const float after_softmax = carried / total;
  // add_channel(bias)
  out = after_softmax + bias;
}

static inline __attribute__((always_inline)) void forward_column_row_values(const float peak,
    const float total, float& saved_bound, float& saved_sum) {
  saved_bound = peak;
  saved_sum = total;
}

static void forward_column(const float* __restrict__ x, const float* __restrict__ bias,
    float* __restrict__ out, float* __restrict__ saved_bound, float* __restrict__ saved_sum,
    const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  expect(saved_bound, sizes.outer.value * sizes.inner.value);
  expect(saved_sum, sizes.outer.value * sizes.inner.value);
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
    const Values<float> carried_after_gelu_rows(length * side);
    const Values<float> carried_rows(length * side);
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index above_index = task / blocks, first = task % blocks * side;
      const Index width = std::min(side, beside - first);
      const Index outer = above_index;
      PeakLanes<float, kLine> peak_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index place = r * side;
        const Index inner = first;
        float* const carried_after_gelu_line = carried_after_gelu_rows.at + place;
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        float peak_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          float peak_term_value;
          float carried_after_gelu_value;
          forward_column_stage_1(x_value, peak_term_value, carried_after_gelu_value);
          peak_term_line[i] = peak_term_value;
          carried_after_gelu_line[i] = carried_after_gelu_value;
        }
        peak_lanes.add(peak_term_line, width);
      }
      float peak_line[kLine];
      for (Index i = 0; i < padded(width); ++i) peak_line[i] = static_cast<float>(peak_lanes.max(i));
      SumLanes<kLine> total_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index place = r * side;
        const Index inner = first;
        float* const carried_after_gelu_line = carried_after_gelu_rows.at + place;
        float* const carried_line = carried_rows.at + place;
        float total_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float carried_after_gelu_value = carried_after_gelu_line[i];
          const float peak_value = peak_line[i];
          float total_term_value;
          float carried_value;
          forward_column_stage_2(carried_after_gelu_value, peak_value, total_term_value, carried_value);
          total_term_line[i] = total_term_value;
          carried_line[i] = carried_value;
        }
        total_lanes.add(total_term_line, width);
      }
      float total_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_line[i] = static_cast<float>(total_lanes.sum(i));
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index place = r * side;
        const Index inner = first;
        float* const carried_line = carried_rows.at + place;
        const float bias_value = widen(bias[middle]);
        float out_room[kLine];
        float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float carried_value = carried_line[i];
          const float total_value = total_line[i];
          float out_value;
          forward_column_values(carried_value, total_value, bias_value, out_value);
          out_line[i] = out_value;
        }
        store<1>(out_line, width, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
      }
      {
        const Index inner = first;
        float saved_bound_room[kLine];
        float* const saved_bound_line = target<1>(saved_bound + (outer) * sizes.inner.value + inner, width,
            saved_bound_room);
        float saved_sum_room[kLine];
        float* const saved_sum_line = target<1>(saved_sum + (outer) * sizes.inner.value + inner, width,
            saved_sum_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float peak_value = peak_line[i];
          const float total_value = total_line[i];
          float saved_bound_value;
          float saved_sum_value;
          forward_column_row_values(peak_value, total_value, saved_bound_value, saved_sum_value);
          saved_bound_line[i] = saved_bound_value;
          saved_sum_line[i] = saved_sum_value;
        }
        store<1>(saved_bound_line, width, saved_bound + (outer) * sizes.inner.value + inner);
        store<1>(saved_sum_line, width, saved_sum + (outer) * sizes.inner.value + inner);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_column_stage_1(const float x,
    const float saved_bound, const float d_out, float& total_2_term, float& carried, float& carried_2) {
  // gelu
  const float after_gelu = x * 0.5f * (1.0f + erf_of(x * 0.707106769f));
  total_2_term = exp_of(after_gelu - saved_bound) * d_out;
  carried = 1.0f + erf_of(x * 0.707106769f);
  carried_2 = exp_of(after_gelu - saved_bound);
}

static inline __attribute__((always_inline)) void backward_column_values_once(const float total_2,
    const float saved_sum, float& quotient) {
  quotient = total_2 / saved_sum / saved_sum;
}

static inline __attribute__((always_inline)) void backward_column_values(const float d_out,
    const float saved_sum, const float quotient, const float carried_2, const float x, const float carried,
    float& d_x) {
  // backward, down to gelu
  const float d_after_gelu = (d_out / saved_sum - quotient) * carried_2;
  const float product = x * 0.707106769f;
  const float product_2 = d_after_gelu * (x * 0.5f) * (1.12837923f * exp_of(-(product * product)));
  d_x = product_2 * 0.707106769f + d_after_gelu * carried * 0.5f;
}

static void backward_column(const float* __restrict__ x, const float* __restrict__ saved_bound,
    const float* __restrict__ d_out, const float* __restrict__ saved_sum, float* __restrict__ d_x,
    Sum* __restrict__ total_partials, const BackwardSizes sizes, int threads) {
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
  const Index kept = 1, each = tasks / kept, slots = slots_of_rows(each, kept);
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
    const Values<float> carried_rows(length * side);
    const Values<float> carried_2_rows(length * side);
#pragma omp for schedule(static)
    for (Index share = 0; share < kept * slots; ++share) {
      const Index kept_index = share / slots, slot = share % slots, begin = kept_index * each;
      Sum* const total_columns = total_partials + (slot * kept + kept_index) * length;
      std::fill(total_columns, total_columns + length, Sum());
      for (Index task = begin + each * slot / slots; task < begin + each * (slot + 1) / slots; ++task) {
        const Index above_index = task / blocks, first = task % blocks * side;
        const Index width = std::min(side, beside - first);
        const Index outer = above_index;
        SumLanes<kLine> total_2_lanes(width);
        for (Index r = 0; r < length; ++r) {
          const Index middle = r;
          const Index place = r * side;
          const Index inner = first;
          float* const carried_line = carried_rows.at + place;
          float* const carried_2_line = carried_2_rows.at + place;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
          float saved_bound_room[kLine];
          const float* const saved_bound_line = load<1>(saved_bound + (outer) * sizes.inner.value + inner,
              width, saved_bound_room);
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
          float total_2_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float saved_bound_value = saved_bound_line[i];
            const float d_out_value = d_out_line[i];
            float total_2_term_value;
            float carried_value;
            float carried_2_value;
            backward_column_stage_1(x_value, saved_bound_value, d_out_value, total_2_term_value,
                carried_value, carried_2_value);
            total_2_term_line[i] = total_2_term_value;
            carried_line[i] = carried_value;
            carried_2_line[i] = carried_2_value;
          }
          total_columns[r].add(d_out_line, width);
          total_2_lanes.add(total_2_term_line, width);
        }
        float total_2_line[kLine];
        for (Index i = 0; i < padded(width); ++i) total_2_line[i] = static_cast<float>(total_2_lanes.sum(i));
        {  // what does not vary along a row is found once
          const Index inner = first;
          float saved_sum_room[kLine];
          const float* const saved_sum_line = load<1>(saved_sum + (outer) * sizes.inner.value + inner, width,
              saved_sum_room);
          float quotient_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float total_2_value = total_2_line[i];
            const float saved_sum_value = saved_sum_line[i];
            float quotient_value;
            backward_column_values_once(total_2_value, saved_sum_value, quotient_value);
            quotient_line[i] = quotient_value;
          }
          for (Index r = 0; r < length; ++r) {
            const Index middle = r;
            const Index place = r * side;
            const Index inner = first;
            float* const carried_line = carried_rows.at + place;
            float* const carried_2_line = carried_2_rows.at + place;
            float x_room[kLine];
            const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_out_room);
            float saved_sum_room[kLine];
            const float* const saved_sum_line = load<1>(saved_sum + (outer) * sizes.inner.value + inner,
                width, saved_sum_room);
            float d_x_room[kLine];
            float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float d_out_value = d_out_line[i];
              const float saved_sum_value = saved_sum_line[i];
              const float quotient_value = quotient_line[i];
              const float carried_2_value = carried_2_line[i];
              const float x_value = x_line[i];
              const float carried_value = carried_line[i];
              float d_x_value;
              backward_column_values(d_out_value, saved_sum_value, quotient_value, carried_2_value, x_value,
                  carried_value, d_x_value);
              d_x_line[i] = d_x_value;
            }
            store<1>(d_x_line, width,
                d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
          }
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

static void backward_finalise(float* __restrict__ d_bias, const Sum* __restrict__ total_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_bias, sizes.middle.value);
  const Index columns = sizes.middle.value, results = sizes.middle.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index middle = first;
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + middle, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float d_bias_value;
      backward_finalise_values(total_value, d_bias_value);
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_bias_line, width, d_bias + middle);
  }
}

}  // namespace

// a: x, bias, out, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  forward_column(x, bias, out, saved_bound, saved_sum, sizes, threads);
  return 0;
}

// a: x, saved_bound, saved_sum, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[1]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_bias = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_partials_slots = slots_of_rows(sizes.outer.value * blocks_of(sizes.outer.value,
      sizes.middle.value, sizes.inner.value), 1)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_column(x, saved_bound, d_out, saved_sum, d_x, total_partials, sizes, threads);
  backward_finalise(d_bias, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
