// fusegen 0.1.0   chain 61b5f1a21578   signature forward+backward: bias bfloat16, d_bias bfloat16, d_out bfloat16, d_residual bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, residual bfloat16, saved_mean float32, saved_variance float32, weight bfloat16, x bfloat16; 32-bit offsets
//   batch_norm(training=True, weight=weight, bias=bias) | add(residual) | relu
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

// Within 2 ulp, for all operands.
__device__ __forceinline__ float narrow_div(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// A quotient of what is small beside the mean.
[[maybe_unused]] __device__ __forceinline__ float ratio(float a, float b) { return b > 0 ? __fdividef(a,
    b) : 0.0f; }
[[maybe_unused]] __device__ __forceinline__ double ratio(double a, double b) { return b > 0 ? a / b : 0.0; }

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

template <typename T>
struct Sum {
  T total = 0;
  __device__ void add(T term) { total += term; }
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
};

// How many values, the first, and what they are off by from it, and squared. Floats are merged from their mean, by Chan's
// formula; doubles have the digits to stay with the first, which takes no division.
template <typename T>
struct Count {
  using type = T;
};
template <>
struct Count<float> {
  using type = int;
};

template <typename T>
struct Moments {
  typename Count<T>::type count = 0;
  T centre = 0, off = 0, squares = 0;
  __device__ void add(T term) {
    centre = count == 0 ? term : centre;
    count += 1;
    __builtin_assume(count > 0);
    const T distance = term - centre;
    off += distance;
    squares = fma(distance, distance, squares);
  }
  template <typename U>
  __device__ void merge(const Moments<U>& other) {
    if constexpr (sizeof(T) == 8) {
      centre = count == 0 ? static_cast<T>(other.centre) : centre;
      const T gap = other.centre - centre, moved = other.count * gap;
      squares += fma(gap, 2 * static_cast<T>(other.off) + moved, static_cast<T>(other.squares));
      off += other.off + moved;
      count += other.count;
    } else {
      if (other.count == 0) return;
      const T all = count + other.count, gap = other.mean() - mean(), share = ratio(other.count, all);
      squares = distances() + other.distances() + gap * gap * (count * share);
      centre = mean() + gap * share;
      off = 0;
      count += other.count;
    }
  }
  __device__ T beyond() const { return ratio(off, count); }
  __device__ T distances() const { return squares - off * beyond(); }
  __device__ T mean() const { return centre + beyond(); }
  __device__ T variance() const { return distances() / count; }
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
template <typename Accumulator>
__device__ __forceinline__ Accumulator across(const Accumulator& mine, int bit) {
  static_assert(sizeof(Accumulator) % 4 == 0);
  Accumulator other = mine;
  auto* const words = reinterpret_cast<unsigned int*>(&other);
#pragma unroll
  for (int word = 0; word < sizeof(Accumulator) / 4; ++word) words[word] = __shfl_xor_sync(0xffffffffu,
      words[word], bit);
  return other;
}

// The accumulators of a row's lanes merged for the first of them, in a fixed order: over its warps, then within the first.
// A row has a power of two of lanes.
template <typename Accumulator>
__device__ __forceinline__ void merge_tree(Accumulator& mine, int lane, int lanes, void* memory) {
  if (lanes > 32) {
    Accumulator* const cells = static_cast<Accumulator*>(memory) + threadIdx.y * blockDim.x + threadIdx.x;
    *cells = mine;
    __syncthreads();
    if (lane >= 32) return;
    for (int other = 32; other < lanes; other += 32) mine.merge(cells[other]);
  }
  for (int bit = min(lanes, 32) / 2; bit > 0; bit /= 2) mine.merge(across(mine, bit));
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_outer_values(const float x, float& mean_term) {
  mean_term = x;
}

// Reads x; leaves partials of mean.
template <int kLanes>
__global__ void __launch_bounds__(256, 4)
forward_outer(const bfloat16* x, Moments<float>* __restrict__ mean_partials, ForwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = 2;
  __shared__ alignas(16) unsigned char shared[(2048 + 32) * 16];
  const Index rows = sizes.outer.value, columns = sizes.middle.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  Moments<float> mean_sum[kLanes];
  if (column < columns) {
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        x_in[p] = load<kLanes>(x + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[p], lane);
          float mean_term_value;
          forward_outer_values(x_value, mean_term_value);
          if (is_here) mean_sum[lane].add(mean_term_value);
        }
      }
    }
  }
  leave_columns(mean_sum, shared, mean_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
}

__device__ __forceinline__ void forward_finalise_values(const float mean, const float variance,
    float& saved_mean, float& saved_variance, float& mean_scratch, float& variance_scratch) {
  saved_mean = mean;
  saved_variance = variance;
  mean_scratch = mean;
  variance_scratch = variance;
}

// Merges partials into mean; writes saved_mean, saved_variance, mean_scratch, variance_scratch.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ saved_mean, float* __restrict__ saved_variance,
    float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments<float>* mean_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 32];
  const Index columns = sizes.middle.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  // A result has so many columns beside each other, in each slot.
  const Index each = sizes.inner.value, parts = slots * each;
  Moments<double> mean_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < parts; first += kAtOnce * blockDim.y) {
      Moments<float> mean_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= parts) break;
        mean_next[n] = mean_partials[((above * slots + slot / each) * columns + column) * each + slot % each];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= parts) break;
        mean_sum.merge(mean_next[n]);
      }
    }
  }
  merge_trees(shared, mean_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float mean_value = static_cast<float>(mean_sum.mean());
  const float variance_value = static_cast<float>(mean_sum.variance());
  const Index middle = result;
  float saved_mean_value;
  float saved_variance_value;
  float mean_scratch_value;
  float variance_scratch_value;
  forward_finalise_values(mean_value, variance_value, saved_mean_value, saved_variance_value,
      mean_scratch_value, variance_scratch_value);
  saved_mean[middle] = narrow<float>(saved_mean_value);
  saved_variance[middle] = narrow<float>(saved_variance_value);
  mean_scratch[middle] = narrow<float>(mean_scratch_value);
  variance_scratch[middle] = narrow<float>(variance_scratch_value);
}

