// fusegen 0.1.0   chain f9ba4ee0f122   signature forward+backward: bias float32, d_bias float32, d_out float32, d_p_operand float32, d_weight float32, d_x float32, out float32, p_operand float32, saved_mean float32, saved_variance float32, weight float32, x float32; 32-bit offsets
//   add(p) | layernorm(weight, bias)
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

// A pack on its way into shared memory, where the thread that sent it will read it.
template <int N, typename T>
__device__ __forceinline__ void send(Pack<T, N>* to, const T* from) {
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(T) * N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(sizeof(T) * N) : "memory");
  }
}

__device__ __forceinline__ void send_off() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than so many of the latest are on their way.
template <int N>
__device__ __forceinline__ void wait_for_sent() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

// Sums of neighbours, so many by one access.
template <int kAtOnce, typename T, int N>
__device__ __forceinline__ void store_sums(Sum<T>* to, const Sum<T> (&sums)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += kAtOnce) {
    Pack<T, kAtOnce> pack;
#pragma unroll
    for (int lane = 0; lane < kAtOnce; ++lane) pack.at[lane] = sums[n + lane].total;
    store(reinterpret_cast<T*>(to + n), pack);
  }
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

// A thread's elements around the mean of the first of them: what they are off by, and squared. Merged, around their mean.
template <typename T>
struct Spread {
  T centre = 0, off = 0, squares = 0;
  template <int kLanes>
  __device__ void add_if(bool is_here, bool is_first, const T (&values)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes && is_first; ++lane) centre += is_here ? values[lane] / kLanes : T(0);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const T distance = is_here ? values[lane] - centre : T(0);
      off += distance;
      squares = fma(distance, distance, squares);
    }
  }
  // The same elements around another centre.
  __device__ void move(T to, T count) {
    const T gap = centre - to;
    squares = fma(gap, fma(count, gap, 2 * off), squares);
    off = fma(count, gap, off);
    centre = to;
  }
};

// How many of a row's elements this thread has, which come in packs of neighbours, so many apart.
template <int kPacks, int kLanes>
__device__ __forceinline__ int elements_of(Index first, Index apart, Index length) {
  int packs = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs += first + p * apart < length;
  return packs * kLanes;
}

// How many of a row's elements a thread has, and how many those of its warp that share the row.
template <typename T>
struct Counts {
  T mine, of_warp;
};

template <bool kIsWide, typename T>
__device__ __forceinline__ Counts<T> counted(T mine) {
  T all = mine;
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (kIsWide || bit < blockDim.x) all += __shfl_xor_sync(0xffffffffu, all, bit);
  }
  return {mine, all};
}

// The same for means and squared distances from them: a warp finds its own mean before it adds up the distances from it,
// and what warps have is merged by Chan's formula, so that there is one barrier.
template <int kWarps, bool kIsWide, bool kForAll = true, typename T, int N>
__device__ __forceinline__ void combine(Spread<T> (&mine)[N], const Counts<T>& counts, T length, T* cells) {
  T beyond[N], base[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = __shfl_sync(0xffffffffu, mine[n].centre, 0, kIsWide ? 32 : min(32, blockDim.x));
    beyond[n] = fma(counts.mine, mine[n].centre - base[n], mine[n].off);
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n].move(base[n] + ratio(beyond[n], counts.of_warp), counts.mine);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
  }
  if (!kIsWide && blockDim.x <= 32) return;
  constexpr int kCells = 2 * N + 1;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, place = threadIdx.x % 32;
  T* const row_cells = cells + threadIdx.y * warps * kCells;
  if (place == 0) {
    row_cells[warp * kCells] = counts.of_warp;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      row_cells[warp * kCells + 2 * n + 1] = mine[n].centre;
      row_cells[warp * kCells + 2 * n + 2] = mine[n].squares;
    }
  }
  __syncthreads();
  if (!kForAll && warp > 0) return;
  const int other = place % kWarps;
  const T count = other < warps ? row_cells[other * kCells] : T(0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = row_cells[2 * n + 1];
    mine[n].centre = other < warps ? row_cells[other * kCells + 2 * n + 1] : T(0);
    mine[n].squares = other < warps ? row_cells[other * kCells + 2 * n + 2] : T(0);
    beyond[n] = count * (mine[n].centre - base[n]);
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const T mean = base[n] + ratio(beyond[n], length), gap = mine[n].centre - mean;
    mine[n].squares = fma(count * gap, gap, mine[n].squares);
    mine[n].centre = mean;
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
  }
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

