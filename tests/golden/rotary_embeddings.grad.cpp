// fusegen 0.1.0   chain 97039486bd88   signature forward+backward: cos_operand float32, d_cos_operand float32, d_out float32, d_sin_operand float32, d_x float32, out float32, sin_operand float32, x float32; 64-bit offsets
//   keep(y) | unflatten(-1, (2, -1)) | keep(y_2) | select(-2, 0) | keep(y_3) | recall(y_2) | select(-2, 1) | neg | stack(y_3, dim=-2) | flatten(-2) | mul(sin) | keep(y_4) | recall(y) | mul(cos) | add(y_4)
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
  Size outer, axis_1, axis_2, inner;
};

static inline __attribute__((always_inline)) void forward_column_stage_1(const float position_along,
    const float x, float& total_term, float& total_2_term) {
  total_term = position_along == 1.0f ? x : 0.0f;
  total_2_term = position_along == 0.0f ? x : 0.0f;
}

static inline __attribute__((always_inline)) void forward_column_values_once(const float total,
    float& after_neg) {
  // neg
  after_neg = -total;
}

static inline __attribute__((always_inline)) void forward_column_values(const float x,
    const float cos_operand, const float position_along, const float after_neg, const float total_2,
    const float sin_operand, float& out) {
  // stack(y_3, dim=-2)
  const float after_stack = position_along == 0.0f ? after_neg : total_2;
  // mul(sin)
  const float after_mul = after_stack * sin_operand;
  // mul(cos)
  const float after_mul_2 = x * cos_operand;
  // add(y_4)
  out = after_mul_2 + after_mul;
}