__device__ __forceinline__ void forward_outer_2_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_outer_2_values(const float x, const float mean,
    const float inverse_root, const float weight, const float bias, const float residual, float& out) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float after_batch_norm = fmaf((x - mean) * inverse_root, weight, bias);
  // add(residual)
  const float after_add = after_batch_norm + residual;
  // relu
  out = maximum(after_add, 0.0f);
}

// Reads x, residual, mean by (middle), variance by (middle), weight by (middle), bias by (middle); writes out.
template <int kLanes>
__global__ void __launch_bounds__(256, 2)
forward_outer_2(const bfloat16* x, const float* mean, const float* variance, const bfloat16* weight,
    const bfloat16* bias, const bfloat16* residual, bfloat16* __restrict__ out, ForwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = 2;
  const Index rows = sizes.outer.value, columns = sizes.middle.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = (gridDim.x - 1 - blockIdx.x) / strips;  // (kept, slot)
  const Index strip = (gridDim.x - 1 - blockIdx.x) % strips * blockDim.x * kLanes,
      column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  if (column < columns) {
    float mean_column[kLanes];
    float inverse_root_column[kLanes];
    float weight_column[kLanes];
    float bias_column[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Index above_inner = divide(column + lane, sizes.inner);
      const Index middle = above_inner;
      const float mean_value = widen(mean[middle]);
      const float variance_value = widen(variance[middle]);
      const float weight_value = widen(weight[middle]);
      const float bias_value = widen(bias[middle]);
      float inverse_root_value;
      forward_outer_2_values_once(variance_value, inverse_root_value);
      mean_column[lane] = mean_value;
      inverse_root_column[lane] = inverse_root_value;
      weight_column[lane] = weight_value;
      bias_column[lane] = bias_value;
    }
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
      Pack<bfloat16, kLanes> residual_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        x_in[p] = load<kLanes>(x + (row * columns + column));
        residual_in[p] = load<kLanes>(residual + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        Pack<bfloat16, kLanes> out_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float mean_value = mean_column[lane];
          const float inverse_root_value = inverse_root_column[lane];
          const float weight_value = weight_column[lane];
          const float bias_value = bias_column[lane];
          const float x_value = widen(x_in[p], lane);
          const float residual_value = widen(residual_in[p], lane);
          float out_value;
          forward_outer_2_values(x_value, mean_value, inverse_root_value, weight_value, bias_value,
              residual_value, out_value);
          out_out.at[lane] = narrow<bfloat16>(out_value);
        }
        if (is_here) store(out + ((row) * columns + column), out_out);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_outer_values(const float out, const float d_out, const float x,
    const float saved_mean, float& d_residual, float& total_term, float& total_2_term) {
  // backward, down to add(residual)
  const float d_after_add = out <= 0.0f ? 0.0f : d_out;
  d_residual = d_after_add;
  total_term = (x - saved_mean) * d_after_add;
  total_2_term = d_after_add;
}

// Reads x, out, d_out, saved_mean by (middle); leaves partials of total, total_2; writes d_residual.
template <int kLanes>
__global__ void __launch_bounds__(256, 3)
backward_outer(const bfloat16* x, const float* saved_mean, const bfloat16* out, const bfloat16* d_out,
    bfloat16* __restrict__ d_residual, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = 1;
  __shared__ alignas(16) unsigned char shared[(2048 + 32) * 4];
  const Index rows = sizes.outer.value, columns = sizes.middle.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  Sum<float> total_sum[kLanes];
  Sum<float> total_2_sum[kLanes];
  if (column < columns) {
    float saved_mean_column[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Index above_inner = divide(column + lane, sizes.inner);
      const Index middle = above_inner;
      const float saved_mean_value = widen(saved_mean[middle]);
      saved_mean_column[lane] = saved_mean_value;
    }
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
      Pack<bfloat16, kLanes> out_in[kRows];
      Pack<bfloat16, kLanes> d_out_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        x_in[p] = load<kLanes>(x + (row * columns + column));
        out_in[p] = load<kLanes>(out + (row * columns + column));
        d_out_in[p] = load<kLanes>(d_out + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        Pack<bfloat16, kLanes> d_residual_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float saved_mean_value = saved_mean_column[lane];
          const float x_value = widen(x_in[p], lane);
          const float out_value = widen(out_in[p], lane);
          const float d_out_value = widen(d_out_in[p], lane);
          float d_residual_value;
          float total_term_value;
          float total_2_term_value;
          backward_outer_values(out_value, d_out_value, x_value, saved_mean_value, d_residual_value,
              total_term_value, total_2_term_value);
          d_residual_out.at[lane] = narrow<bfloat16>(d_residual_value);
          if (is_here) total_sum[lane].add(total_term_value);
          if (is_here) total_2_sum[lane].add(total_2_term_value);
        }
        if (is_here) store(d_residual + ((row) * columns + column), d_residual_out);
      }
    }
  }
  leave_columns(total_sum, shared, total_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
  leave_columns(total_2_sum, shared, total_2_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float total_2,
    float& total_scratch, float& total_2_scratch) {
  total_scratch = total;
  total_2_scratch = total_2;
}

// Merges partials into total, total_2; writes total_scratch, total_2_scratch.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ total_scratch, float* __restrict__ total_2_scratch,
    const Sum<float>* total_partials, const Sum<float>* total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.middle.value * sizes.inner.value,
      strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index middle = above_inner;
  float total_scratch_value;
  float total_2_scratch_value;
  backward_finalise_values(total_value, total_2_value, total_scratch_value, total_2_scratch_value);
  total_scratch[(middle) * sizes.inner.value + inner] = narrow<float>(total_scratch_value);
  total_2_scratch[(middle) * sizes.inner.value + inner] = narrow<float>(total_2_scratch_value);
}

__device__ __forceinline__ void backward_inner_values(const float total, const float total_2,
    float& total_3_term, float& total_4_term) {
  total_3_term = total;
  total_4_term = total_2;
}

// Reads total, total_2; leaves partials of total_3, total_4.
__global__ void __launch_bounds__(128)
backward_inner(const float* total, const float* total_2, Sum<float>* __restrict__ total_3_partials,
    Sum<float>* __restrict__ total_4_partials, BackwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index middle = row;
  Sum<float> total_3_sum;
  Sum<float> total_4_sum;
  const auto take = [&](Index inner, float total_value, float total_2_value) {
    float total_3_term_value;
    float total_4_term_value;
    backward_inner_values(total_value, total_2_value, total_3_term_value, total_4_term_value);
    total_3_sum.add(total_3_term_value);
    total_4_sum.add(total_4_term_value);
  };
  if (is_live) {
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(total[i]), widen(total_2[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_3_mine = total_3_sum;
      total_3_sum = Sum<float>();
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_4_mine = total_4_sum;
      total_4_sum = Sum<float>();
      Pack<float, kLanes> total_in[kPacks];
      Pack<float, kLanes> total_2_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        total_in[p] = load<kLanes>(total + i);
        total_2_in[p] = load<kLanes>(total_2 + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(total_in[p], lane), widen(total_2_in[p], lane));
        }
      }
      total_3_sum.merge(total_3_mine);
      total_4_sum.merge(total_4_mine);
    }
  }
  merge_tree(total_3_sum, threadIdx.x, blockDim.x, shared);
  __syncthreads();
  merge_tree(total_4_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    total_3_partials[(middle) * (1 * pieces) + (0) * pieces + piece] = total_3_sum;
    total_4_partials[(middle) * (1 * pieces) + (0) * pieces + piece] = total_4_sum;
  }
}