__device__ __forceinline__ void forward_row_stage_1(const float x, const float p_operand, float& mean_term) {
  // add(p)
  mean_term = x + p_operand;
}

__device__ __forceinline__ void forward_row_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_row_values(const float x, const float p_operand, const float mean,
    const float inverse_root, const float weight, const float bias, float& out) {
  // add(p)
  const float after_add = x + p_operand;
  // layernorm(weight, bias)
  out = fmaf((after_add - mean) * inverse_root, weight, bias);
}

__device__ __forceinline__ void forward_row_row_values(const float mean, const float variance,
    float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

// Reads x, p_operand by (middle, inner), weight by (inner), bias by (inner); writes out, saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 4)
forward_row(const float* x, const float* p_operand, const float* weight, const float* bias,
    float* __restrict__ out, float* __restrict__ saved_mean, float* __restrict__ saved_variance,
    ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 3;
  __shared__ float cells[2][24];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<float, kLanes> x_in[kPacks];
    Pack<float, kLanes> p_operand_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
      if (is_here) p_operand_in[p] = load<kLanes>(p_operand + ((middle) * length + i));
    }
    Spread<float> spreads_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      float mean_term_lanes[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float p_operand_value = widen(p_operand_in[p], lane);
        float mean_term_value;
        forward_row_stage_1(x_value, p_operand_value, mean_term_value);
        mean_term_lanes[lane] = mean_term_value;
      }
      spreads_1[0].add_if(is_here, p == 0, mean_term_lanes);
    }
    const float elements = elements_of<kPacks, kLanes>(threadIdx.x * kLanes, blockDim.x * kLanes, length);
    const Counts<float> counts = counted<false>(elements);
    combine<8, false>(spreads_1, counts, static_cast<float>(length), cells[turn++ & 1]);
    const float mean_value = spreads_1[0].centre;
    const float variance_value = spreads_1[0].squares / static_cast<float>(length);
    if (is_live && threadIdx.x == 0) {
      float saved_mean_value;
      float saved_variance_value;
      forward_row_row_values(mean_value, variance_value, saved_mean_value, saved_variance_value);
      saved_mean[(outer) * sizes.middle.value + middle] = narrow<float>(saved_mean_value);
      saved_variance[(outer) * sizes.middle.value + middle] = narrow<float>(saved_variance_value);
    }
    float inverse_root_value;
    forward_row_values_once(variance_value, inverse_root_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      Pack<float, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<float, kLanes> bias_in;
      if (is_here) bias_in = load<kLanes>(bias + i);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        const float bias_value = widen(bias_in, lane);
        const float p_operand_value = widen(p_operand_in[p], lane);
        float out_value;
        forward_row_values(x_value, p_operand_value, mean_value, inverse_root_value, weight_value,
            bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      if (is_here) store(out + (base + i), out_out);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_row_stage_1_once(const float saved_variance, float& inverse_root) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_row_stage_1(const float d_out, const float weight, const float x,
    const float p_operand, const float saved_mean, const float inverse_root, float& total_4_term,
    float& total_4_term_by, float& total_5_term, float& total_5_term_by, float& total_2_term,
    float& total_2_term_by, float& total_3_term) {
  // add(p)
  const float after_add = x + p_operand;
  total_4_term = d_out * weight;
  total_4_term_by = after_add - saved_mean;
  total_5_term = d_out;
  total_5_term_by = weight;
  total_2_term = d_out;
  total_2_term_by = total_4_term_by * inverse_root;
  total_3_term = d_out;
}

__device__ __forceinline__ void backward_row_values_once(const float saved_variance, const float total_4,
    const float count_of_inner, const float total_5, float& inverse_root_2, float& negated, float& product) {
  inverse_root_2 = rsqrtf(saved_variance + 1e-05f);
  const float quotient = 1.0f / count_of_inner;
  const float product_2 = total_4 * inverse_root_2 * inverse_root_2 * inverse_root_2 * quotient;
  negated = -product_2;
  product = total_5 * inverse_root_2 * quotient;
}

__device__ __forceinline__ void backward_row_values(const float x, const float p_operand,
    const float saved_mean, const float negated, const float d_out, const float weight,
    const float inverse_root_2, const float product, float& d_x, float& total_term) {
  // add(p)
  const float after_add = x + p_operand;
  // backward, down to add(p)
  const float sum = fmaf(after_add - saved_mean, negated, d_out * weight * inverse_root_2);
  d_x = sum - product;
  total_term = d_x;
}

// Reads d_out, x, weight by (inner), p_operand by (middle, inner), saved_mean by (outer, middle), saved_variance by (outer, middle); leaves partials of total, total_2, total_3; writes d_x.
__global__ void __launch_bounds__(256, 2)
backward_row(const float* d_out, const float* weight, const float* x, const float* p_operand,
    const float* saved_mean, const float* saved_variance, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, Sum<float>* __restrict__ total_2_partials,
    Sum<float>* __restrict__ total_3_partials, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Sum<float> total_sum[kPacks][kLanes];
  Sum<float> total_2_sum[kPacks][kLanes];
  Sum<float> total_3_sum[kPacks][kLanes];
  auto* const d_out_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  auto* const x_next = reinterpret_cast<Pack<float, kLanes>*>(room + 512) + thread;
  Pack<float, kLanes> weight_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  int slot = 0;
  float saved_mean_ahead[2];
  float saved_variance_ahead[2];
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&d_out_next[slot * 1024 + p * 256], d_out + (base + i));
      if (is_here) send(&x_next[slot * 1024 + p * 256], x + (base + i));
    }
    send_off();
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    saved_mean_ahead[1] = widen(saved_mean[(outer) * sizes.middle.value + middle]);
    saved_variance_ahead[1] = widen(saved_variance[(outer) * sizes.middle.value + middle]);
  };
  send_row(first);
  saved_mean_ahead[0] = saved_mean_ahead[1];
  saved_variance_ahead[0] = saved_variance_ahead[1];
  slot = 1;
  send_row(first + stride);
  slot = 0;
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    Pack<float, kLanes> d_out_in[kPacks];
    Pack<float, kLanes> x_in[kPacks];
    wait_for_sent<1>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      d_out_in[p] = d_out_next[slot * 1024 + p * 256];
      x_in[p] = x_next[slot * 1024 + p * 256];
    }
    const float saved_mean_value = saved_mean_ahead[0];
    const float saved_variance_value = saved_variance_ahead[0];
    saved_mean_ahead[0] = saved_mean_ahead[1];
    saved_variance_ahead[0] = saved_variance_ahead[1];
    send_row(first + 2 * stride);
    slot ^= 1;
    Sum<float> sums_1[2];
    float inverse_root_value;
    backward_row_stage_1_once(saved_variance_value, inverse_root_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      Pack<float, kLanes> p_operand_in;
      if (is_here) p_operand_in = load<kLanes>(p_operand + ((middle) * length + i));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in[p], lane);
        const float p_operand_value = widen(p_operand_in, lane);
        float total_4_term_value;
        float total_4_term_by_value;
        float total_5_term_value;
        float total_5_term_by_value;
        float total_2_term_value;
        float total_2_term_by_value;
        float total_3_term_value;
        backward_row_stage_1(d_out_value, weight_value, x_value, p_operand_value, saved_mean_value,
            inverse_root_value, total_4_term_value, total_4_term_by_value, total_5_term_value,
            total_5_term_by_value, total_2_term_value, total_2_term_by_value, total_3_term_value);
        if (is_here) sums_1[0].add(total_4_term_value, total_4_term_by_value);
        if (is_here) sums_1[1].add(total_5_term_value, total_5_term_by_value);
        if (is_here) total_2_sum[p][lane].add(total_2_term_value, total_2_term_by_value);
        if (is_here) total_3_sum[p][lane].add(total_3_term_value);
      }
    }
    combine<8, true>(sums_1, cells[turn++ & 1]);
    const float total_4_value = sums_1[0].total;
    const float total_5_value = sums_1[1].total;
    float inverse_root_2_value;
    float negated_value;
    float product_value;
    backward_row_values_once(saved_variance_value, total_4_value, count_of_inner_value, total_5_value,
        inverse_root_2_value, negated_value, product_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      Pack<float, kLanes> p_operand_in;
      if (is_here) p_operand_in = load<kLanes>(p_operand + ((middle) * length + i));
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in[p], lane);
        const float p_operand_value = widen(p_operand_in, lane);
        float d_x_value;
        float total_term_value;
        backward_row_values(x_value, p_operand_value, saved_mean_value, negated_value, d_out_value,
            weight_value, inverse_root_2_value, product_value, d_x_value, total_term_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
        if (is_here) total_sum[p][lane].add(total_term_value);
      }
      if (is_here) store(d_x + (base + i), d_x_out);
    }
  }
  // One partial for each column and thread: all rows of a thread have the same middle.
  const Index slot_row = blockIdx.x * blockDim.y + threadIdx.y;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) store_sums<4>(total_partials + (slot_row * length + i), total_sum[p]);
    if (i < length) store_sums<4>(total_2_partials + (slot_row * length + i), total_2_sum[p]);
    if (i < length) store_sums<4>(total_3_partials + (slot_row * length + i), total_3_sum[p]);
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float total_2,
    const float total_3, float& d_p_operand, float& total_2_scratch, float& total_3_scratch) {
  d_p_operand = total;
  total_2_scratch = total_2;
  total_3_scratch = total_3;
}

