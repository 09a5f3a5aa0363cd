// fusegen 0.1.0   chain 9ce7cf08a2eb   signature forward: bias float32, out float32, x float32; 32-bit offsets
//   gelu | softmax(1) | add_channel(bias)
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

// The largest number; a NaN beats every number, as in torch. It begins as its constructor says: of an array of arrays, nvcc
// 13.0 gives no more than the first of them what a member's initializer says.
template <typename T>
struct Peak {
  T best;
  __device__ Peak(T first = static_cast<T>(-INFINITY)) : best(first) {}
  __device__ void add(T value) { best = maximum(value, best); }
  __device__ void add_if(bool is_here, T value) { add(is_here ? value : best); }
  template <typename U>
  __device__ void merge(const Peak<U>& other) {
    add(other.best);
  }
  __device__ T max() const { return best; }
  __device__ T number() const { return best; }
};

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
  __device__ void add_if(bool is_here, T term) { total += is_here ? term : T(0); }
  __device__ void add(T factor, T by) { total = fma(factor, by, total); }
  __device__ void add_if(bool is_here, T factor, T by) { total = is_here ? fma(factor, by, total) : total; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
  __device__ T number() const { return total; }
};

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
}

// The same number, from which everything is found again: conditions that a compiler keeps from one time through a row to
// the next take more instructions than to find them.
[[maybe_unused]] __device__ __forceinline__ float again(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

[[maybe_unused]] __device__ __forceinline__ double again(double x) {
  asm volatile("" : "+d"(x));
  return x;
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term,
    float& carried_after_gelu) {
  // gelu
  const float series = polynomial(fabsf(x), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  peak_term = x * (x < 0.0f ? power : 1.0f - power);
  carried_after_gelu = peak_term;
}

__device__ __forceinline__ void forward_column_stage_2(const float carried_after_gelu, const float peak,
    float& total_term, float& carried) {
  total_term = expf(carried_after_gelu - peak);
  carried = total_term;
}

__device__ __forceinline__ void forward_column_values_once(const float total, float& chosen, float& inverse) {
  const float abs_value = fabsf(total);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total * chosen);
}

__device__ __forceinline__ void forward_column_values(const float carried, const float inverse,
    const float chosen, const float bias, float& out) {
  // softmax(1)
  const float after_softmax = carried * inverse * chosen;
  // add_channel(bias)
  out = after_softmax + bias;
}

// Reads x, bias by (middle); writes out.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ out,
    ForwardSizes sizes, Size across, Index tiles) {
  constexpr int kLanes = 4, kPacks = 3;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    Peak<float> peaks_1[1][kLanes];
    float carried_after_gelu[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        float carried_after_gelu_value;
        forward_column_stage_1(x_value, peak_term_value, carried_after_gelu_value);
        peaks_1[0][lane].add_if(is_here, peak_term_value);
        carried_after_gelu[p][lane] = carried_after_gelu_value;
      }
    }
    Sum<float> sums_2[1][kLanes];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float carried_after_gelu_value = carried_after_gelu[p][lane];
        float total_term_value;
        float carried_value;
        forward_column_stage_2(carried_after_gelu_value, peak_value, total_term_value, carried_value);
        sums_2[0][lane].add_if(is_here, total_term_value);
        carried[p][lane] = carried_value;
      }
    }
    float chosen_beside[kLanes];
    float inverse_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_value = sums_2[0][lane].total;
      float chosen_value;
      float inverse_value;
      forward_column_values_once(total_value, chosen_value, inverse_value);
      chosen_beside[lane] = chosen_value;
      inverse_beside[lane] = inverse_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float carried_value = carried[p][lane];
        const float bias_value = widen(bias[middle]);
        float out_value;
        const float chosen_value = chosen_beside[lane];
        const float inverse_value = inverse_beside[lane];
        forward_column_values(carried_value, inverse_value, chosen_value, bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      if (is_here) store(out + (base + i * behind), out_out);
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

// The smallest power of two that is at least n, between two others.
static int64_t power_of_two(int64_t n, int64_t least, int64_t most) {
  int64_t power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * forward_column_across;
  const auto forward_column_beside = static_cast<unsigned>(power_of_two(forward_column_packs, 1, 32));
  const dim3 forward_column_block(forward_column_beside, 128 / forward_column_beside);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = ceil_divide(forward_column_tiles, forward_column_block.y);
  const int64_t forward_column_slots = forward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x, bias,
        out, sizes, size_of(forward_column_across), static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
