// fusegen 0.1.0   chain 224f1c8b1abc   signature forward+backward: d_out float32, d_x float32, out float32, winner_index uint8, x float32; 64-bit offsets
//   max_pool2d(3, 2, 1)
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

// Elements are worked on by lines: up to so many neighbours, widened into arrays, so that conversions,
// arithmetic and sums are a plain loop each. Arithmetic goes on to a whole vector, over copies of the last
// element, so that no short row ends in scalar calls.
constexpr Index kLine = 512;

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

// The first maximum of each window of a line and where it stands; a NaN beats every number, as in torch.
template <typename T>
struct WindowMaximumLanes {
  T best[kLine];
  int at[kLine];
  explicit WindowMaximumLanes(Index width) {
    std::fill(best, best + width, T(0));
    std::fill(at, at + width, -1);
  }
  void add(Index i, T value, int position) {
    const bool beats = (at[i] < 0) | (value > best[i]) | (value != value);
    best[i] = beats ? value : best[i];
    at[i] = beats ? position : at[i];
  }
  T max(Index i) const { return best[i]; }
  int argmax(Index i) const { return at[i]; }
};

// Windows along one axis: window i takes the elements begin(i) + j * kDilation, j < kSize, as far as there are any.
template <int kSize, int kStride, int kPadding, int kDilation>
struct Slide {
  int elements, windows;
  inline int begin(Index window) const { return static_cast<int>(window) * kStride - kPadding; }
  inline int at(Index window,
      Index position) const { return begin(window) + static_cast<int>(position) * kDilation; }
  inline bool has(Index window, Index position) const {
    const int element = at(window, position);
    return element >= 0 && element < elements;
  }
  inline int covered(Index window) const {
    const int from = begin(window), to = from + kSize;
    return (to < elements ? to : elements) - (from > 0 ? from : 0);
  }
  inline int padded(Index window) const {
    const int from = begin(window), to = from + kSize;
    return (to < elements + kPadding ? to : elements + kPadding) - from;
  }
  // The first and the last window that may cover an element, and the position in one; -1 if it does not.
  inline int first(Index element) const {
    const int from = static_cast<int>(element) + kPadding - (kSize - 1) * kDilation;
    return from > 0 ? (from + kStride - 1) / kStride : 0;
  }
  inline int last(Index element) const {
    const int to = (static_cast<int>(element) + kPadding) / kStride;
    return to < windows ? to : windows - 1;
  }
  inline int position(Index element, int window) const {
    const int distance = static_cast<int>(element) - begin(window);
    return distance % kDilation == 0 ? distance / kDilation : -1;
  }
  // The first window whose element at a position does not lie before another one, of those there are.
  inline Index behind(Index element, Index position) const {
    const Index gap = element + kPadding - position * kDilation;
    return gap > 0 ? std::min<Index>(windows, (gap + kStride - 1) / kStride) : 0;
  }
  // The windows that have an element at a position.
  inline Index begins(Index position) const { return behind(0, position); }
  inline Index ends(Index position) const { return behind(elements, position); }
};

// An axis divided into parts as evenly as may be: neighbours share an element where it does not come out even. kSize is the most one has.
template <int kSize>
struct Parts {
  int elements, windows;
  inline int begin(Index window) const { return static_cast<int>(static_cast<int64_t>(window) * elements / windows); }
  inline int end(Index window) const {
    return static_cast<int>(((static_cast<int64_t>(window) + 1) * elements + windows - 1) / windows);
  }
  inline int at(Index window, Index position) const { return begin(window) + static_cast<int>(position); }
  inline bool has(Index window, Index position) const { return at(window, position) < end(window); }
  inline int covered(Index window) const { return end(window) - begin(window); }
  inline int first(Index element) const { return static_cast<int>(static_cast<int64_t>(element) * windows / elements); }
  inline int last(Index element) const {
    return static_cast<int>(((static_cast<int64_t>(element) + 1) * windows + elements - 1) / elements) - 1;
  }
  inline int position(Index element, int window) const { return static_cast<int>(element) - begin(window); }
};

// What a window's elements come to, in their order.
template <typename T>
struct WindowSum {
  T total = 0;
  inline void add(T term, int) { total += term; }
  inline T sum() const { return total; }
};

// The first maximum and where it stands; a NaN beats every number, as in torch.
template <typename T>
struct WindowMaximum {
  T best = 0;
  int at = -1;
  inline void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  inline T max() const { return best; }
  inline int argmax() const { return at; }
};

template <typename T>
struct WindowPick {
  T value = 0;
  inline void add(T candidate, int position, int wanted) { value = position == wanted ? candidate : value; }
  inline T pick() const { return value; }
};

struct ForwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void forward_slide_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

static inline __attribute__((always_inline)) void forward_slide_row_values(const float peak,
    const int winner_index_2, float& out, int& winner_index) {
  out = peak;
  winner_index = winner_index_2;
}

