// fusegen 0.1.0   chain 2791517321c3   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, saved_mean float32, saved_variance float32, weight float32, x float32; 32-bit offsets
//   batch_norm(training=True, weight=weight, bias=bias) | gelu | avg_pool2d(2)
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
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled;
};

__device__ __forceinline__ void forward_outer_values(const float x, float& mean_term) {
  mean_term = x;
}

// Reads x; leaves partials of mean.
template <int kLanes>
__global__ void __launch_bounds__(256, 4)
forward_outer(const float* x, Moments<float>* __restrict__ mean_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = kLanes == 1 ? 8 : 2;
  __shared__ alignas(16) unsigned char shared[(1024 + 32) * 16];
  const Index rows = sizes.outer.value * (sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value),
      columns = sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  Moments<float> mean_sum[kLanes];
  if (column < columns) {
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<float, kLanes> x_in[kRows];
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
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Moments<double> mean_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Moments<float> mean_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        mean_next[n] = mean_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        mean_sum.merge(mean_next[n]);
      }
    }
  }
  merge_trees(shared, mean_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float mean_value = static_cast<float>(mean_sum.mean());
  const float variance_value = static_cast<float>(mean_sum.variance());
  const Index inner = result;
  float saved_mean_value;
  float saved_variance_value;
  float mean_scratch_value;
  float variance_scratch_value;
  forward_finalise_values(mean_value, variance_value, saved_mean_value, saved_variance_value,
      mean_scratch_value, variance_scratch_value);
  saved_mean[inner] = narrow<float>(saved_mean_value);
  saved_variance[inner] = narrow<float>(saved_variance_value);
  mean_scratch[inner] = narrow<float>(mean_scratch_value);
  variance_scratch[inner] = narrow<float>(variance_scratch_value);
}

__device__ __forceinline__ void forward_window_stage_1_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_window_stage_1(const float x, const float mean,
    const float inverse_root, const float weight, const float bias, float& total_term) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float after_batch_norm = fmaf((x - mean) * inverse_root, weight, bias);
  // gelu
  const float series = polynomial(fabsf(after_batch_norm), -1.0f, -1.15110552f, -0.459209114f,
      -0.0524738058f, 0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f,
      9.13259044e-07f, -3.24377396e-08f);
  const float power = exp2_flushed(series);
  total_term = after_batch_norm * (after_batch_norm < 0.0f ? power : 1.0f - power);
}

__device__ __forceinline__ void forward_window_row_values(const float total, float& out) {
  // avg_pool2d(2)
  out = total * 0.25f;
}

// Reads x, mean by (inner), variance by (inner), weight by (inner), bias by (inner); writes out.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
forward_window(const float* x, const float* mean, const float* variance, const float* weight,
    const float* bias, float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value;
  const Index result = (static_cast<Index>(gridDim.x - 1 - blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_2 = divide(above_inner, sizes.axis_2);
  const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  float x_in[4][kWindows * 1];
#pragma unroll
  for (int line = 0; line < 4; ++line) {
    const Index above_window_2 = line / 2;
    const Index window_2 = line - above_window_2 * 2;
    const Index window_1 = above_window_2;
    load_line<kIsWide>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner, x_in[line]);
  }
  float mean_in[kWindows];
  load_line<kIsWide>(mean + inner, mean_in);
  float variance_in[kWindows];
  load_line<kIsWide>(variance + inner, variance_in);
  float weight_in[kWindows];
  load_line<kIsWide>(weight + inner, weight_in);
  float bias_in[kWindows];
  load_line<kIsWide>(bias + inner, bias_in);
  float out_out[kWindows];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    const float mean_value = widen(mean_in[beside]);
    const float variance_value = widen(variance_in[beside]);
    const float weight_value = widen(weight_in[beside]);
    const float bias_value = widen(bias_in[beside]);
    Sum<float> total_sum;
    float inverse_root_value;
    forward_window_stage_1_once(variance_value, inverse_root_value);
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 1][beside * 1 + position_value % 1]);
      float total_term_value;
      forward_window_stage_1(x_value, mean_value, inverse_root_value, weight_value, bias_value,
          total_term_value);
      total_sum.add(total_term_value);
    }
    const float total_value = total_sum.sum();
    float out_value;
    forward_window_row_values(total_value, out_value);
    out_out[beside] = narrow<float>(out_value);
  }
  store_line<kIsWide>(out_out,
      out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled;
};

