// fusegen 0.1.0   chain c4d6cebc8a7e   signature forward+backward: bias bfloat16, d_bias bfloat16, d_mask bfloat16, d_out bfloat16, d_x bfloat16, mask bfloat16, out bfloat16, x bfloat16; 64-bit offsets
//   add(bias) | add(mask) | softmax(-1)
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

struct ForwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner;
};

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, const float bias,
    const float mask, float& peak_term) {
  // add(bias)
  const float after_add = x + bias;
  // add(mask)
  peak_term = after_add + mask;
}

static inline __attribute__((always_inline)) void forward_row_stage_2(const float x, const float bias,
    const float mask, const float peak, float& total_term, float& carried) {
  // add(bias)
  const float after_add = x + bias;
  // add(mask)
  const float after_add_2 = after_add + mask;
  const float power = exp2f((after_add_2 - peak) * 0.721347511f);
  total_term = power * power;
  carried = total_term;
}

static inline __attribute__((always_inline)) void forward_row_values(const float carried, const float total,
    float& out) {
  // softmax(-1)
  out = carried / total;
}

static void forward_row(const bfloat16* __restrict__ x, const bfloat16* __restrict__ bias,
    const bfloat16* __restrict__ mask, bfloat16* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out,
      sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value,
      length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_rows(together * padded(length));
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float peak_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_3 = divide(row, sizes.axis_3);
        const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
        const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
        const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
        const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
        const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        Peak<float> peak_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, x_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + ((axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, bias_room);
          float mask_room[kLine];
          const float* const mask_line = load<1>(mask + ((axis_1) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, mask_room);
          float peak_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float bias_value = bias_line[i];
            const float mask_value = mask_line[i];
            float peak_term_value;
            forward_row_stage_1(x_value, bias_value, mask_value, peak_term_value);
            peak_term_line[i] = peak_term_value;
          }
          peak_sum.add(peak_term_line, width);
        }
        peak_of_rows[row - top] = static_cast<float>(peak_sum.max());
      }
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_3 = divide(row, sizes.axis_3);
        const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
        const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
        const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
        const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
        const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float peak_value = peak_of_rows[row - top];
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_line = carried_rows.at + place + first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, x_room);
          float bias_room[kLine];
          const float* const bias_line = load<1>(bias + ((axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, bias_room);
          float mask_room[kLine];
          const float* const mask_line = load<1>(mask + ((axis_1) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, mask_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float bias_value = bias_line[i];
            const float mask_value = mask_line[i];
            float total_term_value;
            float carried_value;
            forward_row_stage_2(x_value, bias_value, mask_value, peak_value, total_term_value, carried_value);
            total_term_line[i] = total_term_value;
            carried_line[i] = carried_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_3 = divide(row, sizes.axis_3);
        const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
        const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
        const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
        const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
        const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const Index place = (row - top) * padded(length);
        const float total_value = total_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_line = carried_rows.at + place + first;
          float out_room[kLine];
          float* const out_line = target<1>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float carried_value = carried_line[i];
            float out_value;
            forward_row_values(carried_value, total_value, out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width,
              out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float out,
    float& total_term) {
  total_term = d_out * out;
}

static inline __attribute__((always_inline)) void backward_row_values(const float d_out, const float out,
    const float total, float& d_x) {
  // backward, down to add(mask)
  // backward, down to add(bias)
  d_x = d_out * out + -total * out;
}

static inline __attribute__((always_inline)) void backward_row_row_values(const float total,
    float& total_scratch) {
  total_scratch = total;
}

static void backward_row(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ out,
    bfloat16* __restrict__ d_x, float* __restrict__ total_scratch, const BackwardSizes sizes, int threads) {
  expect(d_x,
      sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value);
  expect(total_scratch, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value);
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value,
      length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_3 = divide(row, sizes.axis_3);
        const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
        const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
        const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
        const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
        const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_out_room);
          float out_room[kLine];
          const float* const out_line = load<1>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, out_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float d_out_value = d_out_line[i];
            const float out_value = out_line[i];
            float total_term_value;
            backward_row_stage_1(d_out_value, out_value, total_term_value);
            total_term_line[i] = total_term_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index above_axis_3 = divide(row, sizes.axis_3);
        const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
        const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
        const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
        const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
        const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
        const Index outer = above_axis_1;
        const float total_value = total_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float d_out_room[kLine];
          const float* const d_out_line = load<1>(d_out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_out_room);
          float out_room[kLine];
          const float* const out_line = load<1>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, out_room);
          float d_x_room[kLine];
          float* const d_x_line = target<1>(d_x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float d_out_value = d_out_line[i];
            const float out_value = out_line[i];
            float d_x_value;
            backward_row_values(d_out_value, out_value, total_value, d_x_value);
            d_x_line[i] = d_x_value;
          }
          store<1>(d_x_line, width,
              d_x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner);
        }
        {
          const Index above_axis_3 = divide(row, sizes.axis_3);
          const Index axis_3 = row - above_axis_3 * sizes.axis_3.value;
          const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
          const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
          const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
          const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
          const Index outer = above_axis_1;
          const float total_value = total_of_rows[row - top];
          float total_scratch_value;
          backward_row_row_values(total_value, total_scratch_value);
          total_scratch[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3] = narrow<float>(total_scratch_value);
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_outer_values(const float out, const float d_out,
    const float total, float& total_2_term) {
  // backward, down to add(mask)
  // backward, down to add(bias)
  total_2_term = out * (d_out + -total);
}

static void backward_outer(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ out,
    const float* __restrict__ total, Sum* __restrict__ total_2_partials, const BackwardSizes sizes,
    int threads) {
  const Index kept = sizes.axis_2.value * sizes.axis_3.value, rows = sizes.outer.value * sizes.axis_1.value,
      columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index above_axis_3 = divide(kept_index, sizes.axis_3);
    const Index axis_3 = kept_index - above_axis_3 * sizes.axis_3.value;
    const Index axis_2 = above_axis_3;
    SumLanes<kBeside> total_2_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index above_axis_1 = divide(row, sizes.axis_1);
      const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_out_room);
        float out_room[kLine];
        const float* const out_line = load<1>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, out_room);
        const float total_value = widen(total[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3]);
        float total_2_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float out_value = out_line[i];
          const float d_out_value = d_out_line[i];
          float total_2_term_value;
          backward_outer_values(out_value, d_out_value, total_value, total_2_term_value);
          total_2_term_line[i] = total_2_term_value;
        }
        total_2_lanes.add(total_2_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_2_partials[block * columns + begin + i] = total_2_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total_2,
    float& d_bias) {
  d_bias = total_2;
}

static void backward_finalise(bfloat16* __restrict__ d_bias, const Sum* __restrict__ total_2_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_bias, sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value);
  const Index columns = sizes.inner.value,
      results = sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_2_sums[kResults];
    merge_slots(total_2_sums, total_2_partials, first, width, columns, slots);
    float total_2_line[kResults];
    for (Index i = 0; i < width; ++i) total_2_line[i] = static_cast<float>(total_2_sums[i].sum());
    pad(total_2_line, width);
    const Index above_inner = divide(first, sizes.inner);
    const Index inner = first - above_inner * sizes.inner.value;
    const Index above_axis_3 = divide(above_inner, sizes.axis_3);
    const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
    const Index axis_2 = above_axis_3;
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + ((axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_bias_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_2_value = total_2_line[i];
      float d_bias_value;
      backward_finalise_values(total_2_value, d_bias_value);
      d_bias_line[i] = d_bias_value;
    }
    store<1>(d_bias_line, width,
        d_bias + ((axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner);
  }
}

static inline __attribute__((always_inline)) void backward_outer_2_values(const float out, const float d_out,
    const float total, float& total_3_term) {
  // backward, down to add(mask)
  // backward, down to add(bias)
  total_3_term = out * (d_out + -total);
}

static void backward_outer_2(const bfloat16* __restrict__ d_out, const bfloat16* __restrict__ out,
    const float* __restrict__ total, Sum* __restrict__ total_3_partials, const BackwardSizes sizes,
    int threads) {
  const Index kept = sizes.axis_1.value * sizes.axis_3.value, rows = sizes.outer.value * sizes.axis_2.value,
      columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    const Index above_axis_3 = divide(kept_index, sizes.axis_3);
    const Index axis_3 = kept_index - above_axis_3 * sizes.axis_3.value;
    const Index axis_1 = above_axis_3;
    SumLanes<kBeside> total_3_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index outer = above_axis_2;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float d_out_room[kLine];
        const float* const d_out_line = load<1>(d_out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_out_room);
        float out_room[kLine];
        const float* const out_line = load<1>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, out_room);
        const float total_value = widen(total[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3]);
        float total_3_term_line[kLine];
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const float out_value = out_line[i];
          const float d_out_value = d_out_line[i];
          float total_3_term_value;
          backward_outer_2_values(out_value, d_out_value, total_value, total_3_term_value);
          total_3_term_line[i] = total_3_term_value;
        }
        total_3_lanes.add(total_3_term_line, width, first - begin);
      }
    }
    for (Index i = 0; i < end - begin; ++i) total_3_partials[block * columns + begin + i] = total_3_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void backward_finalise_2_values(const float total_3,
    float& d_mask) {
  d_mask = total_3;
}

