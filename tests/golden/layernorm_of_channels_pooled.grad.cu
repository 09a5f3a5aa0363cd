// fusegen 0.1.0   chain 372f91b9ef81   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 32-bit offsets
//   layernorm(weight, bias, axis=1) | gelu | avg_pool2d(2)
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

// Merges the accumulators of the threads with the same x, in a fixed order: within warps, then over them.
template <template <typename> class Kind, typename T, int N, int L>
__device__ __forceinline__ void combine_across(Kind<T> (&mine)[N][L], T* cells, T* totals) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32,
      warps = blockDim.x * blockDim.y / 32;
  const int width = blockDim.x * N * L;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      for (int bit = blockDim.x; bit < 32; bit *= 2) mine[n][lane].merge(exchange(mine[n][lane], bit));
      if (thread % 32 < blockDim.x) cells[warp * width + threadIdx.x * N * L + n * L + lane] = mine[n][lane].number();
    }
  }
  __syncthreads();
  for (int i = thread; i < width; i += blockDim.x * blockDim.y) {
    Kind<T> all;
    for (int other = 0; other < warps; ++other) all.merge(Kind<T>{cells[other * width + i]});
    totals[i] = all.number();
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) mine[n][lane] = {totals[threadIdx.x * N * L + n * L + lane]};
  }
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

__device__ __forceinline__ void forward_bundle_stage_1(const float x, float& total_term) {
  total_term = x;
}

__device__ __forceinline__ void forward_bundle_stage_2(const float count_of_axis_1, float& held) {
  held = 1.0f / count_of_axis_1;
}

__device__ __forceinline__ void forward_bundle_stage_3(const float total, const float held, float& held_2,
    float& held_4, float& held_5) {
  held_2 = total * held;
  held_4 = held_2;
  held_5 = held_2;
}

__device__ __forceinline__ void forward_bundle_stage_4(const float x, const float held_2,
    float& total_2_term, float& total_2_term_by) {
  total_2_term = x - held_2;
  total_2_term_by = total_2_term;
}

__device__ __forceinline__ void forward_bundle_stage_5(const float total_2, const float held, float& held_3,
    float& held_6) {
  held_3 = rsqrtf(total_2 * held + 1e-05f);
  held_6 = total_2 * held;
}

__device__ __forceinline__ void forward_bundle_stage_6(const float x, const float held_4, const float held_3,
    const float weight, const float bias, float& total_3_term, float& total_3_term_by) {
  total_3_term = fmaf((x - held_4) * held_3, weight, bias);
  const float series = polynomial(fabsf(total_3_term), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  total_3_term_by = total_3_term < 0.0f ? power : 1.0f - power;
}

__device__ __forceinline__ void forward_bundle_stage_7(const float total_3, float& held_after_avg_pool2d) {
  // avg_pool2d(2)
  held_after_avg_pool2d = total_3 * 0.25f;
}

// Reads x, weight by (axis_1), bias by (axis_1); writes out, saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 2)
forward_bundle(const float* x, const float* weight, const float* bias, float* __restrict__ out,
    float* __restrict__ saved_mean, float* __restrict__ saved_variance, ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_axis_1_value = static_cast<float>(sizes.axis_1.value);
  // A thread has packs across neighbouring rows, for elements that are blockDim.y apart.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 2, kPacks = 2, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2048], totals[256];
  const Index length = sizes.axis_1.value;
  float weight_in[kPacks];
  float bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.y + p * blockDim.y;
    const Index axis_1 = i;
    if (i < length) weight_in[p] = weight[axis_1];
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.y + p * blockDim.y;
    const Index axis_1 = i;
    if (i < length) bias_in[p] = bias[axis_1];
  }
  const Index packs = sizes.outer.value * sizes.axis_2.value * sizes.inner.value / kWindows;
  for (Index first = blockIdx.x * blockDim.x; first < packs; first += gridDim.x * blockDim.x) {
    const bool is_live = first + threadIdx.x < packs;
    const Index bundle = is_live ? (first + threadIdx.x) * kWindows : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_inner = divide(bundle, sizes.inner);
    const Index inner = bundle - above_inner * sizes.inner.value;
    const Index above_axis_2 = divide(above_inner, sizes.axis_2);
    const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    Pack<float, kLanes> x_in[kRows][kPacks];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const int window_1 = r;
        const int window_2 = 0;
        const Index axis_1 = i;
        if (i < end) x_in[r][p] = load<kLanes>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
      }
    }
    Sum<float> sums_1[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          float total_term_value;
          forward_bundle_stage_1(x_value, total_term_value);
          if (is_here) sums_1[r][lane].add(total_term_value);
        }
      }
    }
    combine_across(sums_1, cells, totals);
    float held_here[kWindows];
