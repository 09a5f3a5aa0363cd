// fusegen 0.1.0   chain 8842489dfe80   signature forward: bias float32, out float32, x float32; 32-bit offsets
//   relu | max_pool2d(3, 2, 1) | add_channel(bias)
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

// NaN in either argument is the result, as in torch.
template <typename Value>
__device__ __forceinline__ Value maximum(Value a, Value b) {
  return a != a || a > b ? a : b;
}
#if __CUDA_ARCH__ >= 800
template <>
[[maybe_unused]] __device__ __forceinline__ float maximum<float>(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif

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

// The first maximum and where it stands; a NaN beats every number, as in torch. It begins as its constructor says, and not
// its members, for nvcc 13.0 does not heed those of arrays of arrays.
template <typename T>
struct Maximum {
  T best;
  int at;
  __device__ Maximum() : best(0), at(-1) {}
  __device__ void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  __device__ T max() const { return best; }
  __device__ int argmax() const { return at; }
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

// The maximum, of which nobody asks where it stands.
template <typename T>
struct WindowPeak {
  T best = static_cast<T>(-INFINITY);
  __device__ __forceinline__ void add(T value, int) { best = maximum(value, best); }
  __device__ __forceinline__ T max() const { return best; }
};

template <typename T>
struct WindowPick {
  T value = 0;
  __device__ __forceinline__ void add(T candidate, int position,
      int wanted) { value = position == wanted ? candidate : value; }
  __device__ __forceinline__ T pick() const { return value; }
};

// So many neighbours of which `left` are there: in one access, or one by one.
template <int N, bool kIsVector, typename T>
__device__ __forceinline__ Pack<T, N> load_some(const T* from, int left) {
  if constexpr (kIsVector) {
    return load<N>(from);
  } else {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = from[i < left ? i : 0];
    return pack;
  }
}

template <bool kIsVector, int N, typename T>
__device__ __forceinline__ void store_some(T* to, const Pack<T, N>& pack, int left) {
  if constexpr (kIsVector) {
    store(to, pack);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < left) to[i] = pack.at[i];
    }
  }
}

// What lies from kFrom to kPast around N neighbours, those too; of what is not there, the nearest that is.
template <int kFrom, int kPast, typename T>
struct Around {
  decltype(widen(T())) at[kPast - kFrom];
};
template <int kFrom, int kPast, int N, bool kIsVector, typename T>
__device__ __forceinline__ Around<kFrom, kPast, T> load_around(const T* here, int place, int count) {
  Around<kFrom, kPast, T> line;
  const auto pack = load_some<kIsVector ? N : 1, kIsVector>(here, 1);
#pragma unroll
  for (int i = kFrom; i < kPast; ++i) {
    const bool is_mine = kIsVector && i >= 0 && i < N;
    line.at[i - kFrom] = is_mine ? widen(pack, is_mine ? i : 0) : widen(here[clamped(place + i,
        count) - place]);
  }
  return line;
}

// Whether what is so far from a thread's N is there.
template <int N, bool kIsVector>
__device__ __forceinline__ bool is_among(int beside, int place, int count) {
  return (kIsVector && beside >= 0 && beside < N) || static_cast<unsigned>(place + beside) < static_cast<unsigned>(count);
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

__device__ __forceinline__ void forward_slide_stage_1(const float x, float& peak_term) {
  // relu
  peak_term = x <= 0.0f ? 0.0f : x;
}

__device__ __forceinline__ void forward_slide_row_values(const float peak, const float bias, float& out) {
  // add_channel(bias)
  out = peak + bias;
}

// Reads x, bias by (axis_1); writes out.
template <bool kIsVector>
__global__ void __launch_bounds__(256, 2)
forward_slide(const float* x, const float* bias, float* __restrict__ out, ForwardSizes sizes,
    Size inner_blocks, Index count) {
  wait_for_kernel_before();
  const Index task = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x;
  if (task >= count) return;
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_axis_2{static_cast<int>(sizes.axis_2_unpooled.value),
      static_cast<int>(sizes.axis_2.value)};
  [[maybe_unused]] const Slide<3, 2, 1, 1> along_inner{static_cast<int>(sizes.inner_unpooled.value),
      static_cast<int>(sizes.inner.value)};
  const Index above_inner_block = divide(task, inner_blocks);
  const Index inner_block = task - above_inner_block * inner_blocks.value;
  const Index above_axis_2 = divide(above_inner_block, sizes.axis_2);
  const Index axis_2 = above_inner_block - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  constexpr int kEach = 2, kFrom = -1, kPast = 4;
  const Index first_inner = inner_block * kEach, inner = first_inner, inner_at = inner * 2;
  [[maybe_unused]] const int left = along_inner.windows - static_cast<int>(inner);
  const float bias_value = static_cast<float>(widen(bias[axis_1]));
  WindowPeak<float> peak_sum[kEach];
#pragma unroll
  for (int outside = 0; outside < 3; ++outside) {
    const Index window_1 = outside;
    [[maybe_unused]] const Index axis_2_at = static_cast<Index>(along_axis_2.near(axis_2, window_1));
    const auto x_line = load_around<kFrom, kPast, 4,
        kIsVector>(x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + axis_2_at) * sizes.inner_unpooled.value + inner_at), static_cast<int>(inner_at), along_inner.elements);
#pragma unroll
    for (int beside = kFrom; beside < kPast; ++beside) {
#pragma unroll
      for (int lane = 0; lane < kEach; ++lane) {
        const int distance_2 = beside + 1 - lane * 2;
        if (distance_2 < 0 || distance_2 >= 3) continue;
        [[maybe_unused]] const int window_2 = distance_2;
        [[maybe_unused]] const int position_value = (window_1) * 3 + window_2;
        const float x_value = static_cast<float>(x_line.at[beside - kFrom]);
        float peak_term_value;
        forward_slide_stage_1(x_value, peak_term_value);
        peak_sum[lane].add(peak_term_value, position_value);
      }
    }
  }
  Pack<float, kEach> out_out;
#pragma unroll
  for (int lane = 0; lane < kEach; ++lane) {
    const float peak_value = peak_sum[lane].max();
    float out_value;
    forward_slide_row_values(peak_value, bias_value, out_value);
    out_out.at[lane] = narrow<float>(out_value);
  }
  store_some<kIsVector>(out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner), out_out, left);
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

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]),
      size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const Size inner_blocks = size_of(ceil_divide(sizes.inner.value, 2));
    const bool is_vector = sizes.inner_unpooled.value % 4 == 0 && sizes.inner_unpooled.value == sizes.inner.value * 2 && (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const auto run = is_vector ? forward_slide<true> : forward_slide<false>;
    const int64_t tasks = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(inner_blocks.value), threads = tasks;
    const auto blocks = static_cast<unsigned>(ceil_divide(threads, 256));
    follow(run, blocks, 256, 0, stream, x, bias, out, sizes, inner_blocks, static_cast<Index>(tasks));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
