// fusegen 0.1.0   chain 22a4408a23f3   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, picked_x float32, saved_mean float32, saved_variance float32, weight float32, winner_index uint8, x float32; 64-bit offsets
//   batch_norm(training=True, weight=weight, bias=bias) | relu | max_pool2d(2)
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

// Windows that lie side by side, taken apart: a line for each position in them.
template <Index size, typename Stored, typename Value, Index side>
inline void split(const Stored* from, Index count, Value (*rooms)[side], Index place) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) rooms[j][place + i] = static_cast<Value>(widen(from[i * size + j]));
  }
}

// And put together again.
template <Index size, typename Stored, typename Value, Index side>
inline void join(const Value (*rooms)[side], Index place, Index count, Stored* to) {
#pragma omp simd
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) to[i * size + j] = narrow<Stored>(rooms[j][place + i]);
  }
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

// Count, mean and the sum of squared distances from it; merged by Chan's formula.
template <typename Value>
struct Moments {
  double count = 0, centre = 0, distances = 0;
  void merge(const Moments& other) {
    if (count == 0) *this = other;
    else if (other.count != 0) {
      const double all = count + other.count, gap = other.centre - centre, share = other.count / all;
      centre += gap * share;
      distances += other.distances + gap * gap * count * share;
      count = all;
    }
  }
  // Distances about a first guess of the mean, mended by their own mean.
  void add(const Value* line, Index width) {
    const double n = static_cast<double>(width);
    const Value about = static_cast<Value>(sum_of(line, width) / n);
    Lanes<Value> lanes, all_squares, all_drift;
    for (Index i = 0; i < whole(width); i += 16) {
      lanes.load(line + i);
      lanes.at -= about;
      all_squares.at += lanes.at * lanes.at;
      all_drift.at += lanes.at;
    }
    Value squares = all_squares.sum(), drift = all_drift.sum();
    for (Index i = whole(width); i < width; ++i) {
      const Value distance = line[i] - about;
      squares += distance * distance;
      drift += distance;
    }
    const double mean_drift = drift / n;
    merge({n, about + mean_drift, squares - drift * mean_drift});
  }
  double mean() const { return centre; }
  double variance() const { return distances / count; }
};

// The first maximum and where it stood; a NaN beats every number, as in torch.
template <typename Value>
struct Maximum {
  Value best = -std::numeric_limits<Value>::infinity();
  int position_of_best = 0;
  void add(Value value, int position) {
    const bool beats = value > best || value != value;
    best = beats ? value : best;
    position_of_best = beats ? position : position_of_best;
  }
  Value max() const { return best; }
  int argmax() const { return position_of_best; }
};

