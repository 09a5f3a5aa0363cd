// fusegen 0.1.0   chain 903a2d1ee013   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, noise noise, out float32, x float32; 32-bit offsets
//   dropout(noise) | avg_pool2d(3, 2, 1, ceil_mode=True, count_include_pad=False) | add_channel(bias)
#include <cstdint>
#include <cuda_runtime.h>

using Index = uint32_t;

// A size with what it takes to divide by it: two instructions instead of twenty, for dividends below 2^31.
struct Size {
  uint32_t value, multiplier, shift;
};

static Size size_of(int64_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < static_cast<uint64_t>(value)) ++shift;
  const uint64_t excess = (uint64_t{1} << 32) * ((uint64_t{1} << shift) - value);
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(excess / value + 1), shift};
}

namespace {

[[maybe_unused]] __device__ __forceinline__ Index divide(Index n, Size d) { return (__umulhi(n,
    d.multiplier) + n) >> d.shift; }

template <typename Stored>
__device__ __forceinline__ Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
__device__ __forceinline__ Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// Within 2 ulp, for all operands.
__device__ __forceinline__ float narrow_div(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// N neighbours, moved by one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ auto widen(const Pack<T, N>& pack, int lane) {
  return widen(pack.at[lane]);
}

template <int Bytes>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<4> {
  using type = unsigned int;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <>
struct Bits<1> {
  using type = unsigned char;
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  Pack<T, N> pack;
  *reinterpret_cast<Whole*>(&pack) = *reinterpret_cast<const Whole*>(from);
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

template <typename T>
struct Sum {
  T total = 0;
  __device__ void add(T term) { total += term; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
};

// Accumulators merged along a block's y, in a fixed tree, for the threads where it is 0.
template <typename... Accumulators>
__device__ __forceinline__ void merge_trees(unsigned char* memory, Accumulators&... mine) {
  const int cell = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const auto each = [&](auto visit) {
    unsigned char* at = memory;
    ((visit(reinterpret_cast<Accumulators*>(at), mine), at += threads * sizeof(Accumulators)), ...);
  };
  each([&](auto* cells, auto& sum) { cells[cell] = sum; });
  __syncthreads();
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) each([&](auto* cells,
        auto&) { cells[cell].merge(cells[cell + half * blockDim.x]); });
    __syncthreads();
  }
  each([&](auto* cells, auto& sum) { sum = cells[cell]; });
}

// The accumulator of the thread whose number in the warp differs in one bit.
template <typename Accumulator>
__device__ __forceinline__ Accumulator across(const Accumulator& mine, int bit) {
  static_assert(sizeof(Accumulator) % 4 == 0);
  Accumulator other = mine;
  auto* const words = reinterpret_cast<unsigned int*>(&other);
#pragma unroll
  for (int word = 0; word < sizeof(Accumulator) / 4; ++word) words[word] = __shfl_xor_sync(0xffffffffu,
      words[word], bit);
  return other;
}

// The accumulators of a row's lanes merged for the first of them, in a fixed order: over its warps, then within the first.
// A row has a power of two of lanes.
template <typename Accumulator>
__device__ __forceinline__ void merge_tree(Accumulator& mine, int lane, int lanes, void* memory) {
  if (lanes > 32) {
    Accumulator* const cells = static_cast<Accumulator*>(memory) + threadIdx.y * blockDim.x + threadIdx.x;
    *cells = mine;
    __syncthreads();
    if (lane >= 32) return;
    for (int other = 32; other < lanes; other += 32) mine.merge(cells[other]);
  }
  for (int bit = min(lanes, 32) / 2; bit > 0; bit /= 2) mine.merge(across(mine, bit));
}

// The nearest index there is.
__device__ __forceinline__ int clamped(int index,
    int count) { return index < 0 ? 0 : index < count ? index : count - 1; }

// Windows along one axis: window i takes the elements begin(i) + j * kDilation, j < kSize, as far as there are any.
template <int kSize, int kStride, int kPadding, int kDilation>
struct Slide {
  int elements, windows;
  __device__ __forceinline__ int begin(Index window) const { return static_cast<int>(window) * kStride - kPadding; }
  __device__ __forceinline__ int at(Index window,
      Index position) const { return begin(window) + static_cast<int>(position) * kDilation; }
  __device__ __forceinline__ bool has(Index window, Index position) const {
    const int element = at(window, position);
    return element >= 0 && element < elements;
  }
  // An element that is there: the one at a position, where that is.
  __device__ __forceinline__ int near(Index window, Index position) const { return clamped(at(window,
      position), elements); }
  // The n-th of the windows that may cover an element, or any other where there are not so many.
  __device__ __forceinline__ static constexpr int most() { return ((kSize - 1) * kDilation + kStride) / kStride; }
  __device__ __forceinline__ int nth(Index element, int n) const { return clamped(first(element) + n,
      windows); }
  __device__ __forceinline__ bool has_nth(Index element,
      int n) const { return first(element) + n <= last(element); }
  __device__ __forceinline__ int covered(Index window) const {
    const int from = begin(window), to = from + kSize;
    return (to < elements ? to : elements) - (from > 0 ? from : 0);
  }
  __device__ __forceinline__ int padded(Index window) const {
    const int from = begin(window), to = from + kSize;
    return (to < elements + kPadding ? to : elements + kPadding) - from;
  }
  // The first and the last window that may cover an element, and the position in one; -1 if it does not.
  __device__ __forceinline__ int first(Index element) const {
    const int from = static_cast<int>(element) + kPadding - (kSize - 1) * kDilation;
    return from > 0 ? (from + kStride - 1) / kStride : 0;
  }
  __device__ __forceinline__ int last(Index element) const {
    const int to = (static_cast<int>(element) + kPadding) / kStride;
    return to < windows ? to : windows - 1;
  }
  __device__ __forceinline__ int position(Index element, int window) const {
    const int distance = static_cast<int>(element) - begin(window);
    return distance % kDilation == 0 ? distance / kDilation : -1;
  }
};

// An axis divided into parts as evenly as may be: neighbours share an element where it does not come out even. kSize is the most one has.
template <int kSize>
struct Parts {
  int elements, windows;
  __device__ __forceinline__ int begin(Index window) const { return static_cast<int>(static_cast<int64_t>(window) * elements / windows); }
  __device__ __forceinline__ int end(Index window) const {
    return static_cast<int>(((static_cast<int64_t>(window) + 1) * elements + windows - 1) / windows);
  }
  __device__ __forceinline__ int at(Index window,
      Index position) const { return begin(window) + static_cast<int>(position); }
  __device__ __forceinline__ bool has(Index window, Index position) const { return at(window,
      position) < end(window); }
  __device__ __forceinline__ int near(Index window, Index position) const { return clamped(at(window,
      position), elements); }
  __device__ __forceinline__ int covered(Index window) const { return end(window) - begin(window); }
  __device__ __forceinline__ int first(Index element) const { return static_cast<int>(static_cast<int64_t>(element) * windows / elements); }
  __device__ __forceinline__ int last(Index element) const {
    return static_cast<int>(((static_cast<int64_t>(element) + 1) * windows + elements - 1) / elements) - 1;
  }
  __device__ __forceinline__ int position(Index element,
      int window) const { return static_cast<int>(element) - begin(window); }
};

// What a window's elements come to, in their order.
template <typename T>
struct WindowSum {
  T total = 0;
  __device__ __forceinline__ void add(T term, int) { total += term; }
  __device__ __forceinline__ T sum() const { return total; }
};

// The first maximum and where it stands; a NaN beats every number, as in torch.
template <typename T>
struct WindowMaximum {
  T best = 0;
  int at = -1;
  __device__ __forceinline__ void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  __device__ __forceinline__ T max() const { return best; }
  __device__ __forceinline__ int argmax() const { return at; }
};

template <typename T>
struct WindowPick {
  T value = 0;
  __device__ __forceinline__ void add(T candidate, int position,
      int wanted) { value = position == wanted ? candidate : value; }
  __device__ __forceinline__ T pick() const { return value; }
};

// Two neighbours have their bits of one hash: the seed is stepped on by the pair's place, and mixed, as splitmix64 has it.
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

__device__ __forceinline__ uint64_t stepped_on(int64_t seed,
    uint64_t pair) { return static_cast<uint64_t>(seed) + (pair + 1) * kStep; }

__device__ __forceinline__ uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// Noise is 32 bits: a number in [0, 1), times 2^32.
__device__ __forceinline__ uint32_t noise_at(int64_t seed, uint64_t place) {
  const uint64_t bits = mixed(stepped_on(seed, place / 2));
  return static_cast<uint32_t>(place % 2 == 0 ? bits : bits >> 32);
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

struct ForwardDrawnNoise {
  const int64_t* seed;
  ForwardSizes sizes;
  Index from = 0;
  __device__ __forceinline__ Index place(Index offset) const {
    return offset;
  }
  template <typename Offset>
  __device__ __forceinline__ ForwardDrawnNoise operator+(Offset offset) const {
    return {seed, sizes, from + static_cast<Index>(offset)};
  }
  template <typename Offset>
  __device__ __forceinline__ uint32_t operator[](Offset offset) const { return noise_at(*seed,
      place(from + static_cast<Index>(offset))); }
};

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw_singly(ForwardDrawnNoise from, int64_t seed) {
  Pack<uint32_t, N> pack;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) pack.at[lane] = noise_at(seed, from.place(from.from + lane));
  return pack;
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw(ForwardDrawnNoise from, int64_t seed) {
  if constexpr (N % 2 == 0) {  // whole pairs, as packs begin at multiples of their size
    Pack<uint32_t, N> pack;
    uint64_t stepped = stepped_on(seed, from.from / 2);
#pragma unroll
    for (int lane = 0; lane < N; lane += 2, stepped += kStep) {
      const uint64_t bits = mixed(stepped);
      pack.at[lane] = static_cast<uint32_t>(bits);
      pack.at[lane + 1] = static_cast<uint32_t>(bits >> 32);
    }
    return pack;
  }
  return draw_singly<N>(from, seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load_singly(ForwardDrawnNoise from) {
  return draw_singly<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load(ForwardDrawnNoise from) {
  return draw<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ void send(Pack<uint32_t, N>* to, ForwardDrawnNoise from) {
  *to = load<N>(from);
}

template <bool kIsWide, int N>
__device__ __forceinline__ void load_line(ForwardDrawnNoise from, uint32_t (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

__device__ __forceinline__ void forward_slide_stage_1(const uint32_t noise, const float x,
    float& total_term) {
  // dropout(noise)
  total_term = noise >= 2147483648u ? x * 2.0f : 0.0f;
}

__device__ __forceinline__ void forward_slide_row_values(const float total,
    const float covered_window_2_window_1, const float bias, float& out) {
  // avg_pool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
  const float after_avg_pool2d = narrow_div(total, covered_window_2_window_1);
  // add_channel(bias)
  out = after_avg_pool2d + bias;
}

// Reads noise, x, bias by (axis_1); writes out.
__global__ void __launch_bounds__(256, 2)
forward_slide(const ForwardDrawnNoise noise, const float* x, const float* bias, float* __restrict__ out,
    ForwardSizes sizes, Index count) {
  wait_for_kernel_before();
  const Index task = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x;
  if (task >= count) return;
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_axis_2{static_cast<int>(sizes.axis_2_unpooled.value),
      static_cast<int>(sizes.axis_2.value)};
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_inner{static_cast<int>(sizes.inner_unpooled.value),
      static_cast<int>(sizes.inner.value)};
  const Index above_inner = divide(task, sizes.inner);
  const Index inner = task - above_inner * sizes.inner.value;
  const Index above_axis_2 = divide(above_inner, sizes.axis_2);
  const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  const float covered_window_2_window_1_value = static_cast<float>(along_inner.covered(inner) * along_axis_2.covered(axis_2));
  const float bias_value = static_cast<float>(widen(bias[axis_1]));
  WindowSum<float> total_sum;
#pragma unroll 9
  for (int position_value = 0; position_value < 9; ++position_value) {
    const Index above_window_2 = position_value / 3;
    const Index window_2 = position_value - above_window_2 * 3;
    const Index window_1 = above_window_2;
    const bool is_inside = along_axis_2.has(axis_2, window_1) && along_inner.has(inner, window_2);
    [[maybe_unused]] const Index axis_2_at = static_cast<Index>(along_axis_2.near(axis_2, window_1));
    [[maybe_unused]] const Index inner_at = static_cast<Index>(along_inner.near(inner, window_2));
    const uint32_t noise_value = static_cast<uint32_t>(widen(noise[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + axis_2_at) * sizes.inner_unpooled.value + inner_at]));
    const float x_value = static_cast<float>(widen(x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + axis_2_at) * sizes.inner_unpooled.value + inner_at]));
    float total_term_value;
    forward_slide_stage_1(noise_value, x_value, total_term_value);
    if (is_inside) total_sum.add(total_term_value, position_value);
  }
  const float total_value = total_sum.sum();
  float out_value;
  forward_slide_row_values(total_value, covered_window_2_window_1_value, bias_value, out_value);
  out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(out_value);
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

struct BackwardDrawnNoise {
  const int64_t* seed;
  BackwardSizes sizes;
  Index from = 0;
  __device__ __forceinline__ Index place(Index offset) const {
    return offset;
  }
  template <typename Offset>
  __device__ __forceinline__ BackwardDrawnNoise operator+(Offset offset) const {
    return {seed, sizes, from + static_cast<Index>(offset)};
  }
  template <typename Offset>
  __device__ __forceinline__ uint32_t operator[](Offset offset) const { return noise_at(*seed,
      place(from + static_cast<Index>(offset))); }
};

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw_singly(BackwardDrawnNoise from, int64_t seed) {
  Pack<uint32_t, N> pack;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) pack.at[lane] = noise_at(seed, from.place(from.from + lane));
  return pack;
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw(BackwardDrawnNoise from, int64_t seed) {
  if constexpr (N % 2 == 0) {  // whole pairs, as packs begin at multiples of their size
    Pack<uint32_t, N> pack;
    uint64_t stepped = stepped_on(seed, from.from / 2);
#pragma unroll
    for (int lane = 0; lane < N; lane += 2, stepped += kStep) {
      const uint64_t bits = mixed(stepped);
      pack.at[lane] = static_cast<uint32_t>(bits);
      pack.at[lane + 1] = static_cast<uint32_t>(bits >> 32);
    }
    return pack;
  }
  return draw_singly<N>(from, seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load_singly(BackwardDrawnNoise from) {
  return draw_singly<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load(BackwardDrawnNoise from) {
  return draw<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ void send(Pack<uint32_t, N>* to, BackwardDrawnNoise from) {
  *to = load<N>(from);
}

template <bool kIsWide, int N>
__device__ __forceinline__ void load_line(BackwardDrawnNoise from, uint32_t (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

__device__ __forceinline__ void backward_inner_values(const float d_out, float& total_term) {
  total_term = d_out;
}

// Reads d_out; leaves partials of total.
__global__ void __launch_bounds__(128)
backward_inner(const float* d_out, Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Index rows,
    Index pieces, Index piece_length) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_axis_2 = divide(row, sizes.axis_2);
  const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  Sum<float> total_sum;
  const auto take = [&](Index inner, float d_out_value) {
    float total_term_value;
    backward_inner_values(d_out_value, total_term_value);
    total_sum.add(total_term_value);
  };
  if (is_live) {
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(d_out[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_mine = total_sum;
      total_sum = Sum<float>();
      Pack<float, kLanes> d_out_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        d_out_in[p] = load<kLanes>(d_out + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(d_out_in[p], lane));
        }
      }
      total_sum.merge(total_mine);
    }
  }
  merge_tree(total_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(axis_1) * (sizes.outer.value * sizes.axis_2.value * pieces) + ((outer) * sizes.axis_2.value + axis_2) * pieces + piece] = total_sum;
  }
}

// The same for short rows: a block takes several.
__global__ void __launch_bounds__(128)
backward_inner_joined(const float* d_out, Sum<float>* __restrict__ total_partials, BackwardSizes sizes,
    Index rows, Index pieces, Index piece_length, Index each) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = blockIdx.x, above = task / pieces, piece = task % pieces;
  const Index alike = sizes.outer.value * sizes.axis_2.value, shares = (alike + each - 1) / each,
      kept = above / shares, share = above % shares;
  const Index axis_1 = kept;
  Sum<float> total_sum;
  const Index past = min((share + 1) * each, alike);
  for (Index passing = share * each + threadIdx.y; passing < past; passing += blockDim.y) {
    const Index above_axis_2 = divide(passing, sizes.axis_2);
    const Index axis_2 = passing - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    const Index row = ((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2;
    const auto take = [&](Index inner, float d_out_value) {
      float total_term_value;
      backward_inner_values(d_out_value, total_term_value);
      total_sum.add(total_term_value);
    };
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(d_out[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_mine = total_sum;
      total_sum = Sum<float>();
      Pack<float, kLanes> d_out_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        d_out_in[p] = load<kLanes>(d_out + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(d_out_in[p], lane));
        }
      }
      total_sum.merge(total_mine);
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  merge_tree(total_sum, thread, blockDim.x * blockDim.y, shared);
  if (thread == 0) {
    total_partials[(kept * shares + share) * pieces + piece] = total_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

// Merges partials into total; writes d_bias.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_bias, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.axis_1.value;
  Sum<double> total_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[result * slots + slot];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_sum.merge(total_next[n]);
      }
    }
  }
  merge_trees(shared, total_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const Index axis_1 = result;
  float d_bias_value;
  backward_finalise_values(total_value, d_bias_value);
  d_bias[axis_1] = narrow<float>(d_bias_value);
}

__device__ __forceinline__ void backward_cover_values(const uint32_t noise, const float d_out,
    const float covered_window_2_window_1, float& d_x) {
  // backward, down to dropout(noise)
  const float d_after_dropout = d_out / covered_window_2_window_1;
  d_x = noise >= 2147483648u ? d_after_dropout : 0.0f;
}

__device__ __forceinline__ void backward_cover_row_values(const float d_x_shares, float& d_x_finished) {
  d_x_finished = d_x_shares * 2.0f;
}

// Reads noise, d_out by (outer, axis_1, axis_2, inner); writes d_x.
__global__ void __launch_bounds__(256, 2)
backward_cover(const BackwardDrawnNoise noise, const float* d_out, float* __restrict__ d_x,
    BackwardSizes sizes, Index count) {
  wait_for_kernel_before();
  const Index task = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x;
  if (task >= count) return;
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_axis_2{static_cast<int>(sizes.axis_2_unpooled.value),
      static_cast<int>(sizes.axis_2.value)};
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_inner{static_cast<int>(sizes.inner_unpooled.value),
      static_cast<int>(sizes.inner.value)};
  const Index above_inner_at = divide(task, sizes.inner_unpooled);
  const Index inner_at = task - above_inner_at * sizes.inner_unpooled.value;
  const Index above_axis_2_at = divide(above_inner_at, sizes.axis_2_unpooled);
  const Index axis_2_at = above_inner_at - above_axis_2_at * sizes.axis_2_unpooled.value;
  const Index above_axis_1 = divide(above_axis_2_at, sizes.axis_1);
  const Index axis_1 = above_axis_2_at - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  float d_x_sum = 0;
#pragma unroll
  for (int nth_axis_2 = 0; nth_axis_2 < along_axis_2.most(); ++nth_axis_2) {
    const int axis_2 = along_axis_2.nth(axis_2_at, nth_axis_2);
    [[maybe_unused]] const int window_1 = along_axis_2.position(axis_2_at, axis_2);
#pragma unroll
    for (int nth_inner = 0; nth_inner < along_inner.most(); ++nth_inner) {
      const int inner = along_inner.nth(inner_at, nth_inner);
      [[maybe_unused]] const int window_2 = along_inner.position(inner_at, inner);
      const bool is_covering = along_axis_2.has_nth(axis_2_at, nth_axis_2) && along_inner.has_nth(inner_at,
          nth_inner);
      const float covered_window_2_window_1_value = static_cast<float>(along_inner.covered(inner) * along_axis_2.covered(axis_2));
      const uint32_t noise_value = static_cast<uint32_t>(widen(noise[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + axis_2_at) * sizes.inner_unpooled.value + inner_at]));
      const float d_out_value = static_cast<float>(widen(d_out[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner]));
      float d_x_value;
      backward_cover_values(noise_value, d_out_value, covered_window_2_window_1_value, d_x_value);
      d_x_sum += is_covering ? d_x_value : 0;
    }
  }
  const float d_x_shares_value = d_x_sum;
  float d_x_finished_value;
  backward_cover_row_values(d_x_shares_value, d_x_finished_value);
  d_x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + axis_2_at) * sizes.inner_unpooled.value + inner_at] = narrow<float>(d_x_finished_value);
}

}  // namespace

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  int64_t used = 0;
  template <typename T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
};

// The caller's device stays current.
struct DeviceGuard {
  int previous = 0;
  explicit DeviceGuard(int device) {
    cudaGetDevice(&previous);
    if (previous != device) cudaSetDevice(device);
    else previous = -1;
  }
  ~DeviceGuard() {
    if (previous >= 0) cudaSetDevice(previous);
  }
};

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest power of two that is at least n, between two others.
static int64_t power_of_two(int64_t n, int64_t least, int64_t most) {
  int64_t power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

// How many rows of so many elements a block takes together: as many as have 8,192, but there are to be 2,048 blocks.
static int64_t rows_of_block(int64_t rows, int64_t length, int64_t alike) {
  const int64_t most = length > 0 ? 8192 / length : 1, spare = rows / 2048;
  const int64_t wanted = most < spare ? most : spare;
  return wanted < 1 ? 1 : wanted < alike ? wanted : alike;
}

// Sets a kernel up while the one before it in the stream ends, where devices can: it waits for that itself.
template <typename... Parameters, typename... Arguments>
static void follow(void (*kernel)(Parameters...), dim3 blocks, dim3 block, int64_t shared_bytes,
    cudaStream_t stream,
    Arguments... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = block;
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = __CUDA_ARCH_LIST__ >= 900;
  cudaLaunchKernelEx(&launch, kernel, static_cast<Parameters>(arguments)...);
}

// a: x, noise, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]),
      size_of(a[10]) };
  const ForwardDrawnNoise noise{reinterpret_cast<const int64_t*>(a[1]), sizes};
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 256));
    follow(forward_slide, blocks, 256, 0, stream, noise, x, bias, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: noise, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  auto* const d_bias = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[1]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const BackwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]),
      size_of(a[10]) };
  const BackwardDrawnNoise noise{reinterpret_cast<const int64_t*>(a[0]), sizes};
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value), backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t backward_inner_each = rows_of_block(backward_inner_rows, backward_inner_length,
      static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  const int64_t backward_inner_shares = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value), backward_inner_each);
  const int64_t total_partials_slots = backward_inner_shares * backward_inner_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    if (backward_inner_each > 1) {
      const auto blocks = static_cast<unsigned>(static_cast<int64_t>(sizes.axis_1.value) * backward_inner_shares * backward_inner_pieces);
      follow(backward_inner_joined, blocks, block, 0, stream, d_out, total_partials, sizes,
          static_cast<Index>(backward_inner_rows), static_cast<Index>(backward_inner_pieces),
          static_cast<Index>(piece_length), static_cast<Index>(backward_inner_each));
    } else {
      const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
          block.y));
      follow(backward_inner, blocks, block, 0, stream, d_out, total_partials, sizes,
          static_cast<Index>(backward_inner_rows), static_cast<Index>(backward_inner_pieces),
          static_cast<Index>(piece_length));
    }
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.axis_1.value), slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise, blocks, block, 0, stream, d_bias, total_partials, sizes,
        static_cast<Index>(slots));
  }
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2_unpooled.value) * static_cast<int64_t>(sizes.inner_unpooled.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 256));
    follow(backward_cover, blocks, 256, 0, stream, noise, d_out, d_x, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
