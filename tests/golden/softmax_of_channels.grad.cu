// fusegen 0.1.0   chain 9ce7cf08a2eb   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, out float32, saved_bound float32, saved_sum float32, x float32; 32-bit offsets
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

__device__ __forceinline__ void forward_column_row_values(const float peak, const float total,
    float& saved_bound, float& saved_sum) {
  saved_bound = peak;
  saved_sum = total;
}

// Reads x, bias by (middle); writes out, saved_bound, saved_sum.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ out,
    float* __restrict__ saved_bound, float* __restrict__ saved_sum, ForwardSizes sizes, Size across,
    Index tiles) {
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
    {
      Pack<float, kLanes> saved_bound_out;
      Pack<float, kLanes> saved_sum_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float total_value = sums_2[0][lane].total;
        float saved_bound_value;
        float saved_sum_value;
        forward_column_row_values(peak_value, total_value, saved_bound_value, saved_sum_value);
        saved_bound_out.at[lane] = narrow<float>(saved_bound_value);
        saved_sum_out.at[lane] = narrow<float>(saved_sum_value);
      }
      const Index inner = beside;
      store(saved_bound + ((outer) * sizes.inner.value + inner), saved_bound_out);
      store(saved_sum + ((outer) * sizes.inner.value + inner), saved_sum_out);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_column_stage_1_once(const float saved_sum, float& chosen,
    float& inverse) {
  const float abs_value = fabsf(saved_sum);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (saved_sum * chosen);
}

__device__ __forceinline__ void backward_column_stage_1(const float x, const float saved_bound,
    const float d_out, const float inverse, const float chosen, float& total_2_term, float& total_2_term_by,
    float& carried, float& carried_2, float& carried_3, float& total_term) {
  // gelu
  const float series = polynomial(fabsf(x), 0.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  const float after_gelu = x * 0.5f * (x < 0.0f ? power : 2.0f - power);
  total_2_term = expf(after_gelu - saved_bound);
  total_2_term_by = d_out;
  carried = d_out * inverse * chosen;
  carried_2 = x < 0.0f ? power : 2.0f - power;
  carried_3 = total_2_term;
  total_term = d_out;
}

__device__ __forceinline__ void backward_column_values_once(const float total_2, const float saved_sum,
    float& quotient) {
  quotient = total_2 / saved_sum / saved_sum;
}

__device__ __forceinline__ void backward_column_values(const float carried, const float quotient,
    const float carried_3, const float x, const float carried_2, float& d_x) {
  // backward, down to gelu
  const float d_after_gelu = (carried - quotient) * carried_3;
  const float sum = fmaf(x * 0.5f, exp2_flushed(fmaf(x * x, -0.721347511f, -0.325748056f)), carried_2 * 0.5f);
  d_x = d_after_gelu * sum;
}

// Reads x, d_out, saved_bound by (outer, inner), saved_sum by (outer, inner); leaves partials of total; writes d_x.
__global__ void __launch_bounds__(128, 4)
backward_column(const float* __restrict__ x, const float* __restrict__ saved_bound,
    const float* __restrict__ d_out, const float* __restrict__ saved_sum, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Size across, Index tiles) {
  constexpr int kLanes = 4, kPacks = 3;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const total_sum = reinterpret_cast<Sum<float>*>(room) + 0 + thread;
#pragma unroll
  for (int n = 0; n < 3; ++n) {
    total_sum[n * 128] = Sum<float>();
  }
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    const Index outer = above;
    Pack<float, kLanes> x_in[kPacks];
    Pack<float, kLanes> d_out_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
      if (is_here) d_out_in[p] = load<kLanes>(d_out + (base + i * behind));
    }
    float saved_bound_here[kLanes];
    float saved_sum_here[kLanes];
    {
      const Index inner = beside;
      const auto saved_bound_in = load<kLanes>(saved_bound + ((outer) * sizes.inner.value + inner));
      const auto saved_sum_in = load<kLanes>(saved_sum + ((outer) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        saved_bound_here[lane] = widen(saved_bound_in, lane);
        saved_sum_here[lane] = widen(saved_sum_in, lane);
      }
    }
    float chosen_beside[kLanes];
    float inverse_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float saved_sum_value = saved_sum_here[lane];
      float chosen_value;
      float inverse_value;
      backward_column_stage_1_once(saved_sum_value, chosen_value, inverse_value);
      chosen_beside[lane] = chosen_value;
      inverse_beside[lane] = inverse_value;
    }
    Sum<float> sums_1[1][kLanes];
    float carried[kPacks][kLanes];
    float carried_2[kPacks][kLanes];
    float carried_3[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float d_out_value = widen(d_out_in[p], lane);
        const float saved_bound_value = saved_bound_here[lane];
        float total_2_term_value;
        float total_2_term_by_value;
        float carried_value;
        float carried_2_value;
        float carried_3_value;
        float total_term_value;
        const float chosen_value = chosen_beside[lane];
        const float inverse_value = inverse_beside[lane];
        backward_column_stage_1(x_value, saved_bound_value, d_out_value, inverse_value, chosen_value,
            total_2_term_value, total_2_term_by_value, carried_value, carried_2_value, carried_3_value,
            total_term_value);
        if (is_here) sums_1[0][lane].add(total_2_term_value, total_2_term_by_value);
        carried[p][lane] = carried_value;
        carried_2[p][lane] = carried_2_value;
        carried_3[p][lane] = carried_3_value;
        if (is_here) total_sum[p * 128].add(total_term_value);
      }
    }
    float quotient_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_2_value = sums_1[0][lane].total;
      const float saved_sum_value = saved_sum_here[lane];
      float quotient_value;
      backward_column_values_once(total_2_value, saved_sum_value, quotient_value);
      quotient_beside[lane] = quotient_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = again(widen(x_in[p], lane));
        const float carried_value = carried[p][lane];
        const float carried_2_value = carried_2[p][lane];
        const float carried_3_value = carried_3[p][lane];
        float d_x_value;
        const float quotient_value = quotient_beside[lane];
        backward_column_values(carried_value, quotient_value, carried_3_value, x_value, carried_2_value,
            d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      if (is_here) store(d_x + (base + i * behind), d_x_out);
    }
  }
  constexpr int kWarps = 4;
  __shared__ Sum<float> cells_of_sums[1][kPacks][kWarps];
  const int place = (threadIdx.y * blockDim.x + threadIdx.x) % 32,
      warp = (threadIdx.y * blockDim.x + threadIdx.x) / 32;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    {
      Sum<float> total = total_sum[p * 128];
#pragma unroll
      for (int bit = 16; bit > 0; bit /= 2) total.merge(exchange(total, bit));
      if (place == 0) cells_of_sums[0][p][warp] = total;
    }
  }
  __syncthreads();
  for (int p = threadIdx.y * blockDim.x + threadIdx.x; p < kPacks; p += blockDim.x * blockDim.y) {
    {
      Sum<float> total;
      for (int other = 0; other < blockDim.x * blockDim.y / 32; ++other) total.merge(cells_of_sums[0][p][other]);
      total_partials[blockIdx.x * length + p] = total;
    }
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
  const Index columns = sizes.middle.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[(above * slots + slot) * columns + column];
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
  const Index middle = result;
  float d_bias_value;
  backward_finalise_values(total_value, d_bias_value);
  d_bias[middle] = narrow<float>(d_bias_value);
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

// How many blocks of a kernel the device works on at once, each with so much shared memory of its own, and at most so much
// in any launch. Asked once for each kernel, device and size of block: the runtime takes microseconds to answer.
template <typename Kernel>
static int64_t resident_blocks(Kernel* kernel, dim3 block, int64_t shared_bytes, int64_t most_bytes,
    int device) {
  struct Answer {
    Kernel* kernel;
    int64_t shared_bytes;
    int threads, device;
    int64_t blocks;
  };
  thread_local Answer answers[16] = {};
  thread_local int next = 0;
  const int threads = static_cast<int>(block.x * block.y);
  for (const Answer& known : answers) {
    if (known.kernel == kernel && known.shared_bytes == shared_bytes && known.threads == threads && known.device == device) {
      return known.blocks;
    }
  }
  int on_each = 0, processors = 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most_bytes));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, shared_bytes);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (on_each == 0) return 1;  // the launch will say why
  Answer& oldest = answers[next];
  next = (next + 1) % 16;
  oldest = {kernel, shared_bytes, threads, device, static_cast<int64_t>(on_each) * processors};
  return oldest.blocks;
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

// a: x, bias, out, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
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
        out, saved_bound, saved_sum, sizes, size_of(forward_column_across),
        static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, saved_bound, saved_sum, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[1]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_bias = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      backward_column_packs = static_cast<int64_t>(sizes.outer.value) * backward_column_across;
  const auto backward_column_beside = static_cast<unsigned>(power_of_two(backward_column_packs, 1, 32));
  const dim3 backward_column_block(backward_column_beside, 128 / backward_column_beside);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = ceil_divide(backward_column_tiles, backward_column_block.y);
  const int64_t backward_column_resident = resident_blocks(backward_column, backward_column_block, 1536,
      1536, device);
  const int64_t backward_column_slots = backward_column_tasks < backward_column_resident ? backward_column_tasks : backward_column_resident;
  const int64_t total_partials_slots = backward_column_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 1536, stream>>>(x,
        saved_bound, d_out, saved_sum, d_x, total_partials, sizes, size_of(backward_column_across),
        static_cast<Index>(backward_column_tiles));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.middle.value),
        results = static_cast<int64_t>(sizes.middle.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, d_bias, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
