// fusegen 0.1.0   chain be8bf7747d29   signature forward+backward: d_out bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, saved_mean float32, weight bfloat16, x bfloat16; 64-bit offsets
//   unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(y_2) | recall(y) | select(-2, 1) | mul(y_2) | rms_norm(weight)
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

// Short rows go through each stage together: what one row waits for is hidden behind the others. So many
// elements still lie in the fastest cache when the next stage comes.
constexpr Index kTogether = 64;

inline Index rows_together(Index length) {
  return std::min<Index>(kTogether, std::max<Index>(1, 4096 / std::max<Index>(1, length)));
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

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x_at_1, const float x_at_0,
    float& total_term, float& carried_after_mul) {
  // silu
  const float after_silu = x_at_0 * (1.0f / (1.0f + exp_of(-x_at_0)));
  // mul(y_2)
  const float after_mul = x_at_1 * after_silu;
  total_term = after_mul * after_mul;
  carried_after_mul = after_mul;
}

static inline __attribute__((always_inline)) void forward_row_values(const float carried_after_mul,
    const float total, const float count_of_inner, const float weight, float& out) {
  // rms_norm(weight)
  const float product = carried_after_mul * (1.0f / sqrtf(total * (1.0f / count_of_inner) + 1.1920929e-07f));
  out = product * weight;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float total,
    const float count_of_inner, float& saved_mean) {
  saved_mean = total * (1.0f / count_of_inner);
}

