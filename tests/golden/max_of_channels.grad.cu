// fusegen 0.1.0   chain 61cf382a6af0   signature forward+backward: d_out float32, d_x float32, out float32, saved_argmax float32, saved_max float32, x float32; 32-bit offsets
//   max(1) | tanh
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

// Positions along axes, as if they lay in memory.
template <typename T>
struct Positions {
  __device__ T operator[](Index i) const { return static_cast<T>(i); }
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

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_column_stage_2(const float x, const float peak_2,
    const float position_along, float& peak_3_term) {
  peak_3_term = (x >= peak_2 || x != x) ? -position_along : -INFINITY;
}

__device__ __forceinline__ void forward_column_row_values(const float peak, const float peak_3, float& out,
    float& saved_max, float& saved_argmax) {
  // tanh
  out = tanhf(peak);
  saved_max = peak;
  saved_argmax = -peak_3;
}

// Reads x, position_along by (middle); writes out, saved_max, saved_argmax.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, float* __restrict__ out, float* __restrict__ saved_max,
    float* __restrict__ saved_argmax, ForwardSizes sizes, Size across, Index tiles) {
  const Positions<float> position_along{};
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
    const Index outer = above;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    Peak<float> peaks_1[1][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        forward_column_stage_1(x_value, peak_term_value);
        peaks_1[0][lane].add_if(is_here, peak_term_value);
      }
    }
    Peak<float> peaks_2[1][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float peak_2_value = peaks_1[0][lane].best;
        const float x_value = again(widen(x_in[p], lane));
        const float position_along_value = widen(position_along[middle]);
        float peak_3_term_value;
        forward_column_stage_2(x_value, peak_2_value, position_along_value, peak_3_term_value);
        peaks_2[0][lane].add_if(is_here, peak_3_term_value);
      }
    }
    {
      Pack<float, kLanes> out_out;
      Pack<float, kLanes> saved_max_out;
      Pack<float, kLanes> saved_argmax_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float peak_3_value = peaks_2[0][lane].best;
        float out_value;
        float saved_max_value;
        float saved_argmax_value;
        forward_column_row_values(peak_value, peak_3_value, out_value, saved_max_value, saved_argmax_value);
        out_out.at[lane] = narrow<float>(out_value);
        saved_max_out.at[lane] = narrow<float>(saved_max_value);
        saved_argmax_out.at[lane] = narrow<float>(saved_argmax_value);
      }
      const Index inner = beside;
      store(out + ((outer) * sizes.inner.value + inner), out_out);
      store(saved_max + ((outer) * sizes.inner.value + inner), saved_max_out);
      store(saved_argmax + ((outer) * sizes.inner.value + inner), saved_argmax_out);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_column_values_once(const float d_out, const float saved_max,
    float& d_after_max) {
  // tanh
  const float after_tanh = tanhf(saved_max);
  // backward, down to max(1)
  d_after_max = d_out * (1.0f - after_tanh * after_tanh);
}

__device__ __forceinline__ void backward_column_values(const float position_along, const float saved_argmax,
    const float d_after_max, float& d_x) {
  d_x = position_along == saved_argmax ? d_after_max : 0.0f;
}

// Reads position_along by (middle), saved_argmax by (outer, inner), d_out by (outer, inner), saved_max by (outer, inner); writes d_x.
__global__ void __launch_bounds__(128, 4)
backward_column(const float* __restrict__ saved_argmax, const float* __restrict__ d_out,
    const float* __restrict__ saved_max, float* __restrict__ d_x, BackwardSizes sizes, Size across,
    Index tiles) {
  const Positions<float> position_along{};
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
    const Index outer = above;
    float saved_argmax_here[kLanes];
    float d_out_here[kLanes];
    float saved_max_here[kLanes];
    {
      const Index inner = beside;
      const auto saved_argmax_in = load<kLanes>(saved_argmax + ((outer) * sizes.inner.value + inner));
      const auto d_out_in = load<kLanes>(d_out + ((outer) * sizes.inner.value + inner));
      const auto saved_max_in = load<kLanes>(saved_max + ((outer) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        saved_argmax_here[lane] = widen(saved_argmax_in, lane);
        d_out_here[lane] = widen(d_out_in, lane);
        saved_max_here[lane] = widen(saved_max_in, lane);
      }
    }
    float d_after_max_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float d_out_value = d_out_here[lane];
      const float saved_max_value = saved_max_here[lane];
      float d_after_max_value;
      backward_column_values_once(d_out_value, saved_max_value, d_after_max_value);
      d_after_max_beside[lane] = d_after_max_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float saved_argmax_value = saved_argmax_here[lane];
        const float position_along_value = widen(position_along[middle]);
        float d_x_value;
        const float d_after_max_value = d_after_max_beside[lane];
        backward_column_values(position_along_value, saved_argmax_value, d_after_max_value, d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      if (is_here) store(d_x + (base + i * behind), d_x_out);
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

// a: x, out, saved_max, saved_argmax, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const saved_max = reinterpret_cast<float*>(a[2]);
  auto* const saved_argmax = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
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
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x, out,
        saved_max, saved_argmax, sizes, size_of(forward_column_across),
        static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: saved_max, saved_argmax, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const saved_max = reinterpret_cast<const float*>(a[0]);
  auto* const saved_argmax = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const BackwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      backward_column_packs = static_cast<int64_t>(sizes.outer.value) * backward_column_across;
  const auto backward_column_beside = static_cast<unsigned>(power_of_two(backward_column_packs, 1, 32));
  const dim3 backward_column_block(backward_column_beside, 128 / backward_column_beside);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = ceil_divide(backward_column_tiles, backward_column_block.y);
  const int64_t backward_column_slots = backward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 0,
        stream>>>(saved_argmax, d_out, saved_max, d_x, sizes, size_of(backward_column_across),
        static_cast<Index>(backward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