#pragma unroll
    for (int beside = 0; beside < kWindows; ++beside) {
      float held_value;
      forward_bundle_stage_2(count_of_axis_1_value, held_value);
      held_here[beside] = held_value;
    }
    float held_2_here[kRows][kLanes];
    float held_4_here[kRows][kLanes];
    float held_5_here[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_value = sums_1[r][lane].total;
        const float held_value = held_here[lane / kInner];
        float held_2_value;
        float held_4_value;
        float held_5_value;
        forward_bundle_stage_3(total_value, held_value, held_2_value, held_4_value, held_5_value);
        held_2_here[r][lane] = held_2_value;
        held_4_here[r][lane] = held_4_value;
        held_5_here[r][lane] = held_5_value;
      }
    }
    Sum<float> sums_4[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float held_2_value = held_2_here[r][lane];
          float total_2_term_value;
          float total_2_term_by_value;
          forward_bundle_stage_4(x_value, held_2_value, total_2_term_value, total_2_term_by_value);
          if (is_here) sums_4[r][lane].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine_across(sums_4, cells, totals);
    float held_3_here[kRows][kLanes];
    float held_6_here[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_2_value = sums_4[r][lane].total;
        const float held_value = held_here[lane / kInner];
        float held_3_value;
        float held_6_value;
        forward_bundle_stage_5(total_2_value, held_value, held_3_value, held_6_value);
        held_3_here[r][lane] = held_3_value;
        held_6_here[r][lane] = held_6_value;
      }
    }
    Sum<float> total_3_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float held_4_value = held_4_here[r][lane];
          const float held_3_value = held_3_here[r][lane];
          const float weight_value = widen(weight_in[p]);
          const float bias_value = widen(bias_in[p]);
          float total_3_term_value;
          float total_3_term_by_value;
          forward_bundle_stage_6(x_value, held_4_value, held_3_value, weight_value, bias_value,
              total_3_term_value, total_3_term_by_value);
          total_3_sum[p][lane / kInner].add(total_3_term_value, total_3_term_by_value);
        }
      }
    }
    float held_after_avg_pool2d_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float total_3_value = total_3_sum[p][beside].sum();
        float held_after_avg_pool2d_value;
        forward_bundle_stage_7(total_3_value, held_after_avg_pool2d_value);
        held_after_avg_pool2d_here[p][beside] = held_after_avg_pool2d_value;
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.y + p * blockDim.y;
      const Index axis_1 = i;
      Pack<float, kWindows> out_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        out_out.at[beside] = narrow<float>(held_after_avg_pool2d_here[p][beside]);
      }
      if (i < end) store(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, out_out);
    }
    if (is_live && threadIdx.y == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r;
        const int window_2 = 0;
        Pack<float, kLanes> saved_mean_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          saved_mean_out.at[lane] = narrow<float>(held_5_here[r][lane]);
        }
        store(saved_mean + ((outer) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), saved_mean_out);
      }
    }
    if (is_live && threadIdx.y == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r;
        const int window_2 = 0;
        Pack<float, kLanes> saved_variance_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          saved_variance_out.at[lane] = narrow<float>(held_6_here[r][lane]);
        }
        store(saved_variance + ((outer) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), saved_variance_out);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_bundle_stage_1(const float saved_variance, float& held) {
  held = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_bundle_stage_2(const float d_out, float& held_d_after_gelu) {
  // backward, down to gelu
  held_d_after_gelu = d_out * 0.25f;
}

__device__ __forceinline__ void backward_bundle_stage_3(const float held_d_after_gelu, const float x,
    const float saved_mean, const float held, const float weight, const float bias, float& total_3_term,
    float& total_3_term_by, float& total_4_term, float& total_4_term_by, float& held_5, float& total_term,
    float& total_term_by, float& total_2_term, float& total_2_term_by) {
  // layernorm(weight, bias, axis=1)
  const float after_layernorm = fmaf((x - saved_mean) * held, weight, bias);
  // backward, down to layernorm(weight, bias, axis=1)
  const float sum = fmaf(after_layernorm * after_layernorm, -0.721347511f, -1.32574809f);
  const float series = polynomial(fabsf(after_layernorm), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  const float sum_2 = fmaf(after_layernorm, exp2_flushed(sum), after_layernorm < 0.0f ? power : 1.0f - power);
  const float d_after_layernorm = held_d_after_gelu * sum_2;
  total_3_term = d_after_layernorm * weight;
  total_3_term_by = x - saved_mean;
  total_4_term = d_after_layernorm;
  total_4_term_by = weight;
  held_5 = total_3_term * held;
  total_term = d_after_layernorm;
  total_term_by = total_3_term_by * held;
  total_2_term = held_d_after_gelu;
  total_2_term_by = sum_2;
}

__device__ __forceinline__ void backward_bundle_stage_4(const float total_4, const float held,
    const float count_of_axis_1, const float total_3, float& held_2, float& held_3) {
  const float quotient = 1.0f / count_of_axis_1;
  held_2 = total_4 * held * quotient;
  held_3 = -(total_3 * held * held * held) * quotient;
}

__device__ __forceinline__ void backward_bundle_stage_5(const float x, const float saved_mean,
    const float held_3, const float held_5, const float held_2, float& held_4) {
  held_4 = fmaf(x - saved_mean, held_3, held_5) - held_2;
}

// Reads x, saved_variance by (outer, axis_2, inner, window_1, window_2), d_out by (outer, axis_1, axis_2, inner), saved_mean by (outer, axis_2, inner, window_1, window_2), weight by (axis_1), bias by (axis_1); leaves partials of total, total_2; writes d_x.
__global__ void __launch_bounds__(256, 2)
backward_bundle(const float* saved_variance, const float* d_out, const float* x, const float* saved_mean,
    const float* weight, const float* bias, float* __restrict__ d_x, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_axis_1_value = static_cast<float>(sizes.axis_1.value);
  // A thread has packs across neighbouring rows, for elements that are blockDim.y apart.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 2, kPacks = 2, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[4096], totals[512];
  const Index length = sizes.axis_1.value;
  Sum<float> total_sum[kPacks];
  Sum<float> total_2_sum[kPacks];
  float weight_in[kPacks];
  float bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.y + p * blockDim.y;
    const Index axis_1 = i;
    if (i < length) weight_in[p] = weight[axis_1];
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.y + p * blockDim.y;
    const Index axis_1 = i;
    if (i < length) bias_in[p] = bias[axis_1];
  }
  const Index packs = sizes.outer.value * sizes.axis_2.value * sizes.inner.value / kWindows;
  for (Index first = blockIdx.x * blockDim.x; first < packs; first += gridDim.x * blockDim.x) {
    const bool is_live = first + threadIdx.x < packs;
    const Index bundle = is_live ? (first + threadIdx.x) * kWindows : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_inner = divide(bundle, sizes.inner);
    const Index inner = bundle - above_inner * sizes.inner.value;
    const Index above_axis_2 = divide(above_inner, sizes.axis_2);
    const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    Pack<float, kLanes> x_in[kRows][kPacks];
    Pack<float, kWindows> d_out_in[kPacks];
    Pack<float, kLanes> saved_variance_in[kRows];
    Pack<float, kLanes> saved_mean_in[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const int window_1 = r;
        const int window_2 = 0;
        const Index axis_1 = i;
        if (i < end) x_in[r][p] = load<kLanes>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.y + p * blockDim.y;
      const Index axis_1 = i;
      if (i < end) d_out_in[p] = load<kWindows>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r;
      const int window_2 = 0;
      saved_variance_in[r] = load<kLanes>(saved_variance + ((outer) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r;
      const int window_2 = 0;
      saved_mean_in[r] = load<kLanes>(saved_mean + ((outer) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
    }
    float held_here[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float saved_variance_value = widen(saved_variance_in[r], lane);
        float held_value;
        backward_bundle_stage_1(saved_variance_value, held_value);
        held_here[r][lane] = held_value;
      }
    }
    float held_d_after_gelu_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float d_out_value = widen(d_out_in[p], beside);
        float held_d_after_gelu_value;
        backward_bundle_stage_2(d_out_value, held_d_after_gelu_value);
        held_d_after_gelu_here[p][beside] = held_d_after_gelu_value;
      }
    }
    float held_5_here[kRows][kPacks][kLanes];
    Sum<float> sums_3[2 * kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float held_d_after_gelu_value = held_d_after_gelu_here[p][lane / kInner];
          const float x_value = widen(x_in[r][p], lane);
          const float saved_mean_value = widen(saved_mean_in[r], lane);
          const float held_value = held_here[r][lane];
          const float weight_value = widen(weight_in[p]);
          const float bias_value = widen(bias_in[p]);
          float total_3_term_value;
          float total_3_term_by_value;
          float total_4_term_value;
          float total_4_term_by_value;
          float held_5_value;
          float total_term_value;
          float total_term_by_value;
          float total_2_term_value;
          float total_2_term_by_value;
          backward_bundle_stage_3(held_d_after_gelu_value, x_value, saved_mean_value, held_value,
              weight_value, bias_value, total_3_term_value, total_3_term_by_value, total_4_term_value,
              total_4_term_by_value, held_5_value, total_term_value, total_term_by_value, total_2_term_value,
              total_2_term_by_value);
          held_5_here[r][p][lane] = held_5_value;
          if (is_here) sums_3[r][lane].add(total_3_term_value, total_3_term_by_value);
          if (is_here) sums_3[kRows + r][lane].add(total_4_term_value, total_4_term_by_value);
          if (is_here) total_sum[p].add(total_term_value, total_term_by_value);
          if (is_here) total_2_sum[p].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine_across(sums_3, cells, totals);
    float held_2_here[kRows][kLanes];
    float held_3_here[kRows][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_4_value = sums_3[kRows + r][lane].total;
        const float held_value = held_here[r][lane];
        const float total_3_value = sums_3[r][lane].total;
        float held_2_value;
        float held_3_value;
        backward_bundle_stage_4(total_4_value, held_value, count_of_axis_1_value, total_3_value,
            held_2_value, held_3_value);
        held_2_here[r][lane] = held_2_value;
        held_3_here[r][lane] = held_3_value;
      }
    }
    float held_4_here[kRows][kPacks][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float saved_mean_value = widen(saved_mean_in[r], lane);
          const float held_3_value = held_3_here[r][lane];
          const float held_5_value = held_5_here[r][p][lane];
          const float held_2_value = held_2_here[r][lane];
          float held_4_value;
          backward_bundle_stage_5(x_value, saved_mean_value, held_3_value, held_5_value, held_2_value,
              held_4_value);
          held_4_here[r][p][lane] = held_4_value;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = threadIdx.y + p * blockDim.y;
        const int window_1 = r;
        const int window_2 = 0;
        const Index axis_1 = i;
        Pack<float, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          d_x_out.at[lane] = narrow<float>(held_4_here[r][p][lane]);
        }
        if (i < end) store(d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), d_x_out);
      }
    }
  }
  // One partial for each column and block: the bundles that the block took side by side are merged here.
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.y + p * blockDim.y;
    const bool is_mine = threadIdx.x == 0 && i < length;
    for (int bit = 1; bit < blockDim.x; bit *= 2) total_sum[p].merge(exchange(total_sum[p], bit));
    if (is_mine) total_partials[blockIdx.x * length + i] = total_sum[p];
    for (int bit = 1; bit < blockDim.x; bit *= 2) total_2_sum[p].merge(exchange(total_2_sum[p], bit));
    if (is_mine) total_2_partials[blockIdx.x * length + i] = total_2_sum[p];
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float total_2,
    float& d_weight, float& d_bias) {
  d_weight = total;
  d_bias = total_2;
}