static void forward_slide(const float* __restrict__ x, float* __restrict__ out,
    uint8_t* __restrict__ winner_index, const ForwardSizes sizes, int threads) {
  expect(out, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  expect(winner_index, sizes.outer.value * sizes.middle.value * sizes.inner.value);
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_middle{static_cast<int>(sizes.middle_unpooled.value),
      static_cast<int>(sizes.middle.value)};
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_inner{static_cast<int>(sizes.inner_unpooled.value),
      static_cast<int>(sizes.inner.value)};
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value,
      lines = (length + kLine - 1) / kLine;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length * 9 > kSerial)
  for (Index task = 0; task < rows * lines; ++task) {
    const Index row = task / lines, first = task % lines * kLine, width = std::min(kLine, length - first);
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    WindowMaximumLanes<float> peak_lanes(width);
    for (int position_value = 0; position_value < 9; ++position_value) {
      const Index above_window_2 = position_value / 3;
      const Index window_2 = position_value - above_window_2 * 3;
      const Index window_1 = above_window_2;
      if (!(along_middle.has(middle, window_1))) continue;
      const Index from = std::max(first, along_inner.begins(window_2)) - first;
      const Index to = std::min(first + width, along_inner.ends(window_2)) - first;
      const Index inner = first + from;
      [[maybe_unused]] const Index middle_at = static_cast<Index>(along_middle.at(middle, window_1));
      [[maybe_unused]] const Index inner_at = static_cast<Index>(along_inner.at(inner, window_2));
      const auto x_from = x + ((outer) * sizes.middle_unpooled.value + middle_at) * sizes.inner_unpooled.value + inner_at;
#pragma omp simd
      for (Index i = from; i < to; ++i) {
        const float x_value = static_cast<float>(widen(x_from[(i - from) * 2]));
        float peak_term_value;
        forward_slide_stage_1(x_value, peak_term_value);
        peak_lanes.add(i, peak_term_value, position_value);
      }
    }
    float peak_line[kLine];
    for (Index i = 0; i < width; ++i) peak_line[i] = peak_lanes.max(i);
    int winner_index_2_line[kLine];
    for (Index i = 0; i < width; ++i) winner_index_2_line[i] = peak_lanes.argmax(i);
    const Index inner = first;
    float out_room[kLine];
    float* const out_line = target<1>(out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, out_room);
    int winner_index_room[kLine];
    int* const winner_index_line = target<1>(winner_index + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, width, winner_index_room);
#pragma omp simd
    for (Index i = 0; i < width; ++i) {
      const float peak_value = peak_line[i];
      const int winner_index_2_value = winner_index_2_line[i];
      float out_value;
      int winner_index_value;
      forward_slide_row_values(peak_value, winner_index_2_value, out_value, winner_index_value);
      out_line[i] = out_value;
      winner_index_line[i] = winner_index_value;
    }
    store<1>(out_line, width, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
    store<1>(winner_index_line, width,
        winner_index + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
  }
}

struct BackwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void backward_cover_values(const int position,
    const int winner_index, const float d_out, float& d_x) {
  d_x = position == winner_index ? d_out : 0.0f;
}

static void backward_cover(const uint8_t* __restrict__ winner_index, const float* __restrict__ d_out,
    float* __restrict__ d_x, const BackwardSizes sizes, int threads) {
  expect(d_x,
      static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle_unpooled.value) * static_cast<int64_t>(sizes.inner_unpooled.value));
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_middle{static_cast<int>(sizes.middle_unpooled.value),
      static_cast<int>(sizes.middle.value)};
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_inner{static_cast<int>(sizes.inner_unpooled.value),
      static_cast<int>(sizes.inner.value)};
  const Index rows = sizes.outer.value * sizes.middle_unpooled.value, length = sizes.inner_unpooled.value,
      lines = (length + kLine - 1) / kLine;
#pragma omp parallel for num_threads(threads) schedule(static) firstprivate(sizes) if (rows * length > kSerial)
  for (Index task = 0; task < rows * lines; ++task) {
    const Index row = task / lines, first = task % lines * kLine, width = std::min(kLine, length - first);
    const Index above_middle_at = divide(row, sizes.middle_unpooled);
    const Index middle_at = row - above_middle_at * sizes.middle_unpooled.value;
    const Index outer = above_middle_at;
    const Index inner_at = first;
    float d_x_room[kLine];
    float* const d_x_line = target<1>(d_x + ((outer) * sizes.middle_unpooled.value + middle_at) * sizes.inner_unpooled.value + inner_at, width, d_x_room);
    std::fill(d_x_line, d_x_line + width, float(0));
    for (int middle = along_middle.first(middle_at); middle <= along_middle.last(middle_at); ++middle) {
      [[maybe_unused]] const int window_1 = along_middle.position(middle_at, middle);
      if (window_1 < 0) continue;
      // Backwards, so that each element has its windows in order.
      for (int window_2 = 3 - 1; window_2 >= 0; --window_2) {
        const Index from = along_inner.behind(first, window_2), to = along_inner.behind(first + width,
            window_2);
        const Index inner = from, inner_at = along_inner.at(from, window_2);
        const int position_value = (window_1) * 3 + window_2;
        auto* const d_x_sums = d_x_line + (inner_at - first);
        const auto winner_index_from = winner_index + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner;
        const auto d_out_from = d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner;
#pragma omp simd
        for (Index i = from; i < to; ++i) {
          const int winner_index_value = static_cast<int>(widen(winner_index_from[i - from]));
          const float d_out_value = static_cast<float>(widen(d_out_from[i - from]));
          float d_x_value;
          backward_cover_values(position_value, winner_index_value, d_out_value, d_x_value);
          d_x_sums[(i - from) * 2] += d_x_value;
        }
      }
    }
    store<1>(d_x_line, width,
        d_x + ((outer) * sizes.middle_unpooled.value + middle_at) * sizes.inner_unpooled.value + inner_at);
  }
}

}  // namespace

// a: x, out, winner_index, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  forward_slide(x, out, winner_index, sizes, threads);
  return 0;
}

// a: winner_index, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, threads.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ {a[4]}, {a[5]}, {a[6]}, {a[7]}, {a[8]} };
  const int threads = static_cast<int>(a[9]);
  if (is_measuring) return scratch.used;
  backward_cover(winner_index, d_out, d_x, sizes, threads);
  return 0;
}