// Merges partials into total, total_2, total_3; writes d_p_operand, total_2_scratch, total_3_scratch.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_p_operand, float* __restrict__ total_2_scratch,
    float* __restrict__ total_3_scratch, const Sum<float>* total_partials,
    const Sum<float>* total_2_partials, const Sum<float>* total_3_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 24];
  const Index columns = sizes.middle.value * sizes.inner.value,
      strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_sum;
  Sum<double> total_2_sum;
  Sum<double> total_3_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
      Sum<float> total_2_next[kAtOnce];
      Sum<float> total_3_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[(above * slots + slot) * columns + column];
        total_2_next[n] = total_2_partials[(above * slots + slot) * columns + column];
        total_3_next[n] = total_3_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_sum.merge(total_next[n]);
        total_2_sum.merge(total_2_next[n]);
        total_3_sum.merge(total_3_next[n]);
      }
    }
  }
  merge_trees(shared, total_sum, total_2_sum, total_3_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const float total_2_value = static_cast<float>(total_2_sum.sum());
  const float total_3_value = static_cast<float>(total_3_sum.sum());
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index middle = above_inner;
  float d_p_operand_value;
  float total_2_scratch_value;
  float total_3_scratch_value;
  backward_finalise_values(total_value, total_2_value, total_3_value, d_p_operand_value,
      total_2_scratch_value, total_3_scratch_value);
  d_p_operand[(middle) * sizes.inner.value + inner] = narrow<float>(d_p_operand_value);
  total_2_scratch[(middle) * sizes.inner.value + inner] = narrow<float>(total_2_scratch_value);
  total_3_scratch[(middle) * sizes.inner.value + inner] = narrow<float>(total_3_scratch_value);
}

