// fusegen 0.1.0   chain 0fc799c91c80   signature forward: out float32, scale float32, x float32; 32-bit offsets
//   leaky_relu(0.2) | mul_channel(scale) | leaky_relu(0.2) | max_pool3d(2)
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_window_stage_1(const float x, const float scale, float& peak_term) {
  // leaky_relu(0.2)
  const float after_leaky_relu = x > 0.0f ? x : x * 0.2f;
  // mul_channel(scale)
  const float after_mul_channel = after_leaky_relu * scale;
  // leaky_relu(0.2)
  peak_term = after_mul_channel > 0.0f ? after_mul_channel : after_mul_channel * 0.2f;
}

__device__ __forceinline__ void forward_window_row_values(const float peak, float& out) {
  out = peak;
}

// Reads x, scale by (axis_1); writes out.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
forward_window(const float* x, const float* scale, float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value;
  const Index result = (static_cast<Index>(blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_3 = divide(above_inner, sizes.axis_3);
  const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
  const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
  const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  float x_in[4][kWindows * 2];
#pragma unroll
  for (int line = 0; line < 4; ++line) {
    const Index above_window_2 = line / 2;
    const Index window_2 = line - above_window_2 * 2;
    const Index window_1 = above_window_2;
    constexpr Index window_3 = 0;
    load_line<kIsWide>(x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.axis_3_unpooled.value + (axis_3 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3), x_in[line]);
  }
  const float scale_value = widen(scale[axis_1]);
  float out_out[kWindows];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    Maximum<float> peak_sum;
#pragma unroll
    for (int position_value = 0; position_value < 8; ++position_value) {
      const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
      float peak_term_value;
      forward_window_stage_1(x_value, scale_value, peak_term_value);
      peak_sum.add(peak_term_value, position_value);
    }
    const float peak_value = peak_sum.max();
    float out_value;
    forward_window_row_values(peak_value, out_value);
    out_out[beside] = narrow<float>(out_value);
  }
  store_line<kIsWide>(out_out,
      out + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner);
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

// a: x, scale, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]),
      size_of(a[9]), size_of(a[10]), size_of(a[11]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner_unpooled.value % 4 == 0 ? 2 : 1 : 1;
    const auto run = windows == 2 ? forward_window<2,
        true> : is_aligned && sizes.inner_unpooled.value % 2 == 0 ? forward_window<1,
        true> : forward_window<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, scale, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