static void forward_row(const bfloat16* __restrict__ x_at_1, const bfloat16* __restrict__ x_at_0,
    const bfloat16* __restrict__ weight, bfloat16* __restrict__ out, float* __restrict__ saved_mean,
    const ForwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(out, sizes.outer.value * sizes.inner.value);
  expect(saved_mean, sizes.outer.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_after_mul_rows(together * padded(length));
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const Index place = (row - top) * padded(length);
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_after_mul_line = carried_after_mul_rows.at + place + first;
          float x_at_1_room[kLine];
          const float* const x_at_1_line = load<1>(x_at_1 + ((outer) * sizes.middle.value + 1) * sizes.inner.value + inner, width, x_at_1_room);
          float x_at_0_room[kLine];
          const float* const x_at_0_line = load<1>(x_at_0 + ((outer) * sizes.middle.value + 0) * sizes.inner.value + inner, width, x_at_0_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_at_1_value = x_at_1_line[i];
            const float x_at_0_value = x_at_0_line[i];
            float total_term_value;
            float carried_after_mul_value;
            forward_row_stage_1(x_at_1_value, x_at_0_value, total_term_value, carried_after_mul_value);
            total_term_line[i] = total_term_value;
            carried_after_mul_line[i] = carried_after_mul_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const Index place = (row - top) * padded(length);
        const float total_value = total_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_after_mul_line = carried_after_mul_rows.at + place + first;
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + inner, width, weight_room);
          float out_room[kLine];
          float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float carried_after_mul_value = carried_after_mul_line[i];
            const float weight_value = weight_line[i];
            float out_value;
            forward_row_values(carried_after_mul_value, total_value, count_of_inner_value, weight_value,
                out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
        }
        {
          const Index outer = row;
          const float total_value = total_of_rows[row - top];
          float saved_mean_value;
          forward_row_row_values(total_value, count_of_inner_value, saved_mean_value);
          saved_mean[outer] = narrow<float>(saved_mean_value);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void backward_outer_values(const float position_along,
    const float x, float& total_term, float& total_2_term) {
  total_term = position_along == 1.0f ? x : 0.0f;
  total_2_term = position_along == 0.0f ? x : 0.0f;
}

static void backward_outer(const bfloat16* __restrict__ x, Sum* __restrict__ total_partials,
    Sum* __restrict__ total_2_partials, const BackwardSizes sizes, int threads) {
  const Positions position_along{};
  const Index kept = sizes.outer.value, rows = sizes.middle.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index outer = kept_index;
    SumLanes<kBeside> total_lanes(end - begin);
    SumLanes<kBeside> total_2_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index middle = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        const float position_along_value = widen(position_along[middle]);
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, x_room);
        float total_term_line[kLine];
        float total_2_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float x_value = x_line[i];
          float total_term_value;
          float total_2_term_value;
          backward_outer_values(position_along_value, x_value, total_term_value, total_2_term_value);
          total_term_line[i] = total_term_value;
          total_2_term_line[i] = total_2_term_value;
        }
        total_lanes.add(total_term_line, width, first - begin);
        total_2_lanes.add(total_2_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_partials[block * columns + begin + i] = total_lanes.at(i);
    for (Index i = 0; i < end - begin; ++i) total_2_partials[block * columns + begin + i] = total_2_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    const float total_2, float& total_scratch, float& total_2_scratch) {
  total_scratch = total;
  total_2_scratch = total_2;
}

static void backward_finalise(float* __restrict__ total_scratch, float* __restrict__ total_2_scratch,
    const Sum* __restrict__ total_partials, const Sum* __restrict__ total_2_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(total_scratch, sizes.outer.value * sizes.inner.value);
  expect(total_2_scratch, sizes.outer.value * sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.outer.value * sizes.inner.value;
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
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    float total_scratch_room[kLine];
    float* const total_scratch_line = target<1>(total_scratch + (outer) * sizes.inner.value + inner, width,
        total_scratch_room);
    float total_2_scratch_room[kLine];
    float* const total_2_scratch_line = target<1>(total_2_scratch + (outer) * sizes.inner.value + inner,
        width, total_2_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float total_2_value = total_2_line[i];
      float total_scratch_value;
      float total_2_scratch_value;
      backward_finalise_values(total_value, total_2_value, total_scratch_value, total_2_scratch_value);
      total_scratch_line[i] = total_scratch_value;
      total_2_scratch_line[i] = total_2_scratch_value;
    }
    store<1>(total_scratch_line, width, total_scratch + (outer) * sizes.inner.value + inner);
    store<1>(total_2_scratch_line, width, total_2_scratch + (outer) * sizes.inner.value + inner);
  }
}

static inline __attribute__((always_inline)) void backward_inner_values(const float d_out,
    const float weight, const float total, const float total_2, float& total_3_term) {
  // silu
  const float after_silu = total_2 * (1.0f / (1.0f + exp_of(-total_2)));
  // mul(y_2)
  const float after_mul = total * after_silu;
  total_3_term = d_out * weight * after_mul;
}

static void backward_inner(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ weight,
    const float* __restrict__ total, const float* __restrict__ total_2, Sum* __restrict__ total_3_partials,
    const BackwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index outer = row;
    Sum total_3_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index inner = first;
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      float total_room[kLine];
      const float* const total_line = load<1>(total + (outer) * sizes.inner.value + inner, width, total_room);
      float total_2_room[kLine];
      const float* const total_2_line = load<1>(total_2 + (outer) * sizes.inner.value + inner, width,
          total_2_room);
      float total_3_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float weight_value = weight_line[i];
        const float total_value = total_line[i];
        const float total_2_value = total_2_line[i];
        float total_3_term_value;
        backward_inner_values(d_out_value, weight_value, total_value, total_2_value, total_3_term_value);
        total_3_term_line[i] = total_3_term_value;
      }
      total_3_sum.add(total_3_term_line, width);
    }
    total_3_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_3_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_2_values(const float total_3,
    float& total_3_scratch) {
  total_3_scratch = total_3;
}

static void backward_finalise_2(float* __restrict__ total_3_scratch,
    const Sum* __restrict__ total_3_partials, const BackwardSizes sizes, Index slots, int threads) {
  expect(total_3_scratch, sizes.outer.value);
  const Index columns = 1, results = sizes.outer.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_3_sums[kResults];
    merge_slots(total_3_sums, total_3_partials, first, width, columns, slots);
    float total_3_line[kResults];
    for (Index i = 0; i < width; ++i) total_3_line[i] = static_cast<float>(total_3_sums[i].sum());
    pad(total_3_line, width);
    const Index outer = first;
    float total_3_scratch_room[kLine];
    float* const total_3_scratch_line = target<1>(total_3_scratch + outer, width, total_3_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      float total_3_scratch_value;
      backward_finalise_2_values(total_3_value, total_3_scratch_value);
      total_3_scratch_line[i] = total_3_scratch_value;
    }
    store<1>(total_3_scratch_line, width, total_3_scratch + outer);
  }
}

