// fusegen 0.1.0   chain 2a0ebff5ca2c   signature forward+backward: b_operand float32, d_b_operand float32, d_out float32, d_x float32, out float32, x float32; 64-bit offsets
//   add(b) | unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | keep(y_2) | recall(y) | select(-2, 1) | sigmoid | mul(y_2)
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

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x_at_1,
    const float b_operand_at_1, const float x_at_0, const float b_operand_at_0, float& out) {
  // select(-2, 0)
  const float after_select = x_at_0 + b_operand_at_0;
  // select(-2, 1)
  const float after_select_2 = x_at_1 + b_operand_at_1;
  // sigmoid
  const float after_sigmoid = 1.0f / (1.0f + exp_of(-after_select_2));
  // mul(y_2)
  out = after_sigmoid * after_select;
}

static void forward_pointwise(const float* __restrict__ x_at_1, const float* __restrict__ b_operand_at_1,
    const float* __restrict__ x_at_0, const float* __restrict__ b_operand_at_0, float* __restrict__ out,
    const ForwardSizes sizes, int threads) {
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
      float x_at_1_room[kLine];
      const float* const x_at_1_line = load<1>(x_at_1 + ((outer) * sizes.middle.value + 1) * sizes.inner.value + inner, width, x_at_1_room);
      float b_operand_at_1_room[kLine];
      const float* const b_operand_at_1_line = load<1>(b_operand_at_1 + (1) * sizes.inner.value + inner,
          width, b_operand_at_1_room);
      float x_at_0_room[kLine];
      const float* const x_at_0_line = load<1>(x_at_0 + ((outer) * sizes.middle.value + 0) * sizes.inner.value + inner, width, x_at_0_room);
      float b_operand_at_0_room[kLine];
      const float* const b_operand_at_0_line = load<1>(b_operand_at_0 + (0) * sizes.inner.value + inner,
          width, b_operand_at_0_room);
      float out_room[kLine];
      float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_at_1_value = x_at_1_line[i];
        const float b_operand_at_1_value = b_operand_at_1_line[i];
        const float x_at_0_value = x_at_0_line[i];
        const float b_operand_at_0_value = b_operand_at_0_line[i];
        float out_value;
        forward_pointwise_values(x_at_1_value, b_operand_at_1_value, x_at_0_value, b_operand_at_0_value,
            out_value);
        out_line[i] = out_value;
      }
      store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_column_stage_1(const float position_along,
    const float x, const float b_operand, float& total_term, float& total_2_term) {
  // add(b)
  const float after_add = x + b_operand;
  total_term = position_along == 1.0f ? after_add : 0.0f;
  total_2_term = position_along == 0.0f ? after_add : 0.0f;
}

static inline __attribute__((always_inline)) void backward_column_values_once(const float d_out,
    const float total, const float total_2, float& d_after_select, float& d_after_select_2) {
  // sigmoid
  const float after_sigmoid = 1.0f / (1.0f + exp_of(-total));
  // backward, down to sigmoid
  const float d_after_sigmoid = d_out * total_2;
  // backward, down to select(-2, 1)
  // backward, down to select(-2, 0)
  d_after_select = d_out * after_sigmoid;
  d_after_select_2 = d_after_sigmoid * (1.0f - after_sigmoid) * after_sigmoid;
}

static inline __attribute__((always_inline)) void backward_column_values(const float position_along,
    const float d_after_select, const float d_after_select_2, float& d_x) {
  // backward, down to unflatten(-1, (2, -1))
  // backward, down to add(b)
  d_x = (position_along == 0.0f ? d_after_select : 0.0f) + (position_along == 1.0f ? d_after_select_2 : 0.0f);
}

static inline __attribute__((always_inline)) void backward_column_row_values(const float total,
    const float total_2, float& total_scratch, float& total_2_scratch) {
  total_scratch = total;
  total_2_scratch = total_2;
}

