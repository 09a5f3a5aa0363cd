// fusegen 0.1.0   chain 903a2d1ee013   signature forward: bias float32, noise noise, out float32, x float32; 32-bit offsets
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

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