// Merges partials into total, total_2; writes d_weight, d_bias.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias, const Sum<float>* total_partials,
    const Sum<float>* total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.axis_1.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  Sum<double> total_2_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
      Sum<float> total_2_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[(above * slots + slot) * columns + column];
        total_2_next[n] = total_2_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_sum.merge(total_next[n]);
        total_2_sum.merge(total_2_next[n]);
      }
    }
  }
  merge_trees(shared, total_sum, total_2_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const float total_2_value = static_cast<float>(total_2_sum.sum());
  const Index axis_1 = result;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_values(total_value, total_2_value, d_weight_value, d_bias_value);
  d_weight[axis_1] = narrow<float>(d_weight_value);
  d_bias[axis_1] = narrow<float>(d_bias_value);
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

// Threads beside each other along x, in whole warps with those along a strided row.
static dim3 column_block(int64_t beside, int64_t along, int64_t most_beside, int64_t most) {
  int64_t x = power_of_two(beside, 1, most_beside);
  while (x > 1 && x * ceil_divide(along, 32 / x) * (32 / x) > most) x /= 2;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_divide(along, 32 / x) * (32 / x)));
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

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[3] | a[4] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]),
      size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const int64_t forward_bundle_across = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) / 2;
  const dim3 forward_bundle_block = column_block(forward_bundle_across,
      ceil_divide(static_cast<int64_t>(sizes.axis_1.value), 2), 32, 256);
  const int64_t forward_bundle_tasks = ceil_divide(forward_bundle_across, forward_bundle_block.x);
  const int64_t forward_bundle_resident = resident_blocks(forward_bundle, forward_bundle_block, 0, 0, device);
  const int64_t forward_bundle_slots = forward_bundle_tasks < forward_bundle_resident ? forward_bundle_tasks : forward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_bundle, static_cast<unsigned>(forward_bundle_slots), forward_bundle_block, 0, stream, x,
        weight, bias, out, saved_mean, saved_variance, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, bias, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const float*>(a[5]);
  auto* const d_x = reinterpret_cast<float*>(a[6]);
  auto* const d_weight = reinterpret_cast<float*>(a[7]);
  auto* const d_bias = reinterpret_cast<float*>(a[8]);
  const bool is_measuring = a[9] == -1;
  if (!is_measuring && ((a[0] | a[3] | a[4] | a[5] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ size_of(a[10]), size_of(a[11]), size_of(a[12]), size_of(a[13]), size_of(a[14]),
      size_of(a[15]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[17]);
  const int device = static_cast<int>(a[16]);
  const DeviceGuard guard(device);
  const int64_t backward_bundle_across = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) / 2;
  const dim3 backward_bundle_block = column_block(backward_bundle_across,
      ceil_divide(static_cast<int64_t>(sizes.axis_1.value), 2), 32, 256);
  const int64_t backward_bundle_tasks = ceil_divide(backward_bundle_across, backward_bundle_block.x);
  const int64_t backward_bundle_resident = resident_blocks(backward_bundle, backward_bundle_block, 0, 0,
      device);
  const int64_t backward_bundle_slots = backward_bundle_tasks < backward_bundle_resident ? backward_bundle_tasks : backward_bundle_resident;
  const int64_t total_partials_slots = backward_bundle_slots;
  const int64_t total_2_partials_slots = backward_bundle_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  {
    follow(backward_bundle, static_cast<unsigned>(backward_bundle_slots), backward_bundle_block, 0, stream,
        saved_variance, d_out, x, saved_mean, weight, bias, d_x, total_partials, total_2_partials, sizes);
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.axis_1.value),
        results = static_cast<int64_t>(sizes.axis_1.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, d_weight, d_bias, total_partials, total_2_partials,
        sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