static void backward_column(const float* __restrict__ x, const float* __restrict__ b_operand,
    const float* __restrict__ d_out, float* __restrict__ d_x, float* __restrict__ total_scratch,
    float* __restrict__ total_2_scratch, const BackwardSizes sizes, int threads) {
  const Positions position_along{};
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  expect(total_scratch, sizes.outer.value * sizes.inner.value);
  expect(total_2_scratch, sizes.outer.value * sizes.inner.value);
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
      SumLanes<kLine, float> total_lanes(width);
      SumLanes<kLine, float> total_2_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index middle = r;
        const Index inner = first;
        const float position_along_value = widen(position_along[middle]);
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        float b_operand_room[kLine];
        const float* const b_operand_line = load<1>(b_operand + (middle) * sizes.inner.value + inner, width,
            b_operand_room);
        float total_term_line[kLine];
        float total_2_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          const float b_operand_value = b_operand_line[i];
          float total_term_value;
          float total_2_term_value;
          backward_column_stage_1(position_along_value, x_value, b_operand_value, total_term_value,
              total_2_term_value);
          total_term_line[i] = total_term_value;
          total_2_term_line[i] = total_2_term_value;
        }
        total_lanes.add(total_term_line, width);
        total_2_lanes.add(total_2_term_line, width);
      }
      float total_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_line[i] = static_cast<float>(total_lanes.sum(i));
      float total_2_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_2_line[i] = static_cast<float>(total_2_lanes.sum(i));
      {  // what does not vary along a row is found once
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
            d_out_room);
        float d_after_select_line[kLine];
        float d_after_select_2_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float total_value = total_line[i];
          const float total_2_value = total_2_line[i];
          float d_after_select_value;
          float d_after_select_2_value;
          backward_column_values_once(d_out_value, total_value, total_2_value, d_after_select_value,
              d_after_select_2_value);
          d_after_select_line[i] = d_after_select_value;
          d_after_select_2_line[i] = d_after_select_2_value;
        }
        for (Index r = 0; r < length; ++r) {
          const Index middle = r;
          const Index inner = first;
          const float position_along_value = widen(position_along[middle]);
          float d_x_room[kLine];
          float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float d_after_select_value = d_after_select_line[i];
            const float d_after_select_2_value = d_after_select_2_line[i];
            float d_x_value;
            backward_column_values(position_along_value, d_after_select_value, d_after_select_2_value,
                d_x_value);
            d_x_line[i] = d_x_value;
          }
          store<1>(d_x_line, width,
              d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
        }
      }
      {
        const Index inner = first;
        float total_scratch_room[kLine];
        float* const total_scratch_line = target<1>(total_scratch + (outer) * sizes.inner.value + inner,
            width, total_scratch_room);
        float total_2_scratch_room[kLine];
        float* const total_2_scratch_line = target<1>(total_2_scratch + (outer) * sizes.inner.value + inner,
            width, total_2_scratch_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float total_value = total_line[i];
          const float total_2_value = total_2_line[i];
          float total_scratch_value;
          float total_2_scratch_value;
          backward_column_row_values(total_value, total_2_value, total_scratch_value, total_2_scratch_value);
          total_scratch_line[i] = total_scratch_value;
          total_2_scratch_line[i] = total_2_scratch_value;
        }
        store<1>(total_scratch_line, width, total_scratch + (outer) * sizes.inner.value + inner);
        store<1>(total_2_scratch_line, width, total_2_scratch + (outer) * sizes.inner.value + inner);
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float position_along,
    const float d_out, const float total, const float total_2, float& total_3_term) {
  // sigmoid
  const float after_sigmoid = 1.0f / (1.0f + exp_of(-total));
  // backward, down to sigmoid
  const float d_after_sigmoid = d_out * total_2;
  // backward, down to select(-2, 1)
  const float d_after_select = d_after_sigmoid * (1.0f - after_sigmoid) * after_sigmoid;
  // backward, down to select(-2, 0)
  const float d_after_select_2 = d_out * after_sigmoid;
  // backward, down to unflatten(-1, (2, -1))
  // backward, down to add(b)
  total_3_term = (position_along == 0.0f ? d_after_select_2 : 0.0f) + (position_along == 1.0f ? d_after_select : 0.0f);
}

static void backward_outer(const float* __restrict__ d_out, const float* __restrict__ total,
    const float* __restrict__ total_2, Sum* __restrict__ total_3_partials, const BackwardSizes sizes,
    int threads) {
  const Positions position_along{};
  const Index kept = sizes.middle.value, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index middle = kept_index;
    SumLanes<kBeside> total_3_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        const float position_along_value = widen(position_along[middle]);
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
            d_out_room);
        float total_room[kLine];
        const float* const total_line = load<1>(total + (outer) * sizes.inner.value + inner, width,
            total_room);
        float total_2_room[kLine];
        const float* const total_2_line = load<1>(total_2 + (outer) * sizes.inner.value + inner, width,
            total_2_room);
        float total_3_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float total_value = total_line[i];
          const float total_2_value = total_2_line[i];
          float total_3_term_value;
          backward_outer_values(position_along_value, d_out_value, total_value, total_2_value,
              total_3_term_value);
          total_3_term_line[i] = total_3_term_value;
        }
        total_3_lanes.add(total_3_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_3_partials[block * columns + begin + i] = total_3_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_3,
    float& d_b_operand) {
  d_b_operand = total_3;
}

static void backward_finalise(float* __restrict__ d_b_operand, const Sum* __restrict__ total_3_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_b_operand, sizes.middle.value * sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.middle.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_3_sums[kResults];
    merge_slots(total_3_sums, total_3_partials, first, width, columns, slots);
    float total_3_line[kResults];
    for (Index i = 0; i < width; ++i) total_3_line[i] = static_cast<float>(total_3_sums[i].sum());
    pad(total_3_line, width);
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index middle = above_inner;
    float d_b_operand_room[kLine];
    float* const d_b_operand_line = target<1>(d_b_operand + (middle) * sizes.inner.value + inner, width,
        d_b_operand_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      float d_b_operand_value;
      backward_finalise_values(total_3_value, d_b_operand_value);
      d_b_operand_line[i] = d_b_operand_value;
    }
    store<1>(d_b_operand_line, width, d_b_operand + (middle) * sizes.inner.value + inner);
  }
}

}  // namespace

// a: x, b_operand, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const b_operand = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]}, {a[6]} };
  const int threads = static_cast<int>(a[7]);
  if (is_measuring) return scratch.used;
  forward_pointwise(x, b_operand, x, b_operand, out, sizes, threads);
  return 0;
}

// a: x, b_operand, d_out, d_x, d_b_operand, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const b_operand = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_b_operand = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  const Index total_3_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      sizes.middle.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  if (is_measuring) return scratch.used;
  backward_column(x, b_operand, d_out, d_x, total_scratch, total_2_scratch, sizes, threads);
  backward_outer(d_out, total_scratch, total_2_scratch, total_3_partials, sizes, threads);
  backward_finalise(d_b_operand, total_3_partials, sizes, total_3_partials_slots, threads);
  return 0;
}
