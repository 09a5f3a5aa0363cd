// fusegen 0.1.0   chain a6ff7dea4c32   signature forward+backward: d_out float32, d_up float32, d_x float32, out float32, up float32 with gaps, x float32 with gaps; 32-bit offsets
//   silu | mul(up)
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

// 1 / (1 + exp(-x)) without a division's branch for what cannot come: an inverse and a step of Newton's, both terms times
// 2^-24, as the inverse of what is above 2^126 would be flushed to zero.
[[maybe_unused]] __device__ __forceinline__ float sigmoid(float x) {
  const float sum = fmaf(expf(-x), 0x1p-24f, 0x1p-24f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  const float better = fmaf(fmaf(-sum, inverse, 1.0f), inverse, inverse);
  return (sum > 0x1p126f ? inverse : better) * 0x1p-24f;
}

[[maybe_unused]] __device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

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
  __device__ __forceinline__ Pitched operator+(Offset offset) const {
    return {from, pitch, at + static_cast<Index>(offset)};
  }
  __device__ __forceinline__ T* here() const { return from + (at + divide(at, pitch.run) * pitch.gap); }
  template <typename Offset>
  __device__ __forceinline__ T& operator[](Offset offset) const {
    return *(*this + offset).here();
  }
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(Pitched<const T> from) {
  return load<N>(from.here());
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size element;
  Pitch x_pitch;
  Pitch up_pitch;
};

__device__ __forceinline__ void forward_pointwise_values(const float x, const float up, float& out) {
  // silu
  const float after_silu = x * (sigmoid(x));
  // mul(up)
  out = after_silu * up;
}

// Reads x, up; writes out.
__global__ void __launch_bounds__(64, 16)
forward_pointwise(const float* x_memory, const float* up_memory, float* __restrict__ out, ForwardSizes sizes,
    Index count) {
  wait_for_kernel_before();
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  const Pitched<const float> up{up_memory, sizes.up_pitch};
  constexpr int kLanes = 4, kPacks = 4;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<float, kLanes> x_in[kPacks];
  Pack<float, kLanes> up_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
    up_in[p] = load<kLanes>(up + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    if (i + kLanes <= count) {
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float up_value = widen(up_in[p], lane);
        float out_value;
        forward_pointwise_values(x_value, up_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        const float x_value = widen(x[j]);
        const float up_value = widen(up[j]);
        float out_value;
        forward_pointwise_values(x_value, up_value, out_value);
        out[j] = narrow<float>(out_value);
      }
    }
  }
}

struct BackwardSizes {
  Size element;
  Pitch x_pitch;
  Pitch up_pitch;
};

__device__ __forceinline__ void backward_pointwise_values(const float d_out, const float up, const float x,
    float& d_x, float& d_up) {
  // silu
  const float sigmoid_value = sigmoid(x);
  const float after_silu = x * sigmoid_value;
  // backward, down to silu
  const float d_after_silu = d_out * up;
  d_x = d_after_silu * sigmoid_value + d_after_silu * x * (1.0f - sigmoid_value) * sigmoid_value;
  d_up = d_out * after_silu;
}

// Reads d_out, up, x; writes d_x, d_up.
__global__ void __launch_bounds__(64, 1)
backward_pointwise(const float* d_out, const float* up_memory, const float* x_memory,
    float* __restrict__ d_x, float* __restrict__ d_up, BackwardSizes sizes, Index count) {
  wait_for_kernel_before();
  const Pitched<const float> up{up_memory, sizes.up_pitch};
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  constexpr int kLanes = 4, kPacks = 2;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<float, kLanes> d_out_in[kPacks];
  Pack<float, kLanes> up_in[kPacks];
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    d_out_in[p] = load<kLanes>(d_out + i);
    up_in[p] = load<kLanes>(up + i);
    x_in[p] = load<kLanes>(x + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    if (i + kLanes <= count) {
      Pack<float, kLanes> d_x_out;
      Pack<float, kLanes> d_up_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float up_value = widen(up_in[p], lane);
        const float x_value = widen(x_in[p], lane);
        float d_x_value;
        float d_up_value;
        backward_pointwise_values(d_out_value, up_value, x_value, d_x_value, d_up_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
        d_up_out.at[lane] = narrow<float>(d_up_value);
      }
      store(d_x + i, d_x_out);
      store(d_up + i, d_up_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        const float d_out_value = widen(d_out[j]);
        const float up_value = widen(up[j]);
        const float x_value = widen(x[j]);
        float d_x_value;
        float d_up_value;
        backward_pointwise_values(d_out_value, up_value, x_value, d_x_value, d_up_value);
        d_x[j] = narrow<float>(d_x_value);
        d_up[j] = narrow<float>(d_up_value);
      }
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

// a: x, up, out, scratch (-1: return the bytes it needs), element, run and gap of x, run and gap of up, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const up = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), { size_of(a[5]), static_cast<Index>(a[6])}, { size_of(a[7]),
      static_cast<Index>(a[8])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.element.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    follow(forward_pointwise, blocks, 64, 0, stream, x, up, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, up, d_out, d_x, d_up, scratch (-1: return the bytes it needs), element, run and gap of x, run and gap of up, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const up = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_up = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ size_of(a[6]), { size_of(a[7]), static_cast<Index>(a[8])}, { size_of(a[9]),
      static_cast<Index>(a[10])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.element.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 512));
    follow(backward_pointwise, blocks, 64, 0, stream, d_out, up, x, d_x, d_up, sizes,
        static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
