// fusegen 0.1.0   chain 341723ff0efd   signature forward: out bfloat16, x bfloat16; 32-bit offsets
//   gelu(approximate='tanh') | elu | softplus | tanh | pow(1.5)
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

// One instruction where exp2f takes four: what is below 2^-126 becomes zero. Relative error below 2^-22.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / (1 + exp(-x)), both terms times 2^-24: the inverse of what is above 2^126 would be flushed to zero.
__device__ __forceinline__ float narrow_sigmoid(float x) {
  const float sum = exp2_flushed(fmaf(x, -1.44269504f, -24.0f)) + 0x1p-24f;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return inverse * 0x1p-24f;
}

// The same way, within 2^-16.5.
__device__ __forceinline__ float narrow_expm1(float x) {
  const float near = x * fmaf(x, fmaf(x, 0.166666672f, 0.5f), 1.0f);
  return fabsf(x) < 0.0625f ? near : exp2_flushed(x * 1.44269504f) - 1.0f;
}

// For exponents that are no integers and at most 16, so that the logarithm's error stays small.
__device__ __forceinline__ float narrow_pow(float base, float exponent) {
  const float size = base == -INFINITY ? INFINITY : base;
  float log2;
  asm("lg2.approx.f32 %0, %1;" : "=f"(log2) : "f"(size));
  return exp2_flushed(log2 * exponent);
}

// Within 2.5 ulp, for divisors that are normal numbers and whose inverse is one.
__device__ __forceinline__ float narrow_bounded_div(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
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
  Size element;
};

__device__ __forceinline__ void forward_pointwise_values(const float x, float& out) {
  // gelu(approximate='tanh')
  const float product = narrow_sigmoid(fmaf(0.044715f, x * x * x, x) * 1.59576917f) * 1.0f;
  const float after_gelu = x * product;
  // elu
  const float after_elu = after_gelu <= 0.0f ? narrow_expm1(after_gelu) : after_gelu;
  // tanh
  const float power = exp2_flushed(after_elu * 0.721347511f);
  const float product_2 = power * power;
  const float product_3 = product_2 * (product_2 + 2.0f);
  const float after_tanh = after_elu > 20.0f ? 1.0f : narrow_bounded_div(product_3, product_3 + 2.0f);
  // pow(1.5)
  out = narrow_pow(after_tanh, 1.5f);
}

// Reads x; writes out.
__global__ void __launch_bounds__(64, 16)
forward_pointwise(const bfloat16* x, bfloat16* __restrict__ out, ForwardSizes sizes, Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 4;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    if (i + kLanes <= count) {
      Pack<bfloat16, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float out_value;
        forward_pointwise_values(x_value, out_value);
        out_out.at[lane] = narrow<bfloat16>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(x_value, out_value);
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

// a: x, out, scratch (-1: return the bytes it needs), element, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const out = reinterpret_cast<bfloat16*>(a[1]);
  const bool is_measuring = a[2] == -1;
  if (!is_measuring && ((a[0] | a[1]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[5]);
  const int device = static_cast<int>(a[4]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.element.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 2048));
    follow(forward_pointwise, blocks, 64, 0, stream, x, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