__device__ __forceinline__ void backward_finalise_2_values(const float total_3, const float saved_variance,
    const float total_4, float& d_weight, float& d_bias, float& total_3_scratch, float& total_4_scratch) {
  d_weight = total_3 * (rsqrtf(saved_variance + 1e-05f));
  d_bias = total_4;
  total_3_scratch = total_3;
  total_4_scratch = total_4;
}

// Reads saved_variance; merges partials into total_3, total_4; writes d_weight, d_bias, total_3_scratch, total_4_scratch.
__global__ void __launch_bounds__(512)
backward_finalise_2(const float* saved_variance, bfloat16* __restrict__ d_weight,
    bfloat16* __restrict__ d_bias, float* __restrict__ total_3_scratch, float* __restrict__ total_4_scratch,
    const Sum<float>* total_3_partials, const Sum<float>* total_4_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.middle.value;
  Sum<double> total_3_sum;
  Sum<double> total_4_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_3_next[kAtOnce];
      Sum<float> total_4_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_3_next[n] = total_3_partials[result * slots + slot];
        total_4_next[n] = total_4_partials[result * slots + slot];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_3_sum.merge(total_3_next[n]);
        total_4_sum.merge(total_4_next[n]);
      }
    }
  }
  merge_trees(shared, total_3_sum, total_4_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_3_value = static_cast<float>(total_3_sum.sum());
  const float total_4_value = static_cast<float>(total_4_sum.sum());
  const Index middle = result;
  const float saved_variance_value = widen(saved_variance[middle]);
  float d_weight_value;
  float d_bias_value;
  float total_3_scratch_value;
  float total_4_scratch_value;
  backward_finalise_2_values(total_3_value, saved_variance_value, total_4_value, d_weight_value,
      d_bias_value, total_3_scratch_value, total_4_scratch_value);
  d_weight[middle] = narrow<bfloat16>(d_weight_value);
  d_bias[middle] = narrow<bfloat16>(d_bias_value);
  total_3_scratch[middle] = narrow<float>(total_3_scratch_value);
  total_4_scratch[middle] = narrow<float>(total_4_scratch_value);
}

