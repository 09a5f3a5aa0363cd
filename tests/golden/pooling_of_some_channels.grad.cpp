// fusegen 0.1.0   chain 9d652eae45ab   signature forward+backward: d_out float32, d_scale float32, d_x float32, out float32, picked_x float32, scale float32, winner_index uint8, x float32 with gaps; 64-bit offsets
//   mul_channel(scale) | max_pool2d(2)
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

// Elements that lie one after the other, a run, with a gap behind it.
struct Pitch {
  Size run;
  Index gap;
};

// A tensor of such runs in the guise of a pointer to one without gaps. No pack that begins at a multiple of its size crosses
// the end of a run.
template <typename T>
struct Pitched {
  T* from;
  Pitch pitch;
  Index at = 0;
  template <typename Offset>
  inline Pitched operator+(Offset offset) const {
    return {from, pitch, at + static_cast<Index>(offset)};
  }
  inline T* here() const { return from + (at + divide(at, pitch.run) * pitch.gap); }
  template <typename Offset>
  inline T& operator[](Offset offset) const {
    return *(*this + offset).here();
  }
};

// How many elements there are to the end of a run.
template <typename T>
inline Index left_of(Pitched<T> tensor) {
  return tensor.pitch.run.value - tensor.at % tensor.pitch.run.value;
}

template <Index stride, typename T, typename Value>
inline const Value* load(Pitched<T> from, Index width, Value* room) {
  if ((width - 1) * stride < left_of(from)) return load<stride>(from.here(), width, room);
  for (Index i = 0; i < width;) {
    const Pitched<T> piece = from + i * stride;
    const Index count = std::min(width - i, (left_of(piece) + stride - 1) / stride);
    const T* const here = piece.here();
#pragma omp simd
    for (Index j = 0; j < count; ++j) room[i + j] = static_cast<Value>(widen(here[j * stride]));
    i += count;
  }
  pad(room, width);
  return room;
}