static inline __attribute__((always_inline)) void backward_outer_2_values(const float d_out,
    const float total, const float total_2, const float saved_mean, float& total_4_term) {
  // silu
  const float after_silu = total_2 * (1.0f / (1.0f + exp_of(-total_2)));
  // mul(y_2)
  const float after_mul = total * after_silu;
  total_4_term = d_out * (after_mul * (1.0f / sqrtf(saved_mean + 1.1920929e-07f)));
}

static void backward_outer_2(const bfloat16* __restrict__ d_out, const float* __restrict__ total,
    const float* __restrict__ total_2, const float* __restrict__ saved_mean,
    Sum* __restrict__ total_4_partials, const BackwardSizes sizes, int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    SumLanes<kBeside> total_4_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
            d_out_room);
        float total_room[kLine];
        const float* const total_line = load<1>(total + (outer) * sizes.inner.value + inner, width,
            total_room);
        float total_2_room[kLine];
        const float* const total_2_line = load<1>(total_2 + (outer) * sizes.inner.value + inner, width,
            total_2_room);
        const float saved_mean_value = widen(saved_mean[outer]);
        float total_4_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float d_out_value = d_out_line[i];
          const float total_value = total_line[i];
          const float total_2_value = total_2_line[i];
          float total_4_term_value;
          backward_outer_2_values(d_out_value, total_value, total_2_value, saved_mean_value,
              total_4_term_value);
          total_4_term_line[i] = total_4_term_value;
        }
        total_4_lanes.add(total_4_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_4_partials[block * columns + begin + i] = total_4_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_3_values(const float total_4,
    float& d_weight) {
  d_weight = total_4;
}

static void backward_finalise_3(bfloat16* __restrict__ d_weight, const Sum* __restrict__ total_4_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_4_sums[kResults];
    merge_slots(total_4_sums, total_4_partials, first, width, columns, slots);
    float total_4_line[kResults];
    for (Index i = 0; i < width; ++i) total_4_line[i] = static_cast<float>(total_4_sums[i].sum());
    pad(total_4_line, width);
    const Index inner = first;
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + inner, width, d_weight_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_4_value = total_4_line[i];
      float d_weight_value;
      backward_finalise_3_values(total_4_value, d_weight_value);
      d_weight_line[i] = d_weight_value;
    }
    store<1>(d_weight_line, width, d_weight + inner);
  }
}

static inline __attribute__((always_inline)) void backward_pointwise_values(const float d_out,
    const float weight, const float saved_mean, const float total_3, const float count_of_inner,
    const float total, const float total_2, float& common_scratch, float& common_2_scratch) {
  // silu
  const float sigmoid_value = 1.0f / (1.0f + exp_of(-total_2));
  const float after_silu = total_2 * sigmoid_value;
  // mul(y_2)
  const float after_mul = total * after_silu;
  // backward, down to mul(y_2)
  const float inverse_root = 1.0f / sqrtf(saved_mean + 1.1920929e-07f);
  const float quotient = -0.5f * (total_3 * inverse_root) * (inverse_root * inverse_root) / count_of_inner;
  const float product = quotient * after_mul;
  const float d_after_mul = d_out * weight * inverse_root + product + product;
  // backward, down to select(-2, 1)
  // backward, down to silu
  const float d_after_silu = d_after_mul * total;
  // backward, down to select(-2, 0)
  common_scratch = d_after_silu * sigmoid_value * (1.0f + total_2 * (1.0f - sigmoid_value));
  common_2_scratch = d_after_mul * after_silu;
}

