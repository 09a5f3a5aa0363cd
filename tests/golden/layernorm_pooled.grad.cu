// fusegen 0.1.0   chain 8c6971b5613f   signature forward+backward: bias float32, d_bias float32, d_out float32, d_p_operand float32, d_weight float32, d_x float32, out float32, p_operand float32, saved_mean float32, saved_variance float32, weight float32, x float32; 32-bit offsets
//   add(p) | layernorm(weight, bias) | avg_pool3d(2) | gelu
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

// What a block's threads have of columns, N neighbours each: merged over its rows in a fixed tree, and left for as many columns
// as there are, as they lie. Of a thread's N cells each is in a part of its own, for threads beside each other to use other
// banks; all are free again afterwards.
template <typename Accumulator, int N>
__device__ __forceinline__ void leave_columns(const Accumulator (&mine)[N], void* memory,
    Accumulator* partials,
    int64_t columns) {
  Accumulator* const cells = static_cast<Accumulator*>(memory);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  const int part = threads + (N < 32 ? 32 / N : 1);
#pragma unroll
  for (int n = 0; n < N; ++n) cells[n * part + thread] = mine[n];
  __syncthreads();
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (threadIdx.y < rows - half) {
#pragma unroll
      for (int n = 0; n < N; ++n) cells[n * part + thread].merge(cells[n * part + thread + half * blockDim.x]);
    }
    rows = half;
    __syncthreads();
  }
  for (int n = thread; n < min(columns, static_cast<int64_t>(blockDim.x * N)); n += threads) {
    partials[n] = cells[n % N * part + n / N];
  }
  __syncthreads();
}

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
}

// Merges a row's accumulators over its threads, in a fixed tree: within each warp, then over the warps, kWarps at most.
// A row has a power of two of threads, or whole warps; kIsWide, more than one. The cells are free again two calls later.
// Not for all, only the first warp knows.
template <int kWarps, bool kIsWide, bool kForAll = true, template <typename> class Kind, typename T, int N>
__device__ __forceinline__ void combine(Kind<T> (&mine)[N], T* cells) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].merge(exchange(mine[n], bit));
  }
  if (!kIsWide && blockDim.x <= 32) return;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, place = threadIdx.x % 32;
  T* const row_cells = cells + threadIdx.y * warps * N;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (place == 0) row_cells[warp * N + n] = mine[n].number();
  }
  __syncthreads();
  if (!kForAll && warp > 0) return;
  const int other = place % kWarps;
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n] = other < warps ? Kind<T>{row_cells[other * N + n]} : Kind<T>();
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].merge(exchange(mine[n], bit));
  }
}

