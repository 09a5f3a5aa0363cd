// fusegen 0.1.0   chain 2791517321c3   signature forward: bias float32, out float32, weight float32, x float32; 64-bit offsets
//   batch_norm(training=True, weight=weight, bias=bias) | gelu | avg_pool2d(2)
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
  template <typename Value>
  void add(Index i, Value value, int = 0) {
    total[i] += value;
  }
  Total sum(Index i) const { return total[i]; }
  Sum at(Index i) const { return {total[i]}; }
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

// Moments for each of so many places. Some lines together are taken as distances from the first of them.
template <typename Value, Index places>
struct MomentsLanes {
  double count = 0, centre[places], distances[places];
  int together = 0;
  Value about[places], drift[places], squares[places];
  explicit MomentsLanes(Index width) {
    std::fill(centre, centre + padded(width), 0.0);
    std::fill(distances, distances + padded(width), 0.0);
  }
  void add(const Value* line, Index width, Index at = 0) {
    if (together == 0) {
      std::copy(line, line + padded(width), about + at);
      std::fill(drift + at, drift + at + padded(width), Value());
      std::fill(squares + at, squares + at + padded(width), Value());
      return;
    }
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const Value distance = line[i] - about[at + i];
      drift[at + i] += distance;
      squares[at + i] += distance * distance;
    }
  }
  void next(Index width) {
    if (++together == 16) finish(width);
  }
  // Merges the last lines with those before.
  void finish(Index width) {
    if (together == 0) return;
    const double n = together, all = count + n, share = n / all;
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const double mean_drift = drift[i] / n, gap = about[i] + mean_drift - centre[i];
      distances[i] += squares[i] - drift[i] * mean_drift + gap * gap * count * share;
      centre[i] += gap * share;
    }
    count = all;
    together = 0;
  }
  void add(Index i, Value value) {
    const Value distance = together == 0 ? Value() : value - about[i];
    about[i] = together == 0 ? value : about[i];
    drift[i] = together == 0 ? Value() : drift[i] + distance;
    squares[i] = together == 0 ? Value() : squares[i] + distance * distance;
  }
  void add(Index i, Value value, int position) {
    const double gap = value - centre[i];
    count = position + 1;
    centre[i] += gap / count;
    distances[i] += gap * (value - centre[i]);
  }
  double mean(Index i) const { return centre[i]; }
  double variance(Index i) const { return distances[i] / count; }
  Moments<Value> at(Index i) const { return {count, centre[i], distances[i]}; }
};

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled;
};

static void forward_outer(const float* __restrict__ x, Moments<float>* __restrict__ mean_partials,
    const ForwardSizes sizes, int threads) {
  const Index kept = 1,
      rows = sizes.outer.value * (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value),
      columns = sizes.inner.value;
  const Index sides = (columns + kBeside - 1) / kBeside, slots = slots_of(rows, columns, kept * sides);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots * sides; ++task) {
    const Index block = task / sides, begin = task % sides * kBeside, end = std::min(columns,
        begin + kBeside);
    const Index kept_index = block / slots, slot = block % slots;
    MomentsLanes<float, kBeside> mean_lanes(end - begin);
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index above_axis_1 = row / (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value);
      const Index axis_1 = row - above_axis_1 * (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value);
      const Index outer = above_axis_1;
      for (Index first = begin; first < end; first += kLine) {
        const Index width = std::min(kLine, end - first);
        const Index inner = first;
        float x_room[kLine];
        const float* const x_line = load<1>(x + ((outer) * (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value) + axis_1) * sizes.inner.value + inner, width, x_room);
        mean_lanes.add(x_line, width, first - begin);
      }
      mean_lanes.next(end - begin);
    }
    mean_lanes.finish(end - begin);
    for (Index i = 0; i < end - begin; ++i) mean_partials[block * columns + begin + i] = mean_lanes.at(i);
  }
}

static inline __attribute__((always_inline)) void forward_finalise_values(const float mean,
    const float variance, float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

static void forward_finalise(float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments<float>* __restrict__ mean_partials, const ForwardSizes sizes, Index slots, int threads) {
  expect(mean_scratch, sizes.inner.value);
  expect(variance_scratch, sizes.inner.value);
  const Index columns = sizes.inner.value, results = sizes.inner.value;
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
    const Index inner = first;
    float mean_scratch_room[kLine];
    float* const mean_scratch_line = target<1>(mean_scratch + inner, width, mean_scratch_room);
    float variance_scratch_room[kLine];
    float* const variance_scratch_line = target<1>(variance_scratch + inner, width, variance_scratch_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float mean_value = mean_line[i];
      const float variance_value = variance_line[i];
      float mean_scratch_value;
      float variance_scratch_value;
      forward_finalise_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
      mean_scratch_line[i] = mean_scratch_value;
      variance_scratch_line[i] = variance_scratch_value;
    }
    store<1>(mean_scratch_line, width, mean_scratch + inner);
    store<1>(variance_scratch_line, width, variance_scratch + inner);
  }
}

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, const float mean,
    const float variance, const float weight, const float bias, float& total_term) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float after_batch_norm = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
  // gelu
  total_term = after_batch_norm * 0.5f * (1.0f + erf_of(after_batch_norm * 0.707106769f));
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float total, float& out) {
  // avg_pool2d(2)
  out = total * 0.25f;
}

static void forward_window(const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ out, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value);
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
      for (int position_value = 0; position_value < 4; ++position_value) {
        const Index above_window_2 = position_value / 2;
        const Index window_2 = position_value - above_window_2 * 2;
        const Index window_1 = above_window_2;
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          x_rooms[position_value][place + i] = widen(x[(((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          mean_line[place + i] = widen(mean[inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          variance_line[place + i] = widen(variance[inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          weight_line[place + i] = widen(weight[inner]);
        }
      }
      {
        for (Index i = 0; i < piece; ++i) {
          const Index inner = (first + i);
          bias_line[place + i] = widen(bias[inner]);
        }
      }
    }
    for (auto& line : x_rooms) pad(line, width);
    pad(mean_line, width);
    pad(variance_line, width);
    pad(weight_line, width);
    pad(bias_line, width);
    SumLanes<kLine> total_lanes(width);
    for (int position_value = 0; position_value < 4; ++position_value) {
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float x_value = x_rooms[position_value][i];
        const float mean_value = mean_line[i];
        const float variance_value = variance_line[i];
        const float weight_value = weight_line[i];
        const float bias_value = bias_line[i];
        float total_term_value;
        forward_window_stage_1(x_value, mean_value, variance_value, weight_value, bias_value,
            total_term_value);
        total_lanes.add(i, total_term_value, position_value);
      }
    }
    float total_line[kLine];
    for (Index i = 0; i < padded(width); ++i) total_line[i] = static_cast<float>(total_lanes.sum(i));
    float out_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float out_value;
      forward_window_row_values(total_value, out_value);
      out_line[i] = out_value;
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
    }
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]} };
  const int threads = static_cast<int>(a[11]);
  const Index mean_partials_slots = slots_of(sizes.outer.value * (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value), sizes.inner.value, 1 * ((sizes.inner.value + kBeside - 1) / kBeside))
;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  forward_outer(x, mean_partials, sizes, threads);
  forward_finalise(mean_scratch, variance_scratch, mean_partials, sizes, mean_partials_slots, threads);
  forward_window(x, mean_scratch, variance_scratch, weight, bias, out, sizes, threads);
  return 0;
}