template <Index size, typename T, typename Value, Index side>
inline void split(Pitched<T> from, Index count, Value (*rooms)[side], Index place) {
  if (count * size <= left_of(from)) return split<size>(from.here(), count, rooms, place);
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < size; ++j) rooms[j][place + i] = static_cast<Value>(widen(from[i * size + j]));
  }
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
  Pitch x_pitch;
};

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, const float scale,
    float& peak_term) {
  // mul_channel(scale)
  peak_term = x * scale;
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

static void forward_window(const float* __restrict__ x_memory, const float* __restrict__ scale,
    float* __restrict__ out, float* __restrict__ picked_x, uint8_t* __restrict__ winner_index,
    const ForwardSizes sizes, int threads) {
  const Pitched<const float> x{x_memory, sizes.x_pitch};
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
    float scale_line[kSide];
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
        std::fill(scale_line + place, scale_line + place + piece, widen(scale[axis_1]));
      }
    }
    for (auto& line : x_rooms) pad(line, width);
    pad(scale_line, width);
    float peak_line[kSide];
    int winner_index_2_line[kSide];
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      Maximum<float> peak_sum;
#pragma GCC unroll 4
      for (int position_value = 0; position_value < 4; ++position_value) {
        const float x_value = x_rooms[position_value][i];
        const float scale_value = scale_line[i];
        float peak_term_value;
        forward_window_stage_1(x_value, scale_value, peak_term_value);
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

static inline __attribute__((always_inline)) void backward_window_values(const int position,
    const int winner_index, const float d_out, const float scale, float& d_x) {
  d_x = position == winner_index ? d_out * scale : 0.0f;
}

static inline __attribute__((always_inline)) void backward_window_row_values(const float d_out,
    const float picked_x, float& total_term) {
  total_term = d_out * picked_x;
}

static void backward_window(const uint8_t* __restrict__ winner_index, const float* __restrict__ d_out,
    const float* __restrict__ scale, const float* __restrict__ picked_x, float* __restrict__ d_x,
    Sum* __restrict__ total_partials, const BackwardSizes sizes, int threads) {
  expect(d_x, sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value * 2 * 2);
  constexpr Index kSide = 512;  // lines that fit the fastest cache
  const Index length = sizes.inner.value, lines = (length + kSide - 1) / kSide;
  const Index together = std::max<Index>(1, kSide / std::max<Index>(1, length));
  const Index rows = sizes.outer.value * sizes.axis_1.value, share = sizes.axis_2.value;
  const Index blocks = (share + together - 1) / together * lines, pieces = pieces_of(share * length);
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * share * length * 4 > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index above = task / pieces, slot = task % pieces, last = (above + 1) * share;
    Sum total_sum;
    for (Index block = blocks * slot / pieces; block < blocks * (slot + 1) / pieces; ++block) {
      const Index top = above * share + block / lines * together, bottom = std::min(last, top + together);
      const Index first = block % lines * kSide, piece = std::min(kSide, length - first);
      const Index width = (bottom - top) * piece;
      int winner_index_line[kSide];
      float d_out_line[kSide];
      float scale_line[kSide];
      float picked_x_line[kSide];
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
            winner_index_line[place + i] = widen(winner_index[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
          }
        }
        {
          for (Index i = 0; i < piece; ++i) {
            const Index inner = (first + i);
            d_out_line[place + i] = widen(d_out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
          }
        }
        {
          std::fill(scale_line + place, scale_line + place + piece, widen(scale[axis_1]));
        }
        {
          for (Index i = 0; i < piece; ++i) {
            const Index inner = (first + i);
            picked_x_line[place + i] = widen(picked_x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]);
          }
        }
      }
      pad(winner_index_line, width);
      pad(d_out_line, width);
      pad(scale_line, width);
      pad(picked_x_line, width);
      float d_x_rooms[4][kSide];
      for (int position_value = 0; position_value < 4; ++position_value) {
#pragma omp simd
        for (Index i = 0; i < padded(width); ++i) {
          const int winner_index_value = winner_index_line[i];
          const float d_out_value = d_out_line[i];
          const float scale_value = scale_line[i];
          float d_x_value;
          backward_window_values(position_value, winner_index_value, d_out_value, scale_value, d_x_value);
          d_x_rooms[position_value][i] = d_x_value;
        }
      }
      float total_term_line[kSide];
#pragma omp simd
      for (Index i = 0; i < padded(width); ++i) {
        const float d_out_value = d_out_line[i];
        const float picked_x_value = picked_x_line[i];
        float total_term_value;
        backward_window_row_values(d_out_value, picked_x_value, total_term_value);
        total_term_line[i] = total_term_value;
      }
      total_sum.add(total_term_line, width);
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
    const Index above_axis_1 = divide(above, sizes.axis_1);
    const Index axis_1 = above - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    total_partials[(axis_1) * (sizes.outer.value * pieces) + (outer) * pieces + slot] = total_sum;
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total,
    float& d_scale) {
  d_scale = total;
}

static void backward_finalise(float* __restrict__ d_scale, const Sum* __restrict__ total_partials,
    const BackwardSizes sizes, Index slots, int threads) {
  expect(d_scale, sizes.axis_1.value);
  const Index columns = 1, results = sizes.axis_1.value;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (results * slots > kSerial)
  for (Index first = 0; first < results; first += kResults) {
    const Index width = std::min(kResults, results - first);
    Sum total_sums[kResults];
    merge_slots(total_sums, total_partials, first, width, columns, slots);
    float total_line[kResults];
    for (Index i = 0; i < width; ++i) total_line[i] = static_cast<float>(total_sums[i].sum());
    pad(total_line, width);
    const Index axis_1 = first;
    float d_scale_room[kLine];
    float* const d_scale_line = target<1>(d_scale + axis_1, width, d_scale_room);
#pragma omp simd
    for (Index i = 0; i < padded(width); ++i) {
      const float total_value = total_line[i];
      float d_scale_value;
      backward_finalise_values(total_value, d_scale_value);
      d_scale_line[i] = d_scale_value;
    }
    store<1>(d_scale_line, width, d_scale + axis_1);
  }
}

}  // namespace

// a: x, scale, out, picked_x, winner_index, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, run and gap of x, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const picked_x = reinterpret_cast<float*>(a[3]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ {a[6]}, {a[7]}, {a[8]}, {a[9]}, {a[10]}, {a[11]}, { {a[12]}, a[13]} };
  const int threads = static_cast<int>(a[14]);
  if (is_measuring) return scratch.used;
  forward_window(x, scale, out, picked_x, winner_index, sizes, threads);
  return 0;
}

// a: scale, picked_x, winner_index, d_out, d_x, d_scale, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const scale = reinterpret_cast<const float*>(a[0]);
  auto* const picked_x = reinterpret_cast<const float*>(a[1]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_scale = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ {a[7]}, {a[8]}, {a[9]}, {a[10]}, {a[11]}, {a[12]} };
  const int threads = static_cast<int>(a[13]);
  const Index total_partials_slots = sizes.outer.value * pieces_of(sizes.axis_2.value * sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_window(winner_index, d_out, scale, picked_x, d_x, total_partials, sizes, threads);
  backward_finalise(d_scale, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
