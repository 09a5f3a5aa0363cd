// fusegen 0.1.0   chain f8c0d91a637e   signature forward: bias bfloat16, out bfloat16, x bfloat16; 32-bit offsets
//   leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu
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

// The upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

[[maybe_unused]] __device__ __forceinline__ float widen(bfloat16 x) {
#if __CUDA_ARCH__ >= 900
  float wide;
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  return __uint_as_float(uint32_t{x.bits} << 16);
#endif
}

template <>
[[maybe_unused]] __device__ __forceinline__ bfloat16 narrow<bfloat16, float>(float x) {
#if __CUDA_ARCH__ >= 800
  bfloat16 stored;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x));
  return stored;
#else
  // To nearest, ties to even; NaN is all ones but for the sign.
  const uint32_t bits = __float_as_uint(x);
  return {static_cast<uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// NaN in either argument is the result, as in torch.
template <typename Value>
__device__ __forceinline__ Value minimum(Value a, Value b) {
  return a != a || a < b ? a : b;
}
#if __CUDA_ARCH__ >= 800
template <>
[[maybe_unused]] __device__ __forceinline__ float minimum<float>(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif

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

// Coefficients from the lowest power on.
__device__ __forceinline__ float polynomial(float, float coefficient) { return coefficient; }
template <typename... More>
__device__ __forceinline__ float polynomial(float x, float coefficient, More... more) {
  return fmaf(x, polynomial(x, more...), coefficient);
}

// One instruction where exp2f takes four: what is below 2^-126 becomes zero. Relative error below 2^-22.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
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
// Out of pairs, by one instruction each; to take the upper half alone first would be another.
template <int N>
__device__ __forceinline__ float widen(const Pack<bfloat16, N>& pack, int lane) {
  if constexpr (N == 1) {
    return widen(pack.at[lane]);
  } else {
    const unsigned int pair = reinterpret_cast<const unsigned int*>(pack.at)[lane / 2];
    return __uint_as_float(lane % 2 ? pair & 0xffff0000u : pair << 16);
  }
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

// Neighbours, the first `left` of them here, the others in another row, by as few accesses as their addresses allow.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_anywhere(const T* here, const T* next = nullptr, Index left = N) {
  constexpr int kPart = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  Pack<T, N> pack;
  if (left >= N && reinterpret_cast<uintptr_t>(here) % (sizeof(T) * kPart) == 0) {
#pragma unroll
    for (int n = 0; n < N; n += kPart) *reinterpret_cast<Pack<T,
        kPart>*>(pack.at + n) = load<kPart>(here + n);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) pack.at[n] = n < left ? here[n] : next[n - left];
  }
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void forward_pointwise_values(const float x, const float bias, float& out) {
  // leaky_relu(0.2)
  const float after_leaky_relu = x > 0.0f ? x : x * 0.2f;
  // add_channel(bias)
  const float after_add_channel = after_leaky_relu + bias;
  // clamp(-1, 1)
  const float after_clamp = maximum(minimum(after_add_channel, 1.0f), -1.0f);
  // gelu
  const float series = polynomial(fabsf(after_clamp), -1.00008726f, -1.14964569f, -0.463089466f,
      -0.0490143038f, 0.00606240798f, -0.000345090288f);
  const float power = exp2_flushed(series);
  out = after_clamp * (after_clamp < 0.0f ? power : 1.0f - power);
}

// Reads x, bias by (inner); writes out.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 16)
forward_pointwise(const bfloat16* x, const bfloat16* bias, bfloat16* __restrict__ out, ForwardSizes sizes,
    Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 2;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, Index& bias_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    bias_row = inner;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    Index bias_here;
    const Index left = enter_row(i, bias_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      Index bias_next = bias_here;
      if (is_crossing) enter_row(i + left, bias_next);
      const auto bias_in = load_anywhere<kLanes>(bias + bias_here, bias + bias_next,
          is_crossing ? left : kLanes);
      Pack<bfloat16, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float bias_value = widen(bias_in, lane);
        float out_value;
        forward_pointwise_values(x_value, bias_value, out_value);
        out_out.at[lane] = narrow<bfloat16>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, bias_here);
        const float bias_value = widen(bias[bias_here]);
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(x_value, bias_value, out_value);
        out[j] = narrow<bfloat16>(out_value);
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

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  const int device = static_cast<int>(a[6]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 8 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? forward_pointwise<true> : forward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, x, bias, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