__device__ __forceinline__ void backward_outer_values(const float total_2, const float total_3,
    float& total_6_term, float& total_7_term) {
  total_6_term = total_2;
  total_7_term = total_3;
}

// Reads total_2, total_3; leaves partials of total_6, total_7.
template <int kLanes>
__global__ void __launch_bounds__(256, 4)
backward_outer(const float* total_2, const float* total_3, Sum<float>* __restrict__ total_6_partials,
    Sum<float>* __restrict__ total_7_partials, BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  constexpr int kRows = 2;
  __shared__ alignas(16) unsigned char shared[(1024 + 32) * 4];
  const Index rows = sizes.middle.value, columns = sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index slot = task;
  Sum<float> total_6_sum[kLanes];
  Sum<float> total_7_sum[kLanes];
  if (column < columns) {
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<float, kLanes> total_2_in[kRows];
      Pack<float, kLanes> total_3_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        total_2_in[p] = load<kLanes>(total_2 + (row * columns + column));
        total_3_in[p] = load<kLanes>(total_3 + (row * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float total_2_value = widen(total_2_in[p], lane);
          const float total_3_value = widen(total_3_in[p], lane);
          float total_6_term_value;
          float total_7_term_value;
          backward_outer_values(total_2_value, total_3_value, total_6_term_value, total_7_term_value);
          if (is_here) total_6_sum[lane].add(total_6_term_value);
          if (is_here) total_7_sum[lane].add(total_7_term_value);
        }
      }
    }
  }
  leave_columns(total_6_sum, shared, total_6_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
  leave_columns(total_7_sum, shared, total_7_partials + (task * columns + strip),
      static_cast<int64_t>(columns) - strip);
}