// The value at one position.
template <typename Value>
struct Picked {
  Value picked = Value();
  void add(Value value, int wanted, int position) { picked = wanted == position ? value : picked; }
  Value pick() const { return picked; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

static void forward_inner(const float* __restrict__ x, Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value * sizes.axis_1.value,
      length = (sizes.axis_2_unpooled.value * sizes.inner_unpooled.value);
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_axis_1 = divide(row, sizes.axis_1);
    const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Moments<float> mean_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index axis_2 = first;
      float x_room[kLine];
      const float* const x_line = load<1>(x + ((outer) * sizes.axis_1.value + axis_1) * (sizes.axis_2_unpooled.value * sizes.inner_unpooled.value) + axis_2, width, x_room);
      mean_sum.add(x_line, width);
    }
    mean_partials[(axis_1) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = mean_sum;
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float variance, float& saved_mean, float& saved_variance, float& mean_scratch,
    float& variance_scratch) {
  saved_mean = mean;
  saved_variance = variance;
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(float* __restrict__ saved_mean, float* __restrict__ saved_variance,
    float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments<float>* __restrict__ mean_partials, const ForwardSizes sizes, Index slots, int threads) {
  expect(saved_mean, sizes.axis_1.value);
  expect(saved_variance, sizes.axis_1.value);
  expect(mean_scratch, sizes.axis_1.value);
  expect(variance_scratch, sizes.axis_1.value);
  const Index columns = 1, results = sizes.axis_1.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Moments<float> mean_sums[kResults];
    merge_slots(mean_sums, mean_partials, first, width, columns, slots);
    float mean_line[kResults];
    for (Index i = 0; i < width; ++i) mean_line[i] = static_cast<float>(mean_sums[i].mean());
    float variance_line[kResults];
    for (Index i = 0; i < width; ++i) variance_line[i] = static_cast<float>(mean_sums[i].variance());
    pad(mean_line, width);
    pad(variance_line, width);
    const Index axis_1 = first;
    float saved_mean_room[kLine];
    float* const saved_mean_line = target<1>(saved_mean + axis_1, width, saved_mean_room);
    float saved_variance_room[kLine];
    float* const saved_variance_line = target<1>(saved_variance + axis_1, width, saved_variance_room);
    float mean_scratch_room[kLine];
    float* const mean_scratch_line = target<1>(mean_scratch + axis_1, width, mean_scratch_room);
    float variance_scratch_room[kLine];
    float* const variance_scratch_line = target<1>(variance_scratch + axis_1, width, variance_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float mean_value = mean_line[i];
      const float variance_value = variance_line[i];
      float saved_mean_value;
      float saved_variance_value;
      float mean_scratch_value;
      float variance_scratch_value;
      forward_finalise_values(mean_value, variance_value, saved_mean_value, saved_variance_value,
          mean_scratch_value, variance_scratch_value);
      saved_mean_line[i] = saved_mean_value;
      saved_variance_line[i] = saved_variance_value;
      mean_scratch_line[i] = mean_scratch_value;
      variance_scratch_line[i] = variance_scratch_value;
    }
    store<1>(saved_mean_line, width, saved_mean + axis_1);
    store<1>(saved_variance_line, width, saved_variance + axis_1);
    store<1>(mean_scratch_line, width, mean_scratch + axis_1);
    store<1>(variance_scratch_line, width, variance_scratch + axis_1);
  }
}

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, const float mean,
    const float variance, const float weight, const float bias, float& peak_term) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float after_batch_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // relu
  peak_term = after_batch_norm <= 0.0f ? 0.0f : after_batch_norm;
}

static inline __attribute__((always_inline)) void forward_window_stage_2(const float x,
    const int winner_index_2, float& picked_x_2_term, int& picked_x_2_term_at) {
  picked_x_2_term = x;
  picked_x_2_term_at = winner_index_2;
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float peak,
    const float picked_x_2, const int winner_index_2, float& out, float& picked_x, int& winner_index) {
  out = peak;
  picked_x = picked_x_2;
  winner_index = winner_index_2;
}

static void forward_window(const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ out, float* __restrict__ picked_x, uint8_t* __restrict__ winner_index,
    const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(picked_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  expect(winner_index, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
  constexpr Index kSide = 512;  // lines that fit the fastest cache
  const Index length = sizes.inner.value, lines = (length + kSide - 1) / kSide;
  const Index together = std::max<Index>(1, kSide / std::max<Index>(1, length));
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length * 4 > kSerial)
  for (Index task = 0; task < (rows + together - 1) / together * lines; ++task) {
    const Index top = task / lines * together, bottom = std::min(rows, top + together);
    const Index first = task % lines * kSide, piece = std::min(kSide, length - first);
    const Index width = (bottom - top) * piece;
    float x_rooms[4][kSide];
    float mean_line[kSide];
    float variance_line[kSide];
    float weight_line[kSide];
    float bias_line[kSide];
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (int position_value = 0; position_value < 4; position_value += 2) {
        const Index above_window_2 = position_value / 2;
        const Index window_2 = position_value - above_window_2 * 2;
        const Index window_1 = above_window_2;
        const Index inner = first;
        split<2>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), piece, x_rooms + position_value, place);
      }
      {
        std::fill(mean_line + place, mean_line + place + piece, widen(mean[axis_1]));
      }
      {
        std::fill(variance_line + place, variance_line + place + piece, widen(variance[axis_1]));
      }
      {
        std::fill(weight_line + place, weight_line + place + piece, widen(weight[axis_1]));
      }
      {
        std::fill(bias_line + place, bias_line + place + piece, widen(bias[axis_1]));
      }
    }
    for (auto& line : x_rooms) pad(line, width);
    pad(mean_line, width);
    pad(variance_line, width);
    pad(weight_line, width);
    pad(bias_line, width);
    float peak_line[kSide];
    int winner_index_2_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      Maximum<float> peak_sum;
