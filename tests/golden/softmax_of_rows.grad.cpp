// fusegen 0.1.0   chain 4bc0549bb524   signature forward+backward: d_out float32, d_weight float32, d_x float32, out float32, saved_bound float32, saved_sum float32, weight float32, x float32; 64-bit offsets
//   softmax(-1) | mul(weight)
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
    float& total_term, float& carried) {
  total_term = exp_of(x - peak);
  carried = total_term;
}

static inline __attribute__((always_inline)) void forward_row_values(const float carried, const float total,
    const float weight, float& out) {
  // softmax(-1)
  const float after_softmax = carried / total;
  // mul(weight)
  out = after_softmax * weight;
}

static inline __attribute__((always_inline)) void forward_row_row_values(const float peak, const float total,
    float& saved_bound, float& saved_sum) {
  saved_bound = peak;
  saved_sum = total;
}

static void forward_row(const float* __restrict__ x, const float* __restrict__ weight,
    float* __restrict__ out, float* __restrict__ saved_bound, float* __restrict__ saved_sum,
    const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.inner.value);
  expect(saved_bound, sizes.outer.value);
  expect(saved_sum, sizes.outer.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
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
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const Index place = (row - top) * padded(length);
        const float peak_value = peak_of_rows[row - top];
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float* const carried_line = carried_rows.at + place + first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            float total_term_value;
            float carried_value;
            forward_row_stage_2(x_value, peak_value, total_term_value, carried_value);
            total_term_line[i] = total_term_value;
            carried_line[i] = carried_value;
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
          float* const carried_line = carried_rows.at + place + first;
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + inner, width, weight_room);
          float out_room[kLine];
          float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float carried_value = carried_line[i];
            const float weight_value = weight_line[i];
            float out_value;
            forward_row_values(carried_value, total_value, weight_value, out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
        }
        {
          const Index outer = row;
          const float peak_value = peak_of_rows[row - top];
          const float total_value = total_of_rows[row - top];
          float saved_bound_value;
          float saved_sum_value;
          forward_row_row_values(peak_value, total_value, saved_bound_value, saved_sum_value);
          saved_bound[outer] = narrow<float>(saved_bound_value);
          saved_sum[outer] = narrow<float>(saved_sum_value);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float x,
    const float saved_bound, const float d_out, const float weight, const float saved_sum,
    float& total_2_term, float& carried, float& total_term) {
  // softmax(-1)
  const float exponential = exp_of(x - saved_bound);
  const float after_softmax = exponential / saved_sum;
  // backward, down to softmax(-1)
  const float d_after_softmax = d_out * weight;
  total_2_term = exponential * d_after_softmax;
  carried = exponential;
  total_term = d_out * after_softmax;
}

static inline __attribute__((always_inline)) void backward_row_values(const float d_out, const float weight,
    const float saved_sum, const float total_2, const float carried, float& d_x) {
  // backward, down to softmax(-1)
  const float d_after_softmax = d_out * weight;
  d_x = (d_after_softmax / saved_sum - total_2 / saved_sum / saved_sum) * carried;
}