__device__ __forceinline__ void backward_outer_2_values_once(const float saved_variance, const float total_3,
    const float weight, const float count_of_outer_inner, const float total_4, float& inverse_root,
    float& quotient, float& quotient_2) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
  quotient = narrow_div(-(total_3 * weight * inverse_root * inverse_root * inverse_root),
      count_of_outer_inner);
  quotient_2 = narrow_div(total_4 * weight * inverse_root, count_of_outer_inner);
}

__device__ __forceinline__ void backward_outer_2_values(const float x, const float saved_mean,
    const float quotient, const float written_d_residual, const float weight, const float inverse_root,
    const float quotient_2, float& d_x) {
  const float sum = fmaf(x - saved_mean, quotient, written_d_residual * weight * inverse_root);
  d_x = sum - quotient_2;
}

// Reads x, written_d_residual, saved_mean by (middle), total_3 by (middle), weight by (middle), saved_variance by (middle), total_4 by (middle); writes d_x.
template <int kLanes>
__global__ void __launch_bounds__(256, 2)
backward_outer_2(const bfloat16* x, const float* saved_mean, const float* total_3, const bfloat16* weight,
    const float* saved_variance, const bfloat16* written_d_residual, const float* total_4,
    bfloat16* __restrict__ d_x, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  const float count_of_outer_inner_value = static_cast<float>(sizes.outer.value * sizes.inner.value);
  constexpr int kRows = 2;
  const Index rows = sizes.outer.value, columns = sizes.middle.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  if (column < columns) {
    float saved_mean_column[kLanes];
    float quotient_column[kLanes];
    float weight_column[kLanes];
    float inverse_root_column[kLanes];
    float quotient_2_column[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Index above_inner = divide(column + lane, sizes.inner);
      const Index middle = above_inner;
      const float saved_mean_value = widen(saved_mean[middle]);
      const float total_3_value = widen(total_3[middle]);
      const float weight_value = widen(weight[middle]);
      const float saved_variance_value = widen(saved_variance[middle]);
      const float total_4_value = widen(total_4[middle]);
      float inverse_root_value;
      float quotient_value;
      float quotient_2_value;
      backward_outer_2_values_once(saved_variance_value, total_3_value, weight_value,
          count_of_outer_inner_value, total_4_value, inverse_root_value, quotient_value, quotient_2_value);
      saved_mean_column[lane] = saved_mean_value;
      quotient_column[lane] = quotient_value;
      weight_column[lane] = weight_value;
      inverse_root_column[lane] = inverse_root_value;
      quotient_2_column[lane] = quotient_2_value;
    }
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
      Pack<bfloat16, kLanes> written_d_residual_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        x_in[p] = load<kLanes>(x + (row * columns + column));
        written_d_residual_in[p] = load<kLanes>(written_d_residual + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float saved_mean_value = saved_mean_column[lane];
          const float quotient_value = quotient_column[lane];
          const float weight_value = weight_column[lane];
          const float inverse_root_value = inverse_root_column[lane];
          const float quotient_2_value = quotient_2_column[lane];
          const float x_value = widen(x_in[p], lane);
          const float written_d_residual_value = widen(written_d_residual_in[p], lane);
          float d_x_value;
          backward_outer_2_values(x_value, saved_mean_value, quotient_value, written_d_residual_value,
              weight_value, inverse_root_value, quotient_2_value, d_x_value);
          d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
        }
        if (is_here) store(d_x + ((row) * columns + column), d_x_out);
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

// How many packs wide strips are that go down columns: as wide as is usual, and all the same. Where those leave a tenth of
// the blocks without work that the device has room for, in all of their turns, so many as leave none.
static unsigned strip_width(int64_t packs, int64_t usual, int64_t most, int64_t room) {
  int64_t strips = ceil_divide(packs, usual);
  if (room > 0 && strips < 4 * room) {
    const int64_t each = room / strips, blocks = strips * (each > 0 ? each : 1);
    if (10 * blocks < 9 * room * ceil_divide(blocks,
        room)) strips = each > 0 ? room / each : (strips + room / 2) / room * room;
  }
  const int64_t width = ceil_divide(packs, strips);
  return static_cast<unsigned>(width < most ? width : most);
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

// a: x, weight, bias, residual, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const residual = reinterpret_cast<const bfloat16*>(a[3]);
  auto* const out = reinterpret_cast<bfloat16*>(a[4]);
  auto* const saved_mean = reinterpret_cast<float*>(a[5]);
  auto* const saved_variance = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const ForwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t forward_outer_rows = static_cast<int64_t>(sizes.outer.value),
      forward_outer_columns = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), forward_outer_kept = 1;
  const bool forward_outer_is_packed = forward_outer_columns % 8 == 0;
  const auto forward_outer_kernel = forward_outer_is_packed ? &forward_outer<8> : &forward_outer<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t forward_outer_along = power_of_two(ceil_divide(forward_outer_rows, 8), 1, 8);
  const int64_t forward_outer_packs = ceil_divide(forward_outer_columns, forward_outer_is_packed ? 8 : 1),
      forward_outer_widest = 256 / forward_outer_along;
  const int64_t forward_outer_room = resident_blocks(forward_outer_kernel, dim3(256), 0, 0,
      device) / forward_outer_kept;
  const unsigned forward_outer_width = strip_width(forward_outer_packs, forward_outer_widest, 256,
      forward_outer_room);
  const dim3 forward_outer_block(forward_outer_width, 256 / forward_outer_width);
  const int64_t forward_outer_strips = ceil_divide(forward_outer_columns,
      forward_outer_width * (forward_outer_is_packed ? 8 : 1));
  const int64_t forward_outer_most = ceil_divide(forward_outer_rows, forward_outer_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t forward_outer_wanted = forward_outer_room < forward_outer_strips ? 1 : forward_outer_room / forward_outer_strips;
  const int64_t forward_outer_slots = forward_outer_wanted < forward_outer_most ? forward_outer_wanted : forward_outer_most;
  const int64_t mean_partials_slots = forward_outer_slots;
  const int64_t forward_outer_2_rows = static_cast<int64_t>(sizes.outer.value),
      forward_outer_2_columns = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), forward_outer_2_kept = 1;
  const bool forward_outer_2_is_packed = forward_outer_2_columns % 8 == 0;
  const auto forward_outer_2_kernel = forward_outer_2_is_packed ? &forward_outer_2<8> : &forward_outer_2<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t forward_outer_2_along = power_of_two(ceil_divide(forward_outer_2_rows, 8), 1, 8);
  const int64_t forward_outer_2_packs = ceil_divide(forward_outer_2_columns,
      forward_outer_2_is_packed ? 8 : 1), forward_outer_2_widest = 256 / forward_outer_2_along;
  const int64_t forward_outer_2_room = resident_blocks(forward_outer_2_kernel, dim3(256), 0, 0,
      device) / forward_outer_2_kept;
  const unsigned forward_outer_2_width = strip_width(forward_outer_2_packs, forward_outer_2_widest, 256,
      forward_outer_2_room);
  const dim3 forward_outer_2_block(forward_outer_2_width, 256 / forward_outer_2_width);
  const int64_t forward_outer_2_strips = ceil_divide(forward_outer_2_columns,
      forward_outer_2_width * (forward_outer_2_is_packed ? 8 : 1));
  const int64_t forward_outer_2_most = ceil_divide(forward_outer_2_rows, forward_outer_2_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t forward_outer_2_wanted = forward_outer_2_room < forward_outer_2_strips ? 1 : forward_outer_2_room / forward_outer_2_strips;
  const int64_t forward_outer_2_slots = forward_outer_2_wanted < forward_outer_2_most ? forward_outer_2_wanted : forward_outer_2_most;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  if (is_measuring) return scratch.used;
  {
    const auto blocks = static_cast<unsigned>(forward_outer_kept * forward_outer_slots * forward_outer_strips);
    follow(forward_outer_kernel, blocks, forward_outer_block, 0, stream, x, mean_partials, sizes,
        static_cast<Index>(forward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.middle.value),
        results = static_cast<int64_t>(sizes.middle.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = mean_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1,
        512 / power_of_two(slots * static_cast<int64_t>(sizes.inner.value), 1, most_along)));
    const dim3 block(width,
        static_cast<unsigned>(power_of_two(slots * static_cast<int64_t>(sizes.inner.value),
        width < 32 ? 32 / width : 1, 512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(forward_finalise, blocks, block, 0, stream, saved_mean, saved_variance, mean_scratch,
        variance_scratch, mean_partials, sizes, static_cast<Index>(slots));
  }
  {
    const auto blocks = static_cast<unsigned>(forward_outer_2_kept * forward_outer_2_slots * forward_outer_2_strips);
    follow(forward_outer_2_kernel, blocks, forward_outer_2_block, 0, stream, x, mean_scratch,
        variance_scratch, weight, bias, residual, out, sizes, static_cast<Index>(forward_outer_2_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, out, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, d_residual, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[7]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[8]);
  auto* const d_residual = reinterpret_cast<bfloat16*>(a[9]);
  const bool is_measuring = a[10] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[5] | a[6] | a[9]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[10])};
  const BackwardSizes sizes{ size_of(a[11]), size_of(a[12]), size_of(a[13]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[15]);
  const int device = static_cast<int>(a[14]);
  const DeviceGuard guard(device);
  const int64_t backward_outer_rows = static_cast<int64_t>(sizes.outer.value),
      backward_outer_columns = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), backward_outer_kept = 1;
  const bool backward_outer_is_packed = backward_outer_columns % 8 == 0;
  const auto backward_outer_kernel = backward_outer_is_packed ? &backward_outer<8> : &backward_outer<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t backward_outer_along = power_of_two(ceil_divide(backward_outer_rows, 8), 1, 8);
  const int64_t backward_outer_packs = ceil_divide(backward_outer_columns, backward_outer_is_packed ? 8 : 1),
      backward_outer_widest = 256 / backward_outer_along;
  const int64_t backward_outer_room = resident_blocks(backward_outer_kernel, dim3(256), 0, 0,
      device) / backward_outer_kept;
  const unsigned backward_outer_width = strip_width(backward_outer_packs, backward_outer_widest, 256,
      backward_outer_room);
  const dim3 backward_outer_block(backward_outer_width, 256 / backward_outer_width);
  const int64_t backward_outer_strips = ceil_divide(backward_outer_columns,
      backward_outer_width * (backward_outer_is_packed ? 8 : 1));
  const int64_t backward_outer_most = ceil_divide(backward_outer_rows, backward_outer_block.y * 1);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t backward_outer_wanted = backward_outer_room < backward_outer_strips ? 1 : backward_outer_room / backward_outer_strips;
  const int64_t backward_outer_slots = backward_outer_wanted < backward_outer_most ? backward_outer_wanted : backward_outer_most;
  const int64_t total_partials_slots = backward_outer_slots;
  const int64_t total_2_partials_slots = backward_outer_slots;
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.middle.value),
      backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t total_3_partials_slots = 1 * backward_inner_pieces;
  const int64_t total_4_partials_slots = 1 * backward_inner_pieces;
  const int64_t backward_outer_2_rows = static_cast<int64_t>(sizes.outer.value),
      backward_outer_2_columns = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), backward_outer_2_kept = 1;
  const bool backward_outer_2_is_packed = backward_outer_2_columns % 8 == 0;
  const auto backward_outer_2_kernel = backward_outer_2_is_packed ? &backward_outer_2<8> : &backward_outer_2<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t backward_outer_2_along = power_of_two(ceil_divide(backward_outer_2_rows, 8), 1, 8);
  const int64_t backward_outer_2_packs = ceil_divide(backward_outer_2_columns,
      backward_outer_2_is_packed ? 8 : 1), backward_outer_2_widest = 256 / backward_outer_2_along;
  const int64_t backward_outer_2_room = resident_blocks(backward_outer_2_kernel, dim3(256), 0, 0,
      device) / backward_outer_2_kept;
  const unsigned backward_outer_2_width = strip_width(backward_outer_2_packs, backward_outer_2_widest, 256,
      backward_outer_2_room);
  const dim3 backward_outer_2_block(backward_outer_2_width, 256 / backward_outer_2_width);
  const int64_t backward_outer_2_strips = ceil_divide(backward_outer_2_columns,
      backward_outer_2_width * (backward_outer_2_is_packed ? 8 : 1));
  const int64_t backward_outer_2_most = ceil_divide(backward_outer_2_rows, backward_outer_2_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t backward_outer_2_wanted = backward_outer_2_room < backward_outer_2_strips ? 1 : backward_outer_2_room / backward_outer_2_strips;
  const int64_t backward_outer_2_slots = backward_outer_2_wanted < backward_outer_2_most ? backward_outer_2_wanted : backward_outer_2_most;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_4_partials_slots);
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  auto* const total_4_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  if (is_measuring) return scratch.used;
  {
    const auto blocks = static_cast<unsigned>(backward_outer_kept * backward_outer_slots * backward_outer_strips);
    follow(backward_outer_kernel, blocks, backward_outer_block, 0, stream, x, saved_mean, out, d_out,
        d_residual, total_partials, total_2_partials, sizes, static_cast<Index>(backward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value), results = static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, total_scratch, total_2_scratch, total_partials,
        total_2_partials, sizes, static_cast<Index>(slots));
  }
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
        block.y));
    follow(backward_inner, blocks, block, 0, stream, total_scratch, total_2_scratch, total_3_partials,
        total_4_partials, sizes, static_cast<Index>(backward_inner_rows),
        static_cast<Index>(backward_inner_pieces), static_cast<Index>(piece_length));
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.middle.value), slots = total_3_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise_2, blocks, block, 0, stream, saved_variance, d_weight, d_bias, total_3_scratch,
        total_4_scratch, total_3_partials, total_4_partials, sizes, static_cast<Index>(slots));
  }
  {
    const auto blocks = static_cast<unsigned>(backward_outer_2_kept * backward_outer_2_slots * backward_outer_2_strips);
    follow(backward_outer_2_kernel, blocks, backward_outer_2_block, 0, stream, x, saved_mean,
        total_3_scratch, weight, saved_variance, d_residual, total_4_scratch, d_x, sizes,
        static_cast<Index>(backward_outer_2_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
