// fusegen 0.1.0   chain 2b3e3ddb166e   signature forward: out bfloat16, second bfloat16 with gaps, weight bfloat16, x bfloat16 with gaps; 64-bit offsets
//   rms_norm(weight) | mul(second)
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

struct ForwardSizes {
  Size outer, inner;
  Pitch x_pitch;
  Pitch second_pitch;
};

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, float& total_term) {
  total_term = x * x;
}

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float total,
    const float count_of_inner, const float weight, const float second, float& out) {
  // rms_norm(weight)
  const float product = x * (1.0f / sqrtf(total * (1.0f / count_of_inner) + 1.1920929e-07f));
  const float after_rms_norm = product * weight;
  // mul(second)
  out = after_rms_norm * second;
}

static void forward_row(const bfloat16* __restrict__ x_memory, const bfloat16* __restrict__ weight,
    const bfloat16* __restrict__ second_memory, bfloat16* __restrict__ out, const ForwardSizes sizes,
    int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Pitched<const bfloat16> x{x_memory, sizes.x_pitch};
  const Pitched<const bfloat16> second{second_memory, sizes.second_pitch};
  expect(out, sizes.outer.value * sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index together = rows_together(length);
  const Index tasks = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads) firstprivate(sizes) if (rows * length > kSerial)
  {
#pragma omp for schedule(static)
    for (Index task = 0; task < tasks; ++task) {
      const Index top = task * together, bottom = std::min(rows, top + together);
      float total_of_rows[kTogether];
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        Sum total_sum;
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          float total_term_line[kLine];
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            float total_term_value;
            forward_row_stage_1(x_value, total_term_value);
            total_term_line[i] = total_term_value;
          }
          total_sum.add(total_term_line, width);
        }
        total_of_rows[row - top] = static_cast<float>(total_sum.sum());
      }
      for (Index row = top; row < bottom; ++row) {
        const Index outer = row;
        const float total_value = total_of_rows[row - top];
        for (Index first = 0; first < length; first += kLine) {
          const Index width = std::min(kLine, length - first);
          const Index inner = first;
          float x_room[kLine];
          const float* const x_line = load<1>(x + (outer) * sizes.inner.value + inner, width, x_room);
          float weight_room[kLine];
          const float* const weight_line = load<1>(weight + inner, width, weight_room);
          float second_room[kLine];
          const float* const second_line = load<1>(second + (outer) * sizes.inner.value + inner, width,
              second_room);
          float out_room[kLine];
          float* const out_line = target<1>(out + (outer) * sizes.inner.value + inner, width, out_room);
#pragma omp simd
          for (Index i = 0; i < padded(width); ++i) {
            const float x_value = x_line[i];
            const float weight_value = weight_line[i];
            const float second_value = second_line[i];
            float out_value;
            forward_row_values(x_value, total_value, count_of_inner_value, weight_value, second_value,
                out_value);
            out_line[i] = out_value;
          }
          store<1>(out_line, width, out + (outer) * sizes.inner.value + inner);
        }
      }
    }
  }
}

}  // namespace

// a: x, weight, second, out, scratch (-1: return the bytes it needs), outer, inner, run and gap of x, run and gap of second, threads.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const second = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, { {a[7]}, a[8]}, { {a[9]}, a[10]} };
  const int threads = static_cast<int>(a[11]);
  if (is_measuring) return scratch.used;
  forward_row(x, weight, second, out, sizes, threads);
  return 0;
}