#pragma GCC unroll 4
      for (int position_value = 0; position_value < 4; ++position_value) {
        const float x_value = x_rooms[position_value][i];
        const float mean_value = mean_line[i];
        const float variance_value = variance_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float peak_term_value;
        forward_window_stage_1(x_value, mean_value, variance_value, weight_value, bias_value,
            peak_term_value);
        peak_sum.add(peak_term_value, position_value);
      }
      peak_line[i] = static_cast<float>(peak_sum.max());
      winner_index_2_line[i] = static_cast<int>(peak_sum.argmax());
    }
    float picked_x_2_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      Picked<float> picked_x_2_sum;
#pragma GCC unroll 4
      for (int position_value = 0; position_value < 4; ++position_value) {
        const float x_value = x_rooms[position_value][i];
        const int winner_index_2_value = winner_index_2_line[i];
        float picked_x_2_term_value;
        int picked_x_2_term_at_value;
        forward_window_stage_2(x_value, winner_index_2_value, picked_x_2_term_value,
            picked_x_2_term_at_value);
        picked_x_2_sum.add(picked_x_2_term_value, picked_x_2_term_at_value, position_value);
      }
      picked_x_2_line[i] = static_cast<float>(picked_x_2_sum.pick());
    }
    float out_line[kSide];
    float picked_x_line[kSide];
    int winner_index_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float peak_value = peak_line[i];
      const float picked_x_2_value = picked_x_2_line[i];
      const int winner_index_2_value = winner_index_2_line[i];
      float out_value;
      float picked_x_value;
      int winner_index_value;
      forward_window_row_values(peak_value, picked_x_2_value, winner_index_2_value, out_value,
          picked_x_value, winner_index_value);
      out_line[i] = out_value;
      picked_x_line[i] = picked_x_value;
      winner_index_line[i] = winner_index_value;
    }
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(out_line[place + i]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          picked_x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(picked_x_line[place + i]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          winner_index[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<uint8_t>(winner_index_line[place + i]);
        }
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void backward_inner_values(const float picked_x,
    const float saved_mean, const float saved_variance, const float weight, const float bias,
    const float d_out, float& total_term, float& total_2_term) {
  const float difference = picked_x - saved_mean;
  const float sum = difference * (1.0f / sqrtf(saved_variance + 1e-05f)) * weight + bias;
  total_term = (sum <= 0.0f ? 0.0f : d_out) * difference;
  total_2_term = sum <= 0.0f ? 0.0f : d_out;
}

static void backward_inner(const float* __restrict__ picked_x, const float* __restrict__ saved_mean,
    const float* __restrict__ saved_variance, const float* __restrict__ weight,
    const float* __restrict__ bias, const float* __restrict__ d_out, Sum* __restrict__ total_partials,
    Sum* __restrict__ total_2_partials, const BackwardSizes sizes, int threads) {
  const Index rows = sizes.outer.value * sizes.axis_1.value,
      length = (sizes.axis_2.value * sizes.inner.value);
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index end = std::min(length, (piece + 1) * kPiece);
    const Index above_axis_1 = divide(row, sizes.axis_1);
    const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Sum total_sum;
    Sum total_2_sum;
    for (Index first = piece * kPiece; first < end; first += kLine) {
      const Index width = std::min(kLine, end - first);
      const Index axis_2 = first;
      float picked_x_room[kLine];
      const float* const picked_x_line = load<1>(picked_x + ((outer) * sizes.axis_1.value + axis_1) * (sizes.axis_2.value * sizes.inner.value) + axis_2, width, picked_x_room);
      const float saved_mean_value = widen(saved_mean[axis_1]);
      const float saved_variance_value = widen(saved_variance[axis_1]);
      const float weight_value = widen(weight[axis_1]);
      const float bias_value = widen(bias[axis_1]);
      float d_out_room[kLine];
      const float* const d_out_line = load<1>(d_out + ((outer) * sizes.axis_1.value + axis_1) * (sizes.axis_2.value * sizes.inner.value) + axis_2, width, d_out_room);
      float total_term_line[kLine];
      float total_2_term_line[kLine];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float picked_x_value = picked_x_line[i];
        const float d_out_value = d_out_line[i];
        float total_term_value;
        float total_2_term_value;
        backward_inner_values(picked_x_value, saved_mean_value, saved_variance_value, weight_value,
            bias_value, d_out_value, total_term_value, total_2_term_value);
        total_term_line[i] = total_term_value;
        total_2_term_line[i] = total_2_term_value;
      }
      total_sum.add(total_term_line, width);
      total_2_sum.add(total_2_term_line, width);
    }
    total_partials[(axis_1) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_sum;
    total_2_partials[(axis_1) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_2_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    const float saved_variance, const float total_2, float& d_weight, float& d_bias, float& total_scratch,
    float& total_2_scratch) {
  d_weight = total * (1.0f / sqrtf(saved_variance + 1e-05f));
  d_bias = total_2;
  total_scratch = total;
  total_2_scratch = total_2;
}

static void backward_finalise(const float* __restrict__ saved_variance, float* __restrict__ d_weight,
    float* __restrict__ d_bias, float* __restrict__ total_scratch, float* __restrict__ total_2_scratch,
    const Sum* __restrict__ total_partials, const Sum* __restrict__ total_2_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_weight, sizes.axis_1.value);
  expect(d_bias, sizes.axis_1.value);
  expect(total_scratch, sizes.axis_1.value);
  expect(total_2_scratch, sizes.axis_1.value);
  const Index columns = 1, results = sizes.axis_1.value;
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
    const Index axis_1 = first;
    float saved_variance_room[kLine];
    const float* const saved_variance_line = load<1>(saved_variance + axis_1, width, saved_variance_room);
    float d_weight_room[kLine];
    float* const d_weight_line = target<1>(d_weight + axis_1, width, d_weight_room);
    float d_bias_room[kLine];
    float* const d_bias_line = target<1>(d_bias + axis_1, width, d_bias_room);
    float total_scratch_room[kLine];
    float* const total_scratch_line = target<1>(total_scratch + axis_1, width, total_scratch_room);
    float total_2_scratch_room[kLine];
    float* const total_2_scratch_line = target<1>(total_2_scratch + axis_1, width, total_2_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      const float saved_variance_value = saved_variance_line[i];
      const float total_2_value = total_2_line[i];
      float d_weight_value;
      float d_bias_value;
      float total_scratch_value;
      float total_2_scratch_value;
      backward_finalise_values(total_value, saved_variance_value, total_2_value, d_weight_value,
          d_bias_value, total_scratch_value, total_2_scratch_value);
      d_weight_line[i] = d_weight_value;
      d_bias_line[i] = d_bias_value;
      total_scratch_line[i] = total_scratch_value;
      total_2_scratch_line[i] = total_2_scratch_value;
    }
    store<1>(d_weight_line, width, d_weight + axis_1);
    store<1>(d_bias_line, width, d_bias + axis_1);
    store<1>(total_scratch_line, width, total_scratch + axis_1);
    store<1>(total_2_scratch_line, width, total_2_scratch + axis_1);
  }
}

static inline __attribute__((always_inline)) void backward_window_values(const float x,
    const float saved_mean, const float total, const float weight, const float saved_variance,
    const float count_of_window_2_window_1_outer_axis_2_inner, const float total_2, const int position,
    const int winner_index, const float picked_x, const float bias, const float d_out, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(saved_variance + 1e-05f);
  const float product = -0.5f * (total * weight * inverse_root) * (inverse_root * inverse_root);
  const float product_2 = (x - saved_mean) * (2.0f * product / count_of_window_2_window_1_outer_axis_2_inner);
  const float quotient = total_2 * weight * inverse_root / count_of_window_2_window_1_outer_axis_2_inner;
  const float chosen = (picked_x - saved_mean) * inverse_root * weight + bias <= 0.0f ? 0.0f : d_out;
  d_x = product_2 - quotient + (position == winner_index ? chosen * weight * inverse_root : 0.0f);
}

static void backward_window(const float* __restrict__ x, const float* __restrict__ saved_mean,
    const float* __restrict__ total, const float* __restrict__ weight,
    const float* __restrict__ saved_variance, const float* __restrict__ total_2,
    const uint8_t* __restrict__ winner_index, const float* __restrict__ picked_x,
    const float* __restrict__ bias, const float* __restrict__ d_out, float* __restrict__ d_x,
    const BackwardSizes sizes, int threads) {
  const float count_of_window_2_window_1_outer_axis_2_inner_value = static_cast<float>(2 * 2 * sizes.outer.value * sizes.axis_2.value * sizes.inner.value);
  expect(d_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value * 2 * 2);
  constexpr Index kSide = 512;  // lines that fit the fastest cache
  const Index length = sizes.inner.value, lines = (length + kSide - 1) / kSide;
  const Index together = std::max<Index>(1, kSide / std::max<Index>(1, length));
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length * 4 > kSerial)
  for (Index task = 0; task < (rows + together - 1) / together * lines; ++task) {
    const Index top = task / lines * together, bottom = std::min(rows, top + together);
    const Index first = task % lines * kSide, piece = std::min(kSide, length - first);
    const Index width = (bottom - top) * piece;
    float x_rooms[4][kSide];
    float saved_mean_line[kSide];
    float total_line[kSide];
    float weight_line[kSide];
    float saved_variance_line[kSide];
    float total_2_line[kSide];
    int winner_index_line[kSide];
    float picked_x_line[kSide];
    float bias_line[kSide];
    float d_out_line[kSide];
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (int position_value = 0; position_value < 4; position_value += 2) {
        const Index above_window_2 = position_value / 2;
        const Index window_2 = position_value - above_window_2 * 2;
        const Index window_1 = above_window_2;
        const Index inner = first;
        split<2>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), piece, x_rooms + position_value, place);
      }
      {
        std::fill(saved_mean_line + place, saved_mean_line + place + piece, widen(saved_mean[axis_1]));
      }
      {
        std::fill(total_line + place, total_line + place + piece, widen(total[axis_1]));
      }
      {
        std::fill(weight_line + place, weight_line + place + piece, widen(weight[axis_1]));
      }
      {
        std::fill(saved_variance_line + place, saved_variance_line + place + piece,
            widen(saved_variance[axis_1]));
      }
      {
        std::fill(total_2_line + place, total_2_line + place + piece, widen(total_2[axis_1]));
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          winner_index_line[place + i] = widen(winner_index[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          picked_x_line[place + i] = widen(picked_x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
      {
        std::fill(bias_line + place, bias_line + place + piece, widen(bias[axis_1]));
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          d_out_line[place + i] = widen(d_out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
        }
      }
    }
    for (auto& line : x_rooms) pad(line, width);
    pad(saved_mean_line, width);
    pad(total_line, width);
    pad(weight_line, width);
    pad(saved_variance_line, width);
    pad(total_2_line, width);
    pad(winner_index_line, width);
    pad(picked_x_line, width);
    pad(bias_line, width);
    pad(d_out_line, width);
    float d_x_rooms[4][kSide];
    for (int position_value = 0; position_value < 4; ++position_value) {
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_rooms[position_value][i];
        const float saved_mean_value = saved_mean_line[i];
        const float total_value = total_line[i];
        const float weight_value = weight_line[i];
        const float saved_variance_value = saved_variance_line[i];
        const float total_2_value = total_2_line[i];
        const int winner_index_value = winner_index_line[i];
        const float picked_x_value = picked_x_line[i];
        const float bias_value = bias_line[i];
        const float d_out_value = d_out_line[i];
        float d_x_value;
        backward_window_values(x_value, saved_mean_value, total_value, weight_value, saved_variance_value,
            count_of_window_2_window_1_outer_axis_2_inner_value, total_2_value, position_value,
            winner_index_value, picked_x_value, bias_value, d_out_value, d_x_value);
        d_x_rooms[position_value][i] = d_x_value;
      }
    }
    for (Index row = top; row < bottom; ++row) {
      const Index place = (row - top) * piece;
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      for (int position_value = 0; position_value < 4; position_value += 2) {
        const Index above_window_2 = position_value / 2;
        const Index window_2 = position_value - above_window_2 * 2;
        const Index window_1 = above_window_2;
        const Index inner = first;
        join<2>(d_x_rooms + position_value, place, piece,
            d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
      }
    }
  }
}

}  // namespace