__device__ __forceinline__ void backward_window_stage_1_once(const float d_out, const float saved_variance,
    float& d_after_gelu, float& inverse_root) {
  // backward, down to gelu
  d_after_gelu = d_out * 0.25f;
  inverse_root = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_window_stage_1(const float d_after_gelu, const float x,
    const float saved_mean, const float inverse_root, const float weight, const float bias,
    float& total_3_term, float& total_4_term) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float difference = x - saved_mean;
  const float after_batch_norm = fmaf(difference * inverse_root, weight, bias);
  // backward, down to batch_norm(training=True, weight=weight, bias=bias)
  const float sum = fmaf(after_batch_norm * after_batch_norm, -0.721347511f, -1.32574809f);
  const float series = polynomial(fabsf(after_batch_norm), -1.0f, -1.15110552f, -0.459209114f,
      -0.0524738058f, 0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f,
      9.13259044e-07f, -3.24377396e-08f);
  const float power = exp2_flushed(series);
  const float sum_2 = fmaf(after_batch_norm, exp2_flushed(sum),
      after_batch_norm < 0.0f ? power : 1.0f - power);
  const float d_after_batch_norm = d_after_gelu * sum_2;
  total_3_term = d_after_batch_norm * difference;
  total_4_term = d_after_batch_norm;
}

__device__ __forceinline__ void backward_window_row_values(const float total_3, const float total_4,
    float& total_term, float& total_2_term) {
  total_term = total_3;
  total_2_term = total_4;
}

// Reads x, d_out by (outer, axis_1, axis_2, inner), saved_mean by (inner), saved_variance by (inner), weight by (inner), bias by (inner); leaves partials of total, total_2.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
backward_window(const float* d_out, const float* x, const float* saved_mean, const float* saved_variance,
    const float* weight, const float* bias, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[(1024 + 32) * 4];
  const Index rows = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value, columns = sizes.inner.value;
  const Index strips = (columns + blockDim.x * kWindows - 1) / (blockDim.x * kWindows);
  const Index slot = blockIdx.x / strips;
  const Index strip = blockIdx.x % strips * blockDim.x * kWindows, column = strip + threadIdx.x * kWindows;
  Sum<float> total_sum[kWindows];
  Sum<float> total_2_sum[kWindows];
  if (column < columns) {
    for (Index row = slot * blockDim.y + threadIdx.y; row < rows; row += slots * blockDim.y) {
      const Index above_axis_2 = divide(row, sizes.axis_2);
      const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
      const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
      const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
      const Index outer = above_axis_1;
      const Index inner = column;
      float x_in[4][kWindows * 1];
#pragma unroll
      for (int line = 0; line < 4; ++line) {
        const Index above_window_2 = line / 2;
        const Index window_2 = line - above_window_2 * 2;
        const Index window_1 = above_window_2;
        load_line<kIsWide>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner, x_in[line]);
      }
      float d_out_in[kWindows];
      load_line<kIsWide>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, d_out_in);
      float saved_mean_in[kWindows];
      load_line<kIsWide>(saved_mean + inner, saved_mean_in);
      float saved_variance_in[kWindows];
      load_line<kIsWide>(saved_variance + inner, saved_variance_in);
      float weight_in[kWindows];
      load_line<kIsWide>(weight + inner, weight_in);
      float bias_in[kWindows];
      load_line<kIsWide>(bias + inner, bias_in);
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float d_out_value = widen(d_out_in[beside]);
        const float saved_mean_value = widen(saved_mean_in[beside]);
        const float saved_variance_value = widen(saved_variance_in[beside]);
        const float weight_value = widen(weight_in[beside]);
        const float bias_value = widen(bias_in[beside]);
        Sum<float> total_3_sum;
        Sum<float> total_4_sum;
        float d_after_gelu_value;
        float inverse_root_value;
        backward_window_stage_1_once(d_out_value, saved_variance_value, d_after_gelu_value,
            inverse_root_value);
#pragma unroll
        for (int position_value = 0; position_value < 4; ++position_value) {
          const float x_value = widen(x_in[position_value / 1][beside * 1 + position_value % 1]);
          float total_3_term_value;
          float total_4_term_value;
          backward_window_stage_1(d_after_gelu_value, x_value, saved_mean_value, inverse_root_value,
              weight_value, bias_value, total_3_term_value, total_4_term_value);
          total_3_sum.add(total_3_term_value);
          total_4_sum.add(total_4_term_value);
        }
        const float total_3_value = total_3_sum.sum();
        const float total_4_value = total_4_sum.sum();
        float total_term_value;
        float total_2_term_value;
        backward_window_row_values(total_3_value, total_4_value, total_term_value, total_2_term_value);
        total_sum[beside].add(total_term_value);
        total_2_sum[beside].add(total_2_term_value);
      }
    }
  }
  leave_columns(total_sum, shared, total_partials + (slot * columns + strip),
      static_cast<int64_t>(columns) - strip);
  leave_columns(total_2_sum, shared, total_2_partials + (slot * columns + strip),
      static_cast<int64_t>(columns) - strip);
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float saved_variance,
    const float total_2, float& d_weight, float& d_bias, float& total_scratch, float& total_2_scratch) {
  d_weight = total * (rsqrtf(saved_variance + 1e-05f));
  d_bias = total_2;
  total_scratch = total;
  total_2_scratch = total_2;
}