__device__ __forceinline__ void backward_finalise_2_values(const float total_6, const float total_7,
    float& d_weight, float& d_bias) {
  d_weight = total_6;
  d_bias = total_7;
}

// Merges partials into total_6, total_7; writes d_weight, d_bias.
__global__ void __launch_bounds__(512)
backward_finalise_2(float* __restrict__ d_weight, float* __restrict__ d_bias,
    const Sum<float>* total_6_partials, const Sum<float>* total_7_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_6_sum;
  Sum<double> total_7_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_6_next[kAtOnce];
      Sum<float> total_7_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_6_next[n] = total_6_partials[(above * slots + slot) * columns + column];
        total_7_next[n] = total_7_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_6_sum.merge(total_6_next[n]);
        total_7_sum.merge(total_7_next[n]);
      }
    }
  }
  merge_trees(shared, total_6_sum, total_7_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_6_value = static_cast<float>(total_6_sum.sum());
  const float total_7_value = static_cast<float>(total_7_sum.sum());
  const Index inner = result;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_2_values(total_6_value, total_7_value, d_weight_value, d_bias_value);
  d_weight[inner] = narrow<float>(d_weight_value);
  d_bias[inner] = narrow<float>(d_bias_value);
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

// A row's threads along x: a power of two within a warp, or whole warps; along y, rows beside each other for so many threads.
static dim3 row_block(int64_t wanted, int64_t threads, int64_t least = 1) {
  const int64_t along = wanted <= 32 ? power_of_two(wanted, least, 32) : ceil_divide(wanted, 32) * 32;
  return dim3(static_cast<unsigned>(along), static_cast<unsigned>(along < threads ? threads / along : 1));
}

// Where every thread is to stay with rows that have an index in common, of which there are `alike`: blocks of so many rows
// beside each other come in multiples of this.
static int64_t alike_step(int64_t alike, int64_t beside) { return alike / power_of_two(alike & -alike, 1,
    beside); }

// Of such blocks, those that leave the fewest of the threads without work that the device has room for: smaller ones where
// that is a tenth at least.
template <typename Kernel>
static dim3 alike_block(Kernel* kernel, dim3 block, int64_t alike, int64_t shared_bytes, int64_t most_bytes,
    int device) {
  dim3 best = block;
  int64_t most = 0;
  for (; block.y > 0 && block.x * block.y % 32 == 0; block.y /= 2) {
    const int64_t step = alike_step(alike, block.y);
    const int64_t rows = resident_blocks(kernel, block, shared_bytes, most_bytes,
        device) / step * step * block.y;
    if (10 * rows > 11 * most) best = block, most = rows;
  }
  return best;
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

// a: x, p_operand, weight, bias, out, saved_mean, saved_variance, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
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
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const ForwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 12), 64);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_slots = forward_row_tasks;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x, p_operand,
        weight, bias, out, saved_mean, saved_variance, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, p_operand, weight, saved_mean, saved_variance, d_out, d_x, d_p_operand, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const p_operand = reinterpret_cast<const float*>(a[1]);
  auto* const weight = reinterpret_cast<const float*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const float*>(a[5]);
  auto* const d_x = reinterpret_cast<float*>(a[6]);
  auto* const d_p_operand = reinterpret_cast<float*>(a[7]);
  auto* const d_weight = reinterpret_cast<float*>(a[8]);
  auto* const d_bias = reinterpret_cast<float*>(a[9]);
  const bool is_measuring = a[10] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[5] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[10])};
  const BackwardSizes sizes{ size_of(a[11]), size_of(a[12]), size_of(a[13]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[15]);
  const int device = static_cast<int>(a[14]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many rows at a time that all of a thread have the same middle.
  const int64_t backward_row_alike = static_cast<int64_t>(sizes.middle.value);
  const dim3 backward_row_block = alike_block(backward_row, row_block(ceil_divide(backward_row_length, 8),
      256), backward_row_alike, 32768, 32768, device);
  const int64_t backward_row_tasks = ceil_divide(backward_row_rows, backward_row_block.y);
  const int64_t backward_row_resident = resident_blocks(backward_row, backward_row_block, 32768, 32768,
      device);
  const int64_t backward_row_step = alike_step(backward_row_alike, backward_row_block.y),
      backward_row_steps = backward_row_resident / backward_row_step;
  const int64_t backward_row_slots = backward_row_step * (backward_row_tasks < backward_row_resident ? ceil_divide(backward_row_tasks, backward_row_step) : backward_row_steps > 0 ? backward_row_steps : 1);
  const int64_t total_partials_slots = backward_row_slots * backward_row_block.y / backward_row_alike;
  const int64_t total_2_partials_slots = backward_row_slots * backward_row_block.y / backward_row_alike;
  const int64_t total_3_partials_slots = backward_row_slots * backward_row_block.y / backward_row_alike;
  const int64_t backward_outer_rows = static_cast<int64_t>(sizes.middle.value),
      backward_outer_columns = static_cast<int64_t>(sizes.inner.value), backward_outer_kept = 1;
  const bool backward_outer_is_packed = backward_outer_columns % 4 == 0;
  const auto backward_outer_kernel = backward_outer_is_packed ? &backward_outer<4> : &backward_outer<1>;
  // Some 32 threads side by side, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t backward_outer_along = power_of_two(ceil_divide(backward_outer_rows, 8), 1, 8);
  const int64_t backward_outer_packs = ceil_divide(backward_outer_columns, backward_outer_is_packed ? 4 : 1),
      backward_outer_widest = 256 / backward_outer_along;
  const int64_t backward_outer_room = resident_blocks(backward_outer_kernel, dim3(256), 0, 0,
      device) / backward_outer_kept;
  const unsigned backward_outer_width = strip_width(backward_outer_packs, backward_outer_widest, 256,
      backward_outer_room);
  const dim3 backward_outer_block(backward_outer_width, 256 / backward_outer_width);
  const int64_t backward_outer_strips = ceil_divide(backward_outer_columns,
      backward_outer_width * (backward_outer_is_packed ? 4 : 1));
  const int64_t backward_outer_most = ceil_divide(backward_outer_rows, backward_outer_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t backward_outer_wanted = backward_outer_room < backward_outer_strips ? 1 : backward_outer_room / backward_outer_strips;
  const int64_t backward_outer_slots = backward_outer_wanted < backward_outer_most ? backward_outer_wanted : backward_outer_most;
  const int64_t total_6_partials_slots = backward_outer_slots;
  const int64_t total_7_partials_slots = backward_outer_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_3_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_6_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_6_partials_slots);
  auto* const total_7_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_7_partials_slots);
  if (is_measuring) return scratch.used;
  {
    follow(backward_row, static_cast<unsigned>(backward_row_slots), backward_row_block, 32768, stream, d_out,
        weight, x, p_operand, saved_mean, saved_variance, d_x, total_partials, total_2_partials,
        total_3_partials, sizes);
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
    follow(backward_finalise, blocks, block, 0, stream, d_p_operand, total_2_scratch, total_3_scratch,
        total_partials, total_2_partials, total_3_partials, sizes, static_cast<Index>(slots));
  }
  {
    const auto blocks = static_cast<unsigned>(backward_outer_kept * backward_outer_slots * backward_outer_strips);
    follow(backward_outer_kernel, blocks, backward_outer_block, 0, stream, total_2_scratch, total_3_scratch,
        total_6_partials, total_7_partials, sizes, static_cast<Index>(backward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_6_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise_2, blocks, block, 0, stream, d_weight, d_bias, total_6_partials,
        total_7_partials, sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