// a: x, weight, bias, out, picked_x, winner_index, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const picked_x = reinterpret_cast<float*>(a[4]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[5]);
  auto* const saved_mean = reinterpret_cast<float*>(a[6]);
  auto* const saved_variance = reinterpret_cast<float*>(a[7]);
  const bool is_measuring = a[8] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const ForwardSizes sizes{ {a[9]}, {a[10]}, {a[11]}, {a[12]}, {a[13]}, {a[14]} };
  const int threads = static_cast<int>(a[15]);
  const Index mean_partials_slots = sizes.outer.value * pieces_of((sizes.axis_2_unpooled.value * sizes.inner_unpooled.value))
;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.axis_1.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.axis_1.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.axis_1.value));
  if (is_measuring) return scratch.used;
  forward_inner(x, mean_partials, sizes, threads);
  forward_finalise(saved_mean, saved_variance, mean_scratch, variance_scratch, mean_partials, sizes,
      mean_partials_slots, threads);
  forward_window(x, mean_scratch, variance_scratch, weight, bias, out, picked_x, winner_index, sizes,
      threads);
  return 0;
}

// a: x, weight, bias, picked_x, winner_index, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const picked_x = reinterpret_cast<const float*>(a[3]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[4]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[5]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[6]);
  auto* const d_out = reinterpret_cast<const float*>(a[7]);
  auto* const d_x = reinterpret_cast<float*>(a[8]);
  auto* const d_weight = reinterpret_cast<float*>(a[9]);
  auto* const d_bias = reinterpret_cast<float*>(a[10]);
  const bool is_measuring = a[11] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[11])};
  const BackwardSizes sizes{ {a[12]}, {a[13]}, {a[14]}, {a[15]}, {a[16]}, {a[17]} };
  const int threads = static_cast<int>(a[18]);
  const Index total_partials_slots = sizes.outer.value * pieces_of((sizes.axis_2.value * sizes.inner.value))
;
  const Index total_2_partials_slots = sizes.outer.value * pieces_of((sizes.axis_2.value * sizes.inner.value))
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * total_2_partials_slots);
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.axis_1.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.axis_1.value));
  if (is_measuring) return scratch.used;
  backward_inner(picked_x, saved_mean, saved_variance, weight, bias, d_out, total_partials, total_2_partials,
      sizes, threads);
  backward_finalise(saved_variance, d_weight, d_bias, total_scratch, total_2_scratch, total_partials,
      total_2_partials, sizes, total_partials_slots, threads);
  backward_window(x, saved_mean, total_scratch, weight, saved_variance, total_2_scratch, winner_index,
      picked_x, bias, d_out, d_x, sizes, threads);
  return 0;
}