// Reads saved_variance; merges partials into total, total_2; writes d_weight, d_bias, total_scratch, total_2_scratch.
__global__ void __launch_bounds__(512)
backward_finalise(const float* saved_variance, float* __restrict__ d_weight, float* __restrict__ d_bias,
    float* __restrict__ total_scratch, float* __restrict__ total_2_scratch, const Sum<float>* total_partials,
    const Sum<float>* total_2_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index inner = result;
  const float saved_variance_value = widen(saved_variance[inner]);
  float d_weight_value;
  float d_bias_value;
  float total_scratch_value;
  float total_2_scratch_value;
  backward_finalise_values(total_value, saved_variance_value, total_2_value, d_weight_value, d_bias_value,
      total_scratch_value, total_2_scratch_value);
  d_weight[inner] = narrow<float>(d_weight_value);
  d_bias[inner] = narrow<float>(d_bias_value);
  total_scratch[inner] = narrow<float>(total_scratch_value);
  total_2_scratch[inner] = narrow<float>(total_2_scratch_value);
}

__device__ __forceinline__ void backward_window_2_values_once(const float saved_variance, const float total,
    const float weight, const float count_of_window_2_window_1_outer_axis_1_axis_2, const float d_out,
    const float total_2, float& inverse_root, float& product, float& d_after_gelu, float& product_2) {
  // backward, down to gelu
  inverse_root = rsqrtf(saved_variance + 1e-05f);
  const float quotient = 1.0f / count_of_window_2_window_1_outer_axis_1_axis_2;
  product = -(total * weight * inverse_root * inverse_root * inverse_root) * quotient;
  d_after_gelu = d_out * 0.25f;
  product_2 = total_2 * weight * inverse_root * quotient;
}

__device__ __forceinline__ void backward_window_2_values(const float x, const float saved_mean,
    const float product, const float d_after_gelu, const float inverse_root, const float weight,
    const float bias, const float product_2, float& d_x) {
  // batch_norm(training=True, weight=weight, bias=bias)
  const float difference = x - saved_mean;
  const float after_batch_norm = fmaf(difference * inverse_root, weight, bias);
  // backward, down to batch_norm(training=True, weight=weight, bias=bias)
  const float sum = fmaf(after_batch_norm * after_batch_norm, -0.721347511f, -1.32574809f);
  const float series = polynomial(fabsf(after_batch_norm), -1.0f, -1.15110552f, -0.459209114f,
      -0.0524738058f, 0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f,
      9.13259044e-07f, -3.24377396e-08f);
  const float power = exp2_flushed(series);
  const float sum_2 = fmaf(after_batch_norm, exp2_flushed(sum),
      after_batch_norm < 0.0f ? power : 1.0f - power);
  const float d_after_batch_norm = d_after_gelu * sum_2;
  const float sum_3 = fmaf(difference, product, d_after_batch_norm * weight * inverse_root);
  d_x = sum_3 - product_2;
}