static void forward_column(const float* __restrict__ x, const float* __restrict__ cos_operand,
    const float* __restrict__ sin_operand, float* __restrict__ out, const ForwardSizes sizes, int threads) {
  const Positions position_along{};
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  const Index above = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value,
      beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index above_index = task / blocks, first = task % blocks * side;
      const Index width = std::min(side, beside - first);
      const Index above_axis_1 = divide(above_index, sizes.axis_1);
      const Index axis_1 = above_index - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      SumLanes<kLine, float> total_lanes(width);
      SumLanes<kLine, float> total_2_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index axis_2 = r;
        const Index inner = first;
        const float position_along_value = widen(position_along[axis_2]);
        float x_room[kLine];
        const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
        float total_term_line[kLine];
        float total_2_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          float total_term_value;
          float total_2_term_value;
          forward_column_stage_1(position_along_value, x_value, total_term_value, total_2_term_value);
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
        float after_neg_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float total_value = total_line[i];
          float after_neg_value;
          forward_column_values_once(total_value, after_neg_value);
          after_neg_line[i] = after_neg_value;
        }
        for (Index r = 0; r < length; ++r) {
          const Index axis_2 = r;
          const Index inner = first;
          const float position_along_value = widen(position_along[axis_2]);
          float x_room[kLine];
          const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
          float cos_operand_room[kLine];
          const float* const cos_operand_line = load<1>(cos_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, cos_operand_room);
          float sin_operand_room[kLine];
          const float* const sin_operand_line = load<1>(sin_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, sin_operand_room);
          float out_room[kLine];
          float* const out_line = target<1>(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float cos_operand_value = cos_operand_line[i];
            const float after_neg_value = after_neg_line[i];
            const float total_2_value = total_2_line[i];
            const float sin_operand_value = sin_operand_line[i];
            float out_value;
            forward_column_values(x_value, cos_operand_value, position_along_value, after_neg_value,
                total_2_value, sin_operand_value, out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width,
              out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner;
};

static inline __attribute__((always_inline)) void backward_column_stage_1(const float position_along,
    const float d_out, const float sin_operand, const float x, float& total_term, float& total_2_term,
    float& total_3_term, float& total_4_term) {
  // backward, down to flatten(-2)
  const float d_after_flatten = d_out * sin_operand;
  const bool is_equal = position_along == 0.0f;
  total_term = is_equal ? 0.0f : d_after_flatten;
  total_2_term = is_equal ? d_after_flatten : 0.0f;
  total_3_term = position_along == 1.0f ? x : 0.0f;
  total_4_term = is_equal ? x : 0.0f;
}

static inline __attribute__((always_inline)) void backward_column_values_once(const float total_2,
    float& d_after_select) {
  // backward, down to select(-2, 1)
  d_after_select = -total_2;
}

static inline __attribute__((always_inline)) void backward_column_values(const float position_along,
    const float total, const float d_after_select, const float d_out, const float cos_operand, float& d_x) {
  // backward, down to unflatten(-1, (2, -1))
  const float sum = (position_along == 0.0f ? total : 0.0f) + (position_along == 1.0f ? d_after_select : 0.0f);
  d_x = sum + d_out * cos_operand;
}

static inline __attribute__((always_inline)) void backward_column_row_values(const float total_3,
    const float total_4, float& total_3_scratch, float& total_4_scratch) {
  total_3_scratch = total_3;
  total_4_scratch = total_4;
}

static void backward_column(const float* __restrict__ d_out, const float* __restrict__ sin_operand,
    const float* __restrict__ x, const float* __restrict__ cos_operand, float* __restrict__ d_x,
    float* __restrict__ total_3_scratch, float* __restrict__ total_4_scratch, const BackwardSizes sizes,
    int threads) {
  const Positions position_along{};
  expect(d_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(total_3_scratch, sizes.outer.value * sizes.axis_1.value * sizes.inner.value);
  expect(total_4_scratch, sizes.outer.value * sizes.axis_1.value * sizes.inner.value);
  const Index above = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value,
      beside = sizes.inner.value;
  const Index side = columns_together(above, length, beside), blocks = blocks_of(above, length, beside),
      tasks = above * blocks;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (above * length * beside > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index above_index = task / blocks, first = task % blocks * side;
      const Index width = std::min(side, beside - first);
      const Index above_axis_1 = divide(above_index, sizes.axis_1);
      const Index axis_1 = above_index - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      SumLanes<kLine> total_lanes(width);
      SumLanes<kLine, float> total_2_lanes(width);
      SumLanes<kLine, float> total_3_lanes(width);
      SumLanes<kLine, float> total_4_lanes(width);
      for (Index r = 0; r < length; ++r) {
        const Index axis_2 = r;
        const Index inner = first;
        const float position_along_value = widen(position_along[axis_2]);
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
        float sin_operand_room[kLine];
        const float* const sin_operand_line = load<1>(sin_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, sin_operand_room);
        float x_room[kLine];
        const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
        float total_term_line[kLine];
        float total_2_term_line[kLine];
        float total_3_term_line[kLine];
        float total_4_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float sin_operand_value = sin_operand_line[i];
          const float x_value = x_line[i];
          float total_term_value;
          float total_2_term_value;
          float total_3_term_value;
          float total_4_term_value;
          backward_column_stage_1(position_along_value, d_out_value, sin_operand_value, x_value,
              total_term_value, total_2_term_value, total_3_term_value, total_4_term_value);
          total_term_line[i] = total_term_value;
          total_2_term_line[i] = total_2_term_value;
          total_3_term_line[i] = total_3_term_value;
          total_4_term_line[i] = total_4_term_value;
        }
        total_lanes.add(total_term_line, width);
        total_2_lanes.add(total_2_term_line, width);
        total_3_lanes.add(total_3_term_line, width);
        total_4_lanes.add(total_4_term_line, width);
      }
      float total_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_line[i] = static_cast<float>(total_lanes.sum(i));
      float total_2_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_2_line[i] = static_cast<float>(total_2_lanes.sum(i));
      float total_3_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_3_line[i] = static_cast<float>(total_3_lanes.sum(i));
      float total_4_line[kLine];
      for (Index i = 0; i < padded(width); ++i) total_4_line[i] = static_cast<float>(total_4_lanes.sum(i));
      {  // what does not vary along a row is found once
        const Index inner = first;
        float d_after_select_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float total_2_value = total_2_line[i];
          float d_after_select_value;
          backward_column_values_once(total_2_value, d_after_select_value);
          d_after_select_line[i] = d_after_select_value;
        }
        for (Index r = 0; r < length; ++r) {
          const Index axis_2 = r;
          const Index inner = first;
          const float position_along_value = widen(position_along[axis_2]);
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
          float cos_operand_room[kLine];
          const float* const cos_operand_line = load<1>(cos_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, cos_operand_room);
          float d_x_room[kLine];
          float* const d_x_line = target<1>(d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float total_value = total_line[i];
            const float d_after_select_value = d_after_select_line[i];
            const float d_out_value = d_out_line[i];
            const float cos_operand_value = cos_operand_line[i];
            float d_x_value;
            backward_column_values(position_along_value, total_value, d_after_select_value, d_out_value,
                cos_operand_value, d_x_value);
            d_x_line[i] = d_x_value;
          }
          store<1>(d_x_line, width,
              d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
        }
      }
      {
        const Index inner = first;
        float total_3_scratch_room[kLine];
        float* const total_3_scratch_line = target<1>(total_3_scratch + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner, width, total_3_scratch_room);
        float total_4_scratch_room[kLine];
        float* const total_4_scratch_line = target<1>(total_4_scratch + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner, width, total_4_scratch_room);
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float total_3_value = total_3_line[i];
          const float total_4_value = total_4_line[i];
          float total_3_scratch_value;
          float total_4_scratch_value;
          backward_column_row_values(total_3_value, total_4_value, total_3_scratch_value,
              total_4_scratch_value);
          total_3_scratch_line[i] = total_3_scratch_value;
          total_4_scratch_line[i] = total_4_scratch_value;
        }
        store<1>(total_3_scratch_line, width,
            total_3_scratch + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner);
        store<1>(total_4_scratch_line, width,
            total_4_scratch + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner);
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float d_out,
    const float position_along, const float total_3, const float total_4, const float x, float& total_5_term,
    float& total_6_term) {
  // neg
  const float after_neg = -total_3;
  // stack(y_3, dim=-2)
  const float after_stack = position_along == 0.0f ? after_neg : total_4;
  total_5_term = d_out * after_stack;
  total_6_term = d_out * x;
}

static void backward_outer(const float* __restrict__ d_out, const float* __restrict__ total_3,
    const float* __restrict__ total_4, const float* __restrict__ x, Sum* __restrict__ total_5_partials,
    Sum* __restrict__ total_6_partials, const BackwardSizes sizes, int threads) {
  const Positions position_along{};
  const Index kept = sizes.axis_1.value * sizes.axis_2.value, rows = sizes.outer.value,
      columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index above_axis_2 = divide(kept_index, sizes.axis_2);
    const Index axis_2 = kept_index - above_axis_2 * sizes.axis_2.value;
    const Index axis_1 = above_axis_2;
    SumLanes<kBeside> total_5_lanes(end - begin);
    SumLanes<kBeside> total_6_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_out_room);
        const float position_along_value = widen(position_along[axis_2]);
        float total_3_room[kLine];
        const float* const total_3_line = load<1>(total_3 + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner, width, total_3_room);
        float total_4_room[kLine];
        const float* const total_4_line = load<1>(total_4 + ((outer) * sizes.axis_1.value + axis_1) * sizes.inner.value + inner, width, total_4_room);
        float x_room[kLine];
        const float* const x_line = load<1>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, x_room);
        float total_5_term_line[kLine];
        float total_6_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float total_3_value = total_3_line[i];
          const float total_4_value = total_4_line[i];
          const float x_value = x_line[i];
          float total_5_term_value;
          float total_6_term_value;
          backward_outer_values(d_out_value, position_along_value, total_3_value, total_4_value, x_value,
              total_5_term_value, total_6_term_value);
          total_5_term_line[i] = total_5_term_value;
          total_6_term_line[i] = total_6_term_value;
        }
        total_5_lanes.add(total_5_term_line, width, first - begin);
        total_6_lanes.add(total_6_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_5_partials[block * columns + begin + i] = total_5_lanes.at(i);
    for (Index i = 0; i < end - begin; ++i) total_6_partials[block * columns + begin + i] = total_6_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_5,
    const float total_6, float& d_sin_operand, float& d_cos_operand) {
  d_sin_operand = total_5;
  d_cos_operand = total_6;
}

static void backward_finalise(float* __restrict__ d_sin_operand, float* __restrict__ d_cos_operand,
    const Sum* __restrict__ total_5_partials, const Sum* __restrict__ total_6_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_sin_operand, sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(d_cos_operand, sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  const Index columns = sizes.inner.value,
      results = sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_5_sums[kResults];
    merge_slots(total_5_sums, total_5_partials, first, width, columns, slots);
    float total_5_line[kResults];
    for (Index i = 0; i < width; ++i) total_5_line[i] = static_cast<float>(total_5_sums[i].sum());
    pad(total_5_line, width);
    Sum total_6_sums[kResults];
    merge_slots(total_6_sums, total_6_partials, first, width, columns, slots);
    float total_6_line[kResults];
    for (Index i = 0; i < width; ++i) total_6_line[i] = static_cast<float>(total_6_sums[i].sum());
    pad(total_6_line, width);
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index above_axis_2 = divide(above_inner, sizes.axis_2);
    const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
    const Index axis_1 = above_axis_2;
    float d_sin_operand_room[kLine];
    float* const d_sin_operand_line = target<1>(d_sin_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_sin_operand_room);
    float d_cos_operand_room[kLine];
    float* const d_cos_operand_line = target<1>(d_cos_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, width, d_cos_operand_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_5_value = total_5_line[i];
      const float total_6_value = total_6_line[i];
      float d_sin_operand_value;
      float d_cos_operand_value;
      backward_finalise_values(total_5_value, total_6_value, d_sin_operand_value, d_cos_operand_value);
      d_sin_operand_line[i] = d_sin_operand_value;
      d_cos_operand_line[i] = d_cos_operand_value;
    }
    store<1>(d_sin_operand_line, width,
        d_sin_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
    store<1>(d_cos_operand_line, width,
        d_cos_operand + ((axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
  }
}

}  // namespace

// a: x, sin_operand, cos_operand, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const sin_operand = reinterpret_cast<const float*>(a[1]);
  auto* const cos_operand = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  forward_column(x, cos_operand, sin_operand, out, sizes, threads);
  return 0;
}

// a: x, sin_operand, cos_operand, d_out, d_x, d_sin_operand, d_cos_operand, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const sin_operand = reinterpret_cast<const float*>(a[1]);
  auto* const cos_operand = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_sin_operand = reinterpret_cast<float*>(a[5]);
  auto* const d_cos_operand = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ {a[8]}, {a[9]}, {a[10]}, {a[11]} };
  const int threads = static_cast<int>(a[12]);
  const Index total_5_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      sizes.axis_1.value * sizes.axis_2.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_6_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      sizes.axis_1.value * sizes.axis_2.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_4_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_5_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_5_partials_slots);
  auto* const total_6_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_6_partials_slots);
  if (is_measuring) return scratch.used;
  backward_column(d_out, sin_operand, x, cos_operand, d_x, total_3_scratch, total_4_scratch, sizes, threads);
  backward_outer(d_out, total_3_scratch, total_4_scratch, x, total_5_partials, total_6_partials, sizes,
      threads);
  backward_finalise(d_sin_operand, d_cos_operand, total_5_partials, total_6_partials, sizes,
      total_5_partials_slots, threads);
  return 0;
}