static void backward_finalise_2(bfloat16* __restrict__ d_mask, const Sum* __restrict__ total_3_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_mask, sizes.axis_1.value * sizes.axis_3.value * sizes.inner.value);
  const Index columns = sizes.inner.value,
      results = sizes.axis_1.value * sizes.axis_3.value * sizes.inner.value;
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
    const Index above_axis_3 = divide(above_inner, sizes.axis_3);
    const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
    const Index axis_1 = above_axis_3;
    float d_mask_room[kLine];
    float* const d_mask_line = target<1>(d_mask + ((axis_1) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, width, d_mask_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_3_value = total_3_line[i];
      float d_mask_value;
      backward_finalise_2_values(total_3_value, d_mask_value);
      d_mask_line[i] = d_mask_value;
    }
    store<1>(d_mask_line, width,
        d_mask + ((axis_1) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner);
  }
}

}  // namespace

// a: x, bias, mask, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const mask = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  if (is_measuring) return scratch.used;
  forward_row(x, bias, mask, out, sizes, threads);
  return 0;
}

// a: out, d_out, d_x, d_bias, d_mask, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const out = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[2]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[3]);
  auto* const d_mask = reinterpret_cast<bfloat16*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  const Index total_2_partials_slots = slots_of(sizes.outer.value * sizes.axis_1.value, sizes.inner.value,
      sizes.axis_2.value * sizes.axis_3.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  const Index total_3_partials_slots = slots_of(sizes.outer.value * sizes.axis_2.value, sizes.inner.value,
      sizes.axis_1.value * sizes.axis_3.value * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value));
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_3_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(d_out, out, d_x, total_scratch, sizes, threads);
  backward_outer(d_out, out, total_scratch, total_2_partials, sizes, threads);
  backward_finalise(d_bias, total_2_partials, sizes, total_2_partials_slots, threads);
  backward_outer_2(d_out, out, total_scratch, total_3_partials, sizes, threads);
  backward_finalise_2(d_mask, total_3_partials, sizes, total_3_partials_slots, threads);
  return 0;
}