// Reads x, saved_mean by (inner), total by (inner), weight by (inner), saved_variance by (inner), d_out by (outer, axis_1, axis_2, inner), bias by (inner), total_2 by (inner); writes d_x.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
backward_window_2(const float* x, const float* saved_mean, const float* total, const float* weight,
    const float* saved_variance, const float* d_out, const float* bias, const float* total_2,
    float* __restrict__ d_x, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_2_window_1_outer_axis_1_axis_2_value = static_cast<float>(2 * 2 * sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value);
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value;
  const Index result = (static_cast<Index>(gridDim.x - 1 - blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_2 = divide(above_inner, sizes.axis_2);
  const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  float x_in[4][kWindows * 1];
#pragma unroll
  for (int line = 0; line < 4; ++line) {
    const Index above_window_2 = line / 2;
    const Index window_2 = line - above_window_2 * 2;
    const Index window_1 = above_window_2;
    load_line<kIsWide>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner, x_in[line]);
  }
  float saved_mean_in[kWindows];
  load_line<kIsWide>(saved_mean + inner, saved_mean_in);
  float total_in[kWindows];
  load_line<kIsWide>(total + inner, total_in);
  float weight_in[kWindows];
  load_line<kIsWide>(weight + inner, weight_in);
  float saved_variance_in[kWindows];
  load_line<kIsWide>(saved_variance + inner, saved_variance_in);
  float d_out_in[kWindows];
  load_line<kIsWide>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, d_out_in);
  float bias_in[kWindows];
  load_line<kIsWide>(bias + inner, bias_in);
  float total_2_in[kWindows];
  load_line<kIsWide>(total_2 + inner, total_2_in);
  float d_x_out[4][kWindows * 1];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    const float saved_mean_value = widen(saved_mean_in[beside]);
    const float total_value = widen(total_in[beside]);
    const float weight_value = widen(weight_in[beside]);
    const float saved_variance_value = widen(saved_variance_in[beside]);
    const float d_out_value = widen(d_out_in[beside]);
    const float bias_value = widen(bias_in[beside]);
    const float total_2_value = widen(total_2_in[beside]);
    float inverse_root_value;
    float product_value;
    float d_after_gelu_value;
    float product_2_value;
    backward_window_2_values_once(saved_variance_value, total_value, weight_value,
        count_of_window_2_window_1_outer_axis_1_axis_2_value, d_out_value, total_2_value, inverse_root_value,
        product_value, d_after_gelu_value, product_2_value);
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 1][beside * 1 + position_value % 1]);
      float d_x_value;
      backward_window_2_values(x_value, saved_mean_value, product_value, d_after_gelu_value,
          inverse_root_value, weight_value, bias_value, product_2_value, d_x_value);
      d_x_out[position_value / 1][beside * 1 + position_value % 1] = narrow<float>(d_x_value);
    }
  }
