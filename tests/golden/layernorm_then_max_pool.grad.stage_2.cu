// fusegen 0.1.0   chain 7fb0b777ff94   signature forward+backward: d_out float32, d_x float32, out float32, winner_index uint8, x float32; 32-bit offsets
//   max_pool2d(2)
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

// Neighbours in as few accesses as their size allows, where they begin at a multiple of it; else one by one.
template <bool kIsWide, int N, typename T>
__device__ __forceinline__ void load_line(const T* from, T (&to)[N]) {
  constexpr int kBytes = N * sizeof(T),
      kLanes = kIsWide ? (kBytes % 16 == 0 ? 16 : kBytes & -kBytes) / sizeof(T) : 1;
  using Whole = typename Bits<sizeof(T) * kLanes>::type;
#pragma unroll
  for (int i = 0; i < N; i += kLanes) {
    Pack<T, kLanes> pack;
    *reinterpret_cast<Whole*>(&pack) = *reinterpret_cast<const Whole*>(from + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = pack.at[lane];
  }
}

template <bool kIsWide, int N, typename T>
__device__ __forceinline__ void store_line(const T (&from)[N], T* to) {
  constexpr int kBytes = N * sizeof(T),
      kLanes = kIsWide ? (kBytes % 16 == 0 ? 16 : kBytes & -kBytes) / sizeof(T) : 1;
#pragma unroll
  for (int i = 0; i < N; i += kLanes) {
    Pack<T, kLanes> pack;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) pack.at[lane] = from[i + lane];
    store(to + i, pack);
  }
}

// The first maximum and where it stands; a NaN beats every number, as in torch.
template <typename T>
struct Maximum {
  T best = 0;
  int at = -1;
  __device__ void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  __device__ T max() const { return best; }
  __device__ int argmax() const { return at; }
};

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_window_stage_1(const float x, float& maximum_term) {
  maximum_term = x;
}

__device__ __forceinline__ void forward_window_row_values(const float maximum, const int winner_index_2,
    float& out, int& winner_index) {
  out = maximum;
  winner_index = winner_index_2;
}

// Reads x; writes out, winner_index.
template <bool kIsWide>
__global__ void __launch_bounds__(256)
forward_window(const float* x, float* __restrict__ out, uint8_t* __restrict__ winner_index,
    ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kWindows = kIsWide ? 2 : 1;  // side by side
  const Index results = sizes.outer.value * sizes.middle.value * sizes.inner.value;
  const Index result = (static_cast<Index>(blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_middle = divide(above_inner, sizes.middle);
  const Index middle = above_inner - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  float x_in[2][kWindows * 2];
#pragma unroll
  for (int line = 0; line < 2; ++line) {
    const Index window_1 = line;
    constexpr Index window_2 = 0;
    load_line<kIsWide>(x + ((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), x_in[line]);
  }
  float out_out[kWindows];
  uint8_t winner_index_out[kWindows];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    Maximum<float> maximum_sum;
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
      float maximum_term_value;
      forward_window_stage_1(x_value, maximum_term_value);
      maximum_sum.add(maximum_term_value, position_value);
    }
    const float maximum_value = maximum_sum.max();
    const int winner_index_2_value = maximum_sum.argmax();
    float out_value;
    int winner_index_value;
    forward_window_row_values(maximum_value, winner_index_2_value, out_value, winner_index_value);
    out_out[beside] = narrow<float>(out_value);
    winner_index_out[beside] = narrow<uint8_t>(winner_index_value);
  }
  store_line<kIsWide>(out_out, out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
  store_line<kIsWide>(winner_index_out,
      winner_index + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner);
}

struct BackwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_window_values(const int position, const int winner_index,
    const float d_out, float& d_x) {
  d_x = position == winner_index ? d_out : 0.0f;
}

// Reads winner_index by (outer, middle, inner), d_out by (outer, middle, inner); writes d_x.
template <bool kIsWide>
__global__ void __launch_bounds__(256)
backward_window(const uint8_t* winner_index, const float* d_out, float* __restrict__ d_x,
    BackwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kWindows = kIsWide ? 2 : 1;  // side by side
  const Index results = sizes.outer.value * sizes.middle.value * sizes.inner.value;
  const Index result = (static_cast<Index>(blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_middle = divide(above_inner, sizes.middle);
  const Index middle = above_inner - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  uint8_t winner_index_in[kWindows];
  load_line<kIsWide>(winner_index + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner,
      winner_index_in);
  float d_out_in[kWindows];
  load_line<kIsWide>(d_out + ((outer) * sizes.middle.value + middle) * sizes.inner.value + inner, d_out_in);
  float d_x_out[2][kWindows * 2];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    const int winner_index_value = widen(winner_index_in[beside]);
    const float d_out_value = widen(d_out_in[beside]);
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      float d_x_value;
      backward_window_values(position_value, winner_index_value, d_out_value, d_x_value);
      d_x_out[position_value / 2][beside * 2 + position_value % 2] = narrow<float>(d_x_value);
    }
  }
#pragma unroll
  for (int line = 0; line < 2; ++line) {
    const Index window_1 = line;
    constexpr Index window_2 = 0;
    store_line<kIsWide>(d_x_out[line],
        d_x + ((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
  }
  const Index window_1_room = middle + 1 == sizes.middle.value ? sizes.middle_unpooled.value - middle * 2 : 2;
  const Index window_2_room = inner + kWindows == sizes.inner.value ? sizes.inner_unpooled.value - inner * 2 : kWindows * 2;
  if (window_1_room > 2 || window_2_room > kWindows * 2) {
    for (Index window_1 = 0; window_1 < window_1_room; ++window_1) {
      const bool is_outside = window_1 >= 2;
      for (Index window_2 = is_outside ? 0 : kWindows * 2; window_2 < window_2_room; ++window_2) d_x[((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2)] = narrow<float>(0.0f);
    }
  }
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

// a: x, out, winner_index, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_wide = sizes.inner_unpooled.value % 4 == 0 && (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(winner_index)) % 16 == 0;
    const auto run = is_wide ? forward_window<true> : forward_window<false>;
    const int64_t windows = is_wide ? 2 : 1;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, out, winner_index, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: winner_index, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_wide = sizes.inner_unpooled.value % 4 == 0 && (reinterpret_cast<uintptr_t>(d_x) | reinterpret_cast<uintptr_t>(winner_index) | reinterpret_cast<uintptr_t>(d_out)) % 16 == 0;
    const auto run = is_wide ? backward_window<true> : backward_window<false>;
    const int64_t windows = is_wide ? 2 : 1;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, winner_index, d_out, d_x, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