static void backward_row(const float* __restrict__ x, const float* __restrict__ saved_bound,
    const float* __restrict__ d_out, const float* __restrict__ weight, const float* __restrict__ saved_sum,
    float* __restrict__ d_x, Sum* __restrict__ total_partials, const BackwardSizes sizes, int threads) {
  expect(d_x, sizes.outer.value * sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index kept = 1, each = rows / kept, slots = slots_of_rows(each, kept), tasks = kept * slots;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
    const Values<float> carried_rows(together * padded(length));
    const Values<float> total_block(length);
    std::fill(total_block.at, total_block.at + length, float());
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index kept_index = task / slots, slot = task % slots, begin = kept_index * each;
      Sum* const total_columns = total_partials + (slot * kept + kept_index) * length;
      std::fill(total_columns, total_columns + length, Sum());
      const Index last = begin + each * (slot + 1) / slots;
      for (Index top = begin + each * slot / slots, unmerged = 0; top < last; top += together) {
        const Index bottom = std::min(last, top + together);
        float total_2_of_rows[kTogether];
        for (Index row = top; row < bottom; ++row) {
          const Index outer = row;
          const Index place = (row - top) * padded(length);
          Sum total_2_sum;
          for (Index first = 0; first < length; first += kLine) {
            const Index width = std::min(kLine, length - first);
            const Index inner = first;
            float* const carried_line = carried_rows.at + place + first;
            float x_room[kLine];
            const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
            const float saved_bound_value = widen(saved_bound[outer]);
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
                d_out_room);
            float weight_room[kLine];
            const float* const weight_line = load<1>(weight + inner, width, weight_room);
            const float saved_sum_value = widen(saved_sum[outer]);
            float total_2_term_line[kLine];
            float total_term_line[kLine];
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float x_value = x_line[i];
              const float d_out_value = d_out_line[i];
              const float weight_value = weight_line[i];
              float total_2_term_value;
              float carried_value;
              float total_term_value;
              backward_row_stage_1(x_value, saved_bound_value, d_out_value, weight_value, saved_sum_value,
                  total_2_term_value, carried_value, total_term_value);
              total_2_term_line[i] = total_2_term_value;
              carried_line[i] = carried_value;
              total_term_line[i] = total_term_value;
            }
            total_2_sum.add(total_2_term_line, width);
            add_to_columns(total_block.at + first, total_term_line, width);
          }
          total_2_of_rows[row - top] = static_cast<float>(total_2_sum.sum());
        }
        for (Index row = top; row < bottom; ++row) {
          const Index outer = row;
          const Index place = (row - top) * padded(length);
          const float total_2_value = total_2_of_rows[row - top];
          for (Index first = 0; first < length; first += kLine) {
            const Index width = std::min(kLine, length - first);
            const Index inner = first;
            float* const carried_line = carried_rows.at + place + first;
            float d_out_room[kLine];
            const float* const d_out_line = load<1>(d_out + (outer) * sizes.inner.value + inner, width,
                d_out_room);
            float weight_room[kLine];
            const float* const weight_line = load<1>(weight + inner, width, weight_room);
            const float saved_sum_value = widen(saved_sum[outer]);
            float d_x_room[kLine];
            float* const d_x_line = target<1>(d_x + (outer) * sizes.inner.value + inner, width, d_x_room);
#pragma omp simd
            for (Index i = 0; i < padded(width); ++i) {
              const float d_out_value = d_out_line[i];
              const float weight_value = weight_line[i];
              const float carried_value = carried_line[i];
              float d_x_value;
              backward_row_values(d_out_value, weight_value, saved_sum_value, total_2_value, carried_value,
                  d_x_value);
              d_x_line[i] = d_x_value;
            }
            store<1>(d_x_line, width, d_x + (outer) * sizes.inner.value + inner);
          }
        }
        unmerged += bottom - top;
        if (unmerged < kUnmerged && bottom < last) continue;
        merge_columns(total_columns, total_block.at, length);
        unmerged = 0;
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    float& d_weight) {
  d_weight = total;
}

static void backward_finalise(float* __restrict__ d_weight, const Sum* __restrict__ total_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.inner.value);
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
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + inner, width, d_weight_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float d_weight_value;
      backward_finalise_values(total_value, d_weight_value);
      d_weight_line[i] = d_weight_value;
    }
    store<1>(d_weight_line, width, d_weight + inner);
  }
}

}  // namespace

// a: x, weight, out, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, out, saved_bound, saved_sum, sizes, threads);
  return 0;
}

// a: x, weight, saved_bound, saved_sum, d_out, d_x, d_weight, scratch (-1: return the bytes it needs), outer, inner, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[3]);
  auto* const d_out = reinterpret_cast<const float*>(a[4]);
  auto* const d_x = reinterpret_cast<float*>(a[5]);
  auto* const d_weight = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ {a[8]}, {a[9]} };
  const int threads = static_cast<int>(a[10]);
  const Index total_partials_slots = slots_of_rows(sizes.outer.value, 1)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_row(x, saved_bound, d_out, weight, saved_sum, d_x, total_partials, sizes, threads);
  backward_finalise(d_weight, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