#pragma unroll
  for (int line = 0; line < 4; ++line) {
    const Index above_window_2 = line / 2;
    const Index window_2 = line - above_window_2 * 2;
    const Index window_1 = above_window_2;
    store_line<kIsWide>(d_x_out[line],
        d_x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner);
  }
  const Index window_1_room = axis_1 + 1 == sizes.axis_1.value ? sizes.axis_1_unpooled.value - axis_1 * 2 : 2;
  const Index window_2_room = axis_2 + 1 == sizes.axis_2.value ? sizes.axis_2_unpooled.value - axis_2 * 2 : 2;
  if (window_1_room > 2 || window_2_room > 2) {
    for (Index window_1 = 0; window_1 < window_1_room; ++window_1) {
      for (Index window_2 = 0; window_2 < window_2_room; ++window_2) {
        const bool is_outside = window_1 >= 2 || window_2 >= 2;
        for (int beside = 0; is_outside && beside < kWindows; ++beside) d_x[(((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * sizes.inner.value + inner + beside] = narrow<float>(0.0f);
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

// a: x, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]),
      size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const int64_t forward_outer_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>((sizes.axis_1_unpooled.value * sizes.axis_2_unpooled.value)), forward_outer_columns = static_cast<int64_t>(sizes.inner.value), forward_outer_kept = 1;
  const bool forward_outer_is_packed = forward_outer_columns % 4 == 0;
  const auto forward_outer_kernel = forward_outer_is_packed ? &forward_outer<4> : &forward_outer<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t forward_outer_along = power_of_two(ceil_divide(forward_outer_rows, 8), 1, 8);
  const int64_t forward_outer_packs = ceil_divide(forward_outer_columns, forward_outer_is_packed ? 4 : 1),
      forward_outer_widest = 256 / forward_outer_along;
  const int64_t forward_outer_room = resident_blocks(forward_outer_kernel, dim3(256), 0, 0,
      device) / forward_outer_kept;
  const unsigned forward_outer_width = strip_width(forward_outer_packs, forward_outer_widest, 256,
      forward_outer_room);
  const dim3 forward_outer_block(forward_outer_width, 256 / forward_outer_width);
  const int64_t forward_outer_strips = ceil_divide(forward_outer_columns,
      forward_outer_width * (forward_outer_is_packed ? 4 : 1));
  const int64_t forward_outer_most = ceil_divide(forward_outer_rows, forward_outer_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t forward_outer_wanted = forward_outer_room < forward_outer_strips ? 1 : forward_outer_room / forward_outer_strips;
  const int64_t forward_outer_slots = forward_outer_wanted < forward_outer_most ? forward_outer_wanted : forward_outer_most;
  const int64_t mean_partials_slots = forward_outer_slots;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  {
    const auto blocks = static_cast<unsigned>(forward_outer_kept * forward_outer_slots * forward_outer_strips);
    follow(forward_outer_kernel, blocks, forward_outer_block, 0, stream, x, mean_partials, sizes,
        static_cast<Index>(forward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = mean_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(forward_finalise, blocks, block, 0, stream, saved_mean, saved_variance, mean_scratch,
        variance_scratch, mean_partials, sizes, static_cast<Index>(slots));
  }
  {
    // Where each line begins at a multiple of their size, 4 windows go in wide accesses, or half of them in narrower ones.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(bias) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner.value % 4 == 0 ? 4 : sizes.inner.value % 2 == 0 ? 2 : 1 : 1;
    const auto run = windows == 4 ? forward_window<4, true> : windows == 2 ? forward_window<2,
        true> : forward_window<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, mean_scratch, variance_scratch, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, bias, saved_mean, saved_variance, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, device, stream.
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
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ size_of(a[10]), size_of(a[11]), size_of(a[12]), size_of(a[13]), size_of(a[14]),
      size_of(a[15]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[17]);
  const int device = static_cast<int>(a[16]);
  const DeviceGuard guard(device);
  const int64_t backward_window_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value), backward_window_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_window_slots = power_of_two(ceil_divide(backward_window_rows * backward_window_length, 1024), 1, 512);
  const int64_t total_partials_slots = backward_window_slots;
  const int64_t total_2_partials_slots = backward_window_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.inner.value));
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 4 windows go in wide accesses, or half of them in narrower ones.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(d_out) | reinterpret_cast<uintptr_t>(saved_mean) | reinterpret_cast<uintptr_t>(saved_variance) | reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(bias)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner.value % 4 == 0 ? 4 : sizes.inner.value % 2 == 0 ? 2 : 1 : 1;
    const auto run = windows == 4 ? backward_window<4, true> : windows == 2 ? backward_window<2,
        true> : backward_window<1, false>;
    const auto width = static_cast<unsigned>(power_of_two(ceil_divide(backward_window_length, windows), 1,
        32));
    const dim3 block(width, 256 / width);
    const auto blocks = static_cast<unsigned>(backward_window_slots * ceil_divide(backward_window_length,
        width * windows));
    follow(run, blocks, block, 0, stream, d_out, x, saved_mean, saved_variance, weight, bias, total_partials,
        total_2_partials, sizes, static_cast<Index>(backward_window_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise, blocks, block, 0, stream, saved_variance, d_weight, d_bias, total_scratch,
        total_2_scratch, total_partials, total_2_partials, sizes, static_cast<Index>(slots));
  }
  {
    // Where each line begins at a multiple of their size, 4 windows go in wide accesses, or half of them in narrower ones.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(d_x) | reinterpret_cast<uintptr_t>(saved_mean) | reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(saved_variance) | reinterpret_cast<uintptr_t>(d_out) | reinterpret_cast<uintptr_t>(bias)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner.value % 4 == 0 ? 4 : sizes.inner.value % 2 == 0 ? 2 : 1 : 1;
    const auto run = windows == 4 ? backward_window_2<4, true> : windows == 2 ? backward_window_2<2,
        true> : backward_window_2<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, saved_mean, total_scratch, weight, saved_variance, d_out, bias,
        total_2_scratch, d_x, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