// Merges the accumulators of a block's rows, in order, into the first row's.
template <typename T>
[[maybe_unused]] __device__ __forceinline__ void merge_beside(Sum<T>& mine, Sum<T>* cells) {
  if (blockDim.y == 1) return;
  cells[threadIdx.y * blockDim.x + threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y == 0) {
    for (int other = 1; other < blockDim.y; ++other) mine.merge(cells[other * blockDim.x + threadIdx.x]);
  }
  __syncthreads();
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_bundle_stage_1(const float x, const float p_operand,
    float& total_term) {
  // add(p)
  total_term = x + p_operand;
}

__device__ __forceinline__ void forward_bundle_stage_2(const float count_of_window_3_inner, float& held) {
  held = 1.0f / count_of_window_3_inner;
}

__device__ __forceinline__ void forward_bundle_stage_3(const float total, const float held, float& held_2,
    float& held_4, float& held_5) {
  held_2 = total * held;
  held_4 = held_2;
  held_5 = held_2;
}

__device__ __forceinline__ void forward_bundle_stage_4(const float x, const float p_operand,
    const float held_2, float& total_2_term, float& total_2_term_by) {
  // add(p)
  const float after_add = x + p_operand;
  total_2_term = after_add - held_2;
  total_2_term_by = total_2_term;
}

__device__ __forceinline__ void forward_bundle_stage_5(const float total_2, const float held, float& held_3,
    float& held_6) {
  held_3 = rsqrtf(total_2 * held + 1e-05f);
  held_6 = total_2 * held;
}

__device__ __forceinline__ void forward_bundle_stage_6(const float x, const float p_operand,
    const float held_4, const float held_3, const float weight, const float bias, float& total_3_term) {
  // add(p)
  const float after_add = x + p_operand;
  total_3_term = fmaf((after_add - held_4) * held_3, weight, bias);
}

__device__ __forceinline__ void forward_bundle_stage_7(const float total_3, float& held_after_gelu) {
  // avg_pool3d(2)
  const float after_avg_pool3d = total_3 * 0.125f;
  // gelu
  const float series = polynomial(fabsf(total_3), -1.0f, -0.14388819f, -0.00717514241f, -0.000102487902f,
      1.70592193e-06f, -7.66805119e-10f, -1.03863085e-09f, 3.61999007e-11f, -6.67045412e-13f,
      6.80431011e-15f, -3.02099992e-17f);
  const float power = exp2_flushed(series);
  held_after_gelu = after_avg_pool3d * (total_3 < 0.0f ? power : 1.0f - power);
}

// Reads x, p_operand by (), weight by (inner, window_3), bias by (inner, window_3); writes out, saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 3)
forward_bundle(const float* x, const float* p_operand, const float* weight, const float* bias,
    float* __restrict__ out, float* __restrict__ saved_mean, float* __restrict__ saved_variance,
    ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_3_inner_value = static_cast<float>(2 * sizes.inner.value);
  // A thread has packs of each of a bundle's rows.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 4, kPacks = 1, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2][32];
  int turn = 0;
  const Index length = sizes.inner.value * 2;
  Pack<float, kLanes> weight_in[kPacks];
  Pack<float, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) bias_in[p] = load<kLanes>(bias + i);
  }
  const Index bundles = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
  for (Index first = blockIdx.x * blockDim.y; first < bundles; first += gridDim.x * blockDim.y) {
    const bool is_live = first + threadIdx.y < bundles;
    const Index bundle = is_live ? first + threadIdx.y : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_axis_2 = divide(bundle, sizes.axis_2);
    const Index axis_2 = bundle - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Pack<float, kLanes> x_in[kRows][kPacks];
    float p_operand_in;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        if (i < end) x_in[r][p] = load<kLanes>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * length + i);
      }
    }
    p_operand_in = p_operand[0];
    Sum<float> sums_1[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          float total_term_value;
          forward_bundle_stage_1(x_value, p_operand_value, total_term_value);
          if (is_here) sums_1[r].add(total_term_value);
        }
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    float held_here;
    {
      float held_value;
      forward_bundle_stage_2(count_of_window_3_inner_value, held_value);
      held_here = held_value;
    }
    float held_2_here[kRows];
    float held_4_here[kRows];
    float held_5_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_value = sums_1[r].total;
      const float held_value = held_here;
      float held_2_value;
      float held_4_value;
      float held_5_value;
      forward_bundle_stage_3(total_value, held_value, held_2_value, held_4_value, held_5_value);
      held_2_here[r] = held_2_value;
      held_4_here[r] = held_4_value;
      held_5_here[r] = held_5_value;
    }
    Sum<float> sums_4[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float held_2_value = held_2_here[r];
          float total_2_term_value;
          float total_2_term_by_value;
          forward_bundle_stage_4(x_value, p_operand_value, held_2_value, total_2_term_value,
              total_2_term_by_value);
          if (is_here) sums_4[r].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine<8, false>(sums_4, cells[turn++ & 1]);
    float held_3_here[kRows];
    float held_6_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_2_value = sums_4[r].total;
      const float held_value = held_here;
      float held_3_value;
      float held_6_value;
      forward_bundle_stage_5(total_2_value, held_value, held_3_value, held_6_value);
      held_3_here[r] = held_3_value;
      held_6_here[r] = held_6_value;
    }
    Sum<float> total_3_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float held_4_value = held_4_here[r];
          const float held_3_value = held_3_here[r];
          const float weight_value = widen(weight_in[p], lane);
          const float bias_value = widen(bias_in[p], lane);
          float total_3_term_value;
          forward_bundle_stage_6(x_value, p_operand_value, held_4_value, held_3_value, weight_value,
              bias_value, total_3_term_value);
          total_3_sum[p][lane / kInner].add(total_3_term_value);
        }
      }
    }
    float held_after_gelu_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float total_3_value = total_3_sum[p][beside].sum();
        float held_after_gelu_value;
        forward_bundle_stage_7(total_3_value, held_after_gelu_value);
        held_after_gelu_here[p][beside] = held_after_gelu_value;
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      Pack<float, kWindows> out_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        out_out.at[beside] = narrow<float>(held_after_gelu_here[p][beside]);
      }
      if (i < end) store(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * (length / kInner) + i / kInner, out_out);
    }
    if (is_live && threadIdx.x == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        saved_mean[((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)] = narrow<float>(held_5_here[r]);
      }
    }
    if (is_live && threadIdx.x == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        saved_variance[((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)] = narrow<float>(held_6_here[r]);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_bundle_stage_1(const float saved_variance, float& held) {
  held = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_bundle_stage_2(const float x, const float p_operand,
    const float saved_mean, const float held, const float weight, const float bias, float& total_4_term) {
  // add(p)
  const float after_add = x + p_operand;
  // layernorm(weight, bias)
  total_4_term = fmaf((after_add - saved_mean) * held, weight, bias);
}

__device__ __forceinline__ void backward_bundle_stage_3(const float d_out, const float total_4,
    float& held_2, float& held_6, float& total_3_term, float& total_3_term_by) {
  // avg_pool3d(2)
  const float after_avg_pool3d = total_4 * 0.125f;
  // backward, down to avg_pool3d(2)
  const float power = exp2_flushed(fmaf(total_4 * total_4, -0.0112710549f, -1.32574809f));
  const float series = polynomial(fabsf(total_4), -1.0f, -0.14388819f, -0.00717514241f, -0.000102487902f,
      1.70592193e-06f, -7.66805119e-10f, -1.03863085e-09f, 3.61999007e-11f, -6.67045412e-13f,
      6.80431011e-15f, -3.02099992e-17f);
  const float power_2 = exp2_flushed(series);
  const float sum = fmaf(after_avg_pool3d, power, total_4 < 0.0f ? power_2 : 1.0f - power_2);
  const float d_after_avg_pool3d = d_out * sum;
  // backward, down to layernorm(weight, bias)
  held_2 = d_after_avg_pool3d * 0.125f;
  held_6 = d_after_avg_pool3d;
  total_3_term = d_out;
  total_3_term_by = sum;
}

__device__ __forceinline__ void backward_bundle_stage_4(const float held_2, const float weight,
    float& total_6_term, float& total_6_term_by, float& held_3) {
  total_6_term = held_2;
  total_6_term_by = weight;
  held_3 = held_2 * weight;
}

__device__ __forceinline__ void backward_bundle_stage_5(const float held_3, const float x,
    const float p_operand, const float saved_mean, const float held_6, const float held, float& total_5_term,
    float& total_5_term_by, float& total_2_term, float& total_2_term_by) {
  // add(p)
  const float after_add = x + p_operand;
  total_5_term = held_3;
  total_5_term_by = after_add - saved_mean;
  total_2_term = held_6;
  total_2_term_by = total_5_term_by * held;
}

__device__ __forceinline__ void backward_bundle_stage_6(const float total_6, const float held,
    const float count_of_window_3_inner, const float total_5, float& held_4, float& held_5) {
  const float quotient = 1.0f / count_of_window_3_inner;
  held_4 = total_6 * held * quotient;
  held_5 = -(total_5 * held * held * held) * quotient;
}

__device__ __forceinline__ void backward_bundle_stage_7(const float x, const float p_operand,
    const float saved_mean, const float held_5, const float held_3, const float held, const float held_4,
    float& held_d_after_add) {
  // add(p)
  const float after_add = x + p_operand;
  held_d_after_add = fmaf(after_add - saved_mean, held_5, held_3 * held) - held_4;
}

__device__ __forceinline__ void backward_bundle_stage_8(const float held_d_after_add, float& total_term) {
  total_term = held_d_after_add;
}

// Reads x, saved_variance by (outer, axis_1, axis_2, window_1, window_2), p_operand by (), saved_mean by (outer, axis_1, axis_2, window_1, window_2), weight by (inner, window_3), bias by (inner, window_3), d_out by (outer, axis_1, axis_2, inner); leaves partials of total_3, total_2, total; writes d_x.
__global__ void __launch_bounds__(256, 2)
backward_bundle(const float* saved_variance, const float* x, const float* p_operand, const float* saved_mean,
    const float* weight, const float* bias, const float* d_out, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_3_partials, Sum<float>* __restrict__ total_2_partials,
    Sum<float>* __restrict__ total_partials, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_3_inner_value = static_cast<float>(2 * sizes.inner.value);
  // A thread has packs of each of a bundle's rows.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 4, kPacks = 1, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2][32];
  int turn = 0;
  const Index length = sizes.inner.value * 2;
  Sum<float> total_3_sum[kPacks][kWindows];
  Sum<float> total_2_sum[kPacks][kLanes];
  Sum<float> total_sum;
  Pack<float, kLanes> weight_in[kPacks];
  Pack<float, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) bias_in[p] = load<kLanes>(bias + i);
  }
  const Index bundles = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
  for (Index first = blockIdx.x * blockDim.y; first < bundles; first += gridDim.x * blockDim.y) {
    const bool is_live = first + threadIdx.y < bundles;
    const Index bundle = is_live ? first + threadIdx.y : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_axis_2 = divide(bundle, sizes.axis_2);
    const Index axis_2 = bundle - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Pack<float, kLanes> x_in[kRows][kPacks];
    Pack<float, kWindows> d_out_in[kPacks];
    float saved_variance_in[kRows];
    float saved_mean_in[kRows];
    float p_operand_in;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        if (i < end) x_in[r][p] = load<kLanes>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * length + i);
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      if (i < end) d_out_in[p] = load<kWindows>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * (length / kInner) + i / kInner);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r / 2;
      const int window_2 = r % 2;
      saved_variance_in[r] = saved_variance[((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int window_1 = r / 2;
      const int window_2 = r % 2;
      saved_mean_in[r] = saved_mean[((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)];
    }
    p_operand_in = p_operand[0];
    float held_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float saved_variance_value = widen(saved_variance_in[r]);
      float held_value;
      backward_bundle_stage_1(saved_variance_value, held_value);
      held_here[r] = held_value;
    }
    Sum<float> total_4_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float saved_mean_value = widen(saved_mean_in[r]);
          const float held_value = held_here[r];
          const float weight_value = widen(weight_in[p], lane);
          const float bias_value = widen(bias_in[p], lane);
          float total_4_term_value;
          backward_bundle_stage_2(x_value, p_operand_value, saved_mean_value, held_value, weight_value,
              bias_value, total_4_term_value);
          total_4_sum[p][lane / kInner].add(total_4_term_value);
        }
      }
    }
    float held_2_here[kPacks][kWindows];
    float held_6_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float d_out_value = widen(d_out_in[p], beside);
        const float total_4_value = total_4_sum[p][beside].sum();
        float held_2_value;
        float held_6_value;
        float total_3_term_value;
        float total_3_term_by_value;
        backward_bundle_stage_3(d_out_value, total_4_value, held_2_value, held_6_value, total_3_term_value,
            total_3_term_by_value);
        held_2_here[p][beside] = held_2_value;
        held_6_here[p][beside] = held_6_value;
        if (is_here) total_3_sum[p][beside].add(total_3_term_value, total_3_term_by_value);
      }
    }
    float held_3_here[kPacks][kLanes];
    Sum<float> sums_4[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float held_2_value = held_2_here[p][lane / kInner];
        const float weight_value = widen(weight_in[p], lane);
        float total_6_term_value;
        float total_6_term_by_value;
        float held_3_value;
        backward_bundle_stage_4(held_2_value, weight_value, total_6_term_value, total_6_term_by_value,
            held_3_value);
        held_3_here[p][lane] = held_3_value;
        if (is_here) sums_4[0].add(total_6_term_value, total_6_term_by_value);
      }
    }
    combine<8, false>(sums_4, cells[turn++ & 1]);
    Sum<float> sums_5[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float held_3_value = held_3_here[p][lane];
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float saved_mean_value = widen(saved_mean_in[r]);
          const float held_6_value = held_6_here[p][lane / kInner];
          const float held_value = held_here[r];
          float total_5_term_value;
          float total_5_term_by_value;
          float total_2_term_value;
          float total_2_term_by_value;
          backward_bundle_stage_5(held_3_value, x_value, p_operand_value, saved_mean_value, held_6_value,
              held_value, total_5_term_value, total_5_term_by_value, total_2_term_value,
              total_2_term_by_value);
          if (is_here) sums_5[r].add(total_5_term_value, total_5_term_by_value);
          if (is_here) total_2_sum[p][lane].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine<8, false>(sums_5, cells[turn++ & 1]);
    float held_4_here[kRows];
    float held_5_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_6_value = sums_4[0].total;
      const float held_value = held_here[r];
      const float total_5_value = sums_5[r].total;
      float held_4_value;
      float held_5_value;
      backward_bundle_stage_6(total_6_value, held_value, count_of_window_3_inner_value, total_5_value,
          held_4_value, held_5_value);
      held_4_here[r] = held_4_value;
      held_5_here[r] = held_5_value;
    }
    float held_d_after_add_here[kRows][kPacks][kLanes];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float saved_mean_value = widen(saved_mean_in[r]);
          const float held_5_value = held_5_here[r];
          const float held_3_value = held_3_here[p][lane];
          const float held_value = held_here[r];
          const float held_4_value = held_4_here[r];
          float held_d_after_add_value;
          backward_bundle_stage_7(x_value, p_operand_value, saved_mean_value, held_5_value, held_3_value,
              held_value, held_4_value, held_d_after_add_value);
          held_d_after_add_here[r][p][lane] = held_d_after_add_value;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float held_d_after_add_value = held_d_after_add_here[r][p][lane];
          float total_term_value;
          backward_bundle_stage_8(held_d_after_add_value, total_term_value);
          if (is_here) total_sum.add(total_term_value);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        Pack<float, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          d_x_out.at[lane] = narrow<float>(held_d_after_add_here[r][p][lane]);
        }
        if (i < end) store(d_x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * length + i, d_x_out);
      }
    }
  }
  // One partial for each column and block: the bundles that the block took side by side are merged here.
  __shared__ alignas(16) Sum<float> cells_of_sums[1056];
  Sum<float> total_row[1] = { total_sum };
  combine<8, false>(total_row, cells[turn++ & 1]);
  merge_beside(total_row[0], cells_of_sums);
  if (threadIdx.x + threadIdx.y == 0) total_partials[blockIdx.x] = total_row[0];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    leave_columns(total_3_sum[p], cells_of_sums,
        total_3_partials + (blockIdx.x * (length / kInner) + p * blockDim.x * kWindows),
        static_cast<int64_t>((length / kInner)) - p * blockDim.x * kWindows);
    leave_columns(total_2_sum[p], cells_of_sums,
        total_2_partials + (blockIdx.x * length + p * blockDim.x * kLanes),
        static_cast<int64_t>(length) - p * blockDim.x * kLanes);
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_p_operand) {
  d_p_operand = total;
}