static void backward_pointwise(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ weight,
    const float* __restrict__ saved_mean, const float* __restrict__ total_3, const float* __restrict__ total,
    const float* __restrict__ total_2, float* __restrict__ common_scratch,
    float* __restrict__ common_2_scratch, const BackwardSizes sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  expect(common_scratch, sizes.outer.value * sizes.inner.value);
  expect(common_2_scratch, sizes.outer.value * sizes.inner.value);
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
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width, d_out_room);
      float weight_room[kLine];
      const float* const weight_line = load<1>(weight + inner, width, weight_room);
      const float saved_mean_value = widen(saved_mean[outer]);
      const float total_3_value = widen(total_3[outer]);
      float total_room[kLine];
      const float* const total_line = load<1>(total + (outer) * sizes.inner.value + inner, width, total_room);
      float total_2_room[kLine];
      const float* const total_2_line = load<1>(total_2 + (outer) * sizes.inner.value + inner, width,
          total_2_room);
      float common_scratch_room[kLine];
      float* const common_scratch_line = target<1>(common_scratch + (outer) * sizes.inner.value + inner,
          width, common_scratch_room);
      float common_2_scratch_room[kLine];
      float* const common_2_scratch_line = target<1>(common_2_scratch + (outer) * sizes.inner.value + inner,
          width, common_2_scratch_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float weight_value = weight_line[i];
        const float total_value = total_line[i];
        const float total_2_value = total_2_line[i];
        float common_scratch_value;
        float common_2_scratch_value;
        backward_pointwise_values(d_out_value, weight_value, saved_mean_value, total_3_value,
            count_of_inner_value, total_value, total_2_value, common_scratch_value, common_2_scratch_value);
        common_scratch_line[i] = common_scratch_value;
        common_2_scratch_line[i] = common_2_scratch_value;
      }
      store<1>(common_scratch_line, width, common_scratch + (outer) * sizes.inner.value + inner);
      store<1>(common_2_scratch_line, width, common_2_scratch + (outer) * sizes.inner.value + inner);
    }
  }
}

static inline __attribute__((always_inline)) void backward_pointwise_2_values(const float position_along,
    const float common, const float common_2, float& d_x) {
  // backward, down to unflatten(-1, (2, -1))
  d_x = (position_along == 0.0f ? common : 0.0f) + (position_along == 1.0f ? common_2 : 0.0f);
}

static void backward_pointwise_2(const float* __restrict__ common, const float* __restrict__ common_2,
    bfloat16* __restrict__ d_x, const BackwardSizes sizes, int threads) {
  const Positions position_along{};
  expect(d_x, sizes.outer.value * sizes.middle.value * sizes.inner.value);
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
      const float position_along_value = widen(position_along[middle]);
      float common_room[kLine];
      const float* const common_line = load<1>(common + (outer) * sizes.inner.value + inner, width,
          common_room);
      float common_2_room[kLine];
      const float* const common_2_line = load<1>(common_2 + (outer) * sizes.inner.value + inner, width,
          common_2_room);
      float d_x_room[kLine];
      float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float common_value = common_line[i];
        const float common_2_value = common_2_line[i];
        float d_x_value;
        backward_pointwise_2_values(position_along_value, common_value, common_2_value, d_x_value);
        d_x_line[i] = d_x_value;
      }
      store<1>(d_x_line, width, d_x + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    }
  }
}

}  // namespace

// a: x, weight, out, saved_mean, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  auto* const saved_mean = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_row(x, x, weight, out, saved_mean, sizes, threads);
  return 0;
}

// a: x, weight, saved_mean, d_out, d_x, d_weight, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[3]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[4]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_partials_slots = slots_of(sizes.middle.value, sizes.inner.value,
      sizes.outer.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_2_partials_slots = slots_of(sizes.middle.value, sizes.inner.value,
      sizes.outer.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_3_partials_slots = 1 * pieces_of(sizes.inner.value)
;
  const Index total_4_partials_slots = slots_of(sizes.outer.value, sizes.inner.value,
      1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.outer.value) * total_3_partials_slots);
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_4_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const common_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  backward_outer(x, total_partials, total_2_partials, sizes, threads);
  backward_finalise(total_scratch, total_2_scratch, total_partials, total_2_partials, sizes,
      total_partials_slots, threads);
  backward_inner(d_out, weight, total_scratch, total_2_scratch, total_3_partials, sizes, threads);
  backward_finalise_2(total_3_scratch, total_3_partials, sizes, total_3_partials_slots, threads);
  backward_outer_2(d_out, total_scratch, total_2_scratch, saved_mean, total_4_partials, sizes, threads);
  backward_finalise_3(d_weight, total_4_partials, sizes, total_4_partials_slots, threads);
  backward_pointwise(d_out, weight, saved_mean, total_3_scratch, total_scratch, total_2_scratch,
      common_scratch, common_2_scratch, sizes, threads);
  backward_pointwise_2(common_scratch, common_2_scratch, d_x, sizes, threads);
  return 0;
}