// Merges partials into total; writes d_p_operand.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_p_operand, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < 1;
  Sum<double> total_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[result * slots + slot];
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
  float d_p_operand_value;
  backward_finalise_values(total_value, d_p_operand_value);
  d_p_operand[0] = narrow<float>(d_p_operand_value);
}

__device__ __forceinline__ void backward_finalise_2_values(const float total_2, float& d_weight) {
  d_weight = total_2 * 0.125f;
}

// Merges partials into total_2; writes d_weight.
__global__ void __launch_bounds__(512)
backward_finalise_2(float* __restrict__ d_weight, const Sum<float>* total_2_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.inner.value * 2, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_2_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_2_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_2_next[n] = total_2_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_2_sum.merge(total_2_next[n]);
      }
    }
  }
  merge_trees(shared, total_2_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_2_value = static_cast<float>(total_2_sum.sum());
  const Index above_window_3 = result / 2;
  const Index window_3 = result - above_window_3 * 2;
  const Index inner = above_window_3;
  float d_weight_value;
  backward_finalise_2_values(total_2_value, d_weight_value);
  d_weight[(inner * 2 + window_3)] = narrow<float>(d_weight_value);
}

__device__ __forceinline__ void backward_finalise_3_values(const float total_3, float& total_3_scratch) {
  total_3_scratch = total_3;
}

// Merges partials into total_3; writes total_3_scratch.
__global__ void __launch_bounds__(512)
backward_finalise_3(float* __restrict__ total_3_scratch, const Sum<float>* total_3_partials,
    BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_3_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_3_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_3_next[n] = total_3_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_3_sum.merge(total_3_next[n]);
      }
    }
  }
  merge_trees(shared, total_3_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_3_value = static_cast<float>(total_3_sum.sum());
  const Index inner = result;
  float total_3_scratch_value;
  backward_finalise_3_values(total_3_value, total_3_scratch_value);
  total_3_scratch[inner] = narrow<float>(total_3_scratch_value);
}

__device__ __forceinline__ void backward_window_values_once(const float total_3,
    const float count_of_window_2_window_1, float& product) {
  product = total_3 * 0.125f * count_of_window_2_window_1;
}

__device__ __forceinline__ void backward_window_values(const float product, float& d_bias) {
  d_bias = product;
}

// Reads total_3 by (inner); writes d_bias.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
backward_window(const float* total_3, float* __restrict__ d_bias, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_2_window_1_value = static_cast<float>(2 * 2);
  const Index results = sizes.inner.value;
  const Index result = (static_cast<Index>(blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index inner = result;
  float total_3_in[kWindows];
  load_line<kIsWide>(total_3 + inner, total_3_in);
  float d_bias_out[1][kWindows * 2];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    const float total_3_value = widen(total_3_in[beside]);
    float product_value;
    backward_window_values_once(total_3_value, count_of_window_2_window_1_value, product_value);
#pragma unroll
    for (int position_value = 0; position_value < 2; ++position_value) {
      float d_bias_value;
      backward_window_values(product_value, d_bias_value);
      d_bias_out[position_value / 2][beside * 2 + position_value % 2] = narrow<float>(d_bias_value);
    }
  }
#pragma unroll
  for (int line = 0; line < 1; ++line) {
    constexpr Index window_3 = 0;
    store_line<kIsWide>(d_bias_out[line], d_bias + (inner * 2 + window_3));
  }
  const Index window_3_room = inner + kWindows == sizes.inner.value ? sizes.inner_unpooled.value - inner * 2 : kWindows * 2;
  if (window_3_room > kWindows * 2) {
    const bool is_outside = false;
    for (Index window_3 = is_outside ? 0 : kWindows * 2; window_3 < window_3_room; ++window_3) d_bias[(inner * 2 + window_3)] = narrow<float>(0.0f);
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

// A row's threads along x: a power of two within a warp, or whole warps; along y, rows beside each other for so many threads.
static dim3 row_block(int64_t wanted, int64_t threads, int64_t least = 1) {
  const int64_t along = wanted <= 32 ? power_of_two(wanted, least, 32) : ceil_divide(wanted, 32) * 32;
  return dim3(static_cast<unsigned>(along), static_cast<unsigned>(along < threads ? threads / along : 1));
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

// a: x, p_operand, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const p_operand = reinterpret_cast<const float*>(a[1]);
  auto* const weight = reinterpret_cast<const float*>(a[2]);
  auto* const bias = reinterpret_cast<const float*>(a[3]);
  auto* const out = reinterpret_cast<float*>(a[4]);
  auto* const saved_mean = reinterpret_cast<float*>(a[5]);
  auto* const saved_variance = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const ForwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]), size_of(a[12]),
      size_of(a[13]), size_of(a[14]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[16]);
  const int device = static_cast<int>(a[15]);
  const DeviceGuard guard(device);
  const dim3 forward_bundle_block = row_block(ceil_divide(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2), 4), 256);
  const int64_t forward_bundle_tasks = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value), forward_bundle_block.y);
  const int64_t forward_bundle_resident = resident_blocks(forward_bundle, forward_bundle_block, 0, 0, device);
  const int64_t forward_bundle_slots = forward_bundle_tasks < forward_bundle_resident ? forward_bundle_tasks : forward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_bundle, static_cast<unsigned>(forward_bundle_slots), forward_bundle_block, 0, stream, x,
        p_operand, weight, bias, out, saved_mean, saved_variance, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, p_operand, weight, bias, saved_mean, saved_variance, d_out, d_x, d_p_operand, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const p_operand = reinterpret_cast<const float*>(a[1]);
  auto* const weight = reinterpret_cast<const float*>(a[2]);
  auto* const bias = reinterpret_cast<const float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[5]);
  auto* const d_out = reinterpret_cast<const float*>(a[6]);
  auto* const d_x = reinterpret_cast<float*>(a[7]);
  auto* const d_p_operand = reinterpret_cast<float*>(a[8]);
  auto* const d_weight = reinterpret_cast<float*>(a[9]);
  auto* const d_bias = reinterpret_cast<float*>(a[10]);
  const bool is_measuring = a[11] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[3] | a[6] | a[7]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[11])};
  const BackwardSizes sizes{ size_of(a[12]), size_of(a[13]), size_of(a[14]), size_of(a[15]), size_of(a[16]),
      size_of(a[17]), size_of(a[18]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[20]);
  const int device = static_cast<int>(a[19]);
  const DeviceGuard guard(device);
  const dim3 backward_bundle_block = row_block(ceil_divide(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2), 4), 256);
  const int64_t backward_bundle_tasks = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value), backward_bundle_block.y);
  const int64_t backward_bundle_resident = resident_blocks(backward_bundle, backward_bundle_block, 0, 0,
      device);
  const int64_t backward_bundle_slots = backward_bundle_tasks < backward_bundle_resident ? backward_bundle_tasks : backward_bundle_resident;
  const int64_t total_3_partials_slots = backward_bundle_slots;
  const int64_t total_2_partials_slots = backward_bundle_slots;
  const int64_t total_partials_slots = backward_bundle_slots;
  auto* const total_3_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2) * total_2_partials_slots);
  auto* const total_partials = scratch.take<Sum<float>>(1 * total_partials_slots);
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  {
    follow(backward_bundle, static_cast<unsigned>(backward_bundle_slots), backward_bundle_block, 0, stream,
        saved_variance, x, p_operand, saved_mean, weight, bias, d_out, d_x, total_3_partials,
        total_2_partials, total_partials, sizes);
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = 1, slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise, blocks, block, 0, stream, d_p_operand, total_partials, sizes,
        static_cast<Index>(slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2),
        results = static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_2_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise_2, blocks, block, 0, stream, d_weight, total_2_partials, sizes,
        static_cast<Index>(slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_3_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise_3, blocks, block, 0, stream, total_3_scratch, total_3_partials, sizes,
        static_cast<Index>(slots));
  }
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(d_bias)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner_unpooled.value % 4 == 0 ? 2 : 1 : 1;
    const auto run = windows == 2 ? backward_window<2,
        true> : is_aligned && sizes.inner_unpooled.value % 2 == 0 ? backward_window<1,
        true> : backward_window<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.inner.value),
        256 * windows));
    follow(run, blocks, 256, 0, stream, total_3_scratch, d_bias, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
