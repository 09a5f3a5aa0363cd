// fusegen 0.1.0   chain 61178dd74499   signature forward+backward: bias bfloat16, d_bias bfloat16, d_out bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, saved_mean float32, saved_mean_ float32, saved_variance float32, weight bfloat16, x bfloat16; 32-bit offsets
//   layernorm(weight, bias) | mean(1)
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
  __device__ void add(bool is_first, T value) { add_if(true, is_first, value); }
  __device__ void add_if(bool is_here, bool is_first, T value) {
    if (is_first) centre = is_here ? value : T(0);
    const T distance = is_here ? value - centre : T(0);
    off += distance;
    squares = fma(distance, distance, squares);
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

// The same where a thread has all of its row's elements.
template <typename T, int N, int L>
__device__ __forceinline__ void settle(Spread<T> (&mine)[N][L], T count, T inverse_length) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      Spread<T>& row = mine[n][lane];
      row.move(fma(count, row.centre, row.off) * inverse_length, count);
      // A mean is mended by what the distances from it add up to.
      const T drift = row.off * inverse_length;
      row.centre += drift;
      row.squares -= drift * row.off;
    }
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

__device__ __forceinline__ void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_row_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_row_values(const float x, const float mean, const float inverse_root,
    float& total_term, float& total_term_by) {
  total_term = x - mean;
  total_term_by = inverse_root;
}

__device__ __forceinline__ void forward_row_row_values(const float mean, const float variance,
    float& saved_mean, float& saved_variance) {
  saved_mean = mean;
  saved_variance = variance;
}

// Reads x; leaves partials of total; writes saved_mean, saved_variance.
__global__ void __launch_bounds__(256, 2)
forward_row(const bfloat16* x, float* __restrict__ saved_mean, float* __restrict__ saved_variance,
    Sum<float>* __restrict__ total_partials, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 3;
  __shared__ float cells[2][24];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Sum<float> total_sum[kPacks][kLanes];
  auto* const x_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  int slot = 0;
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index above_row = divide(first + threadIdx.y, sizes.outer);
    const Index row = is_live ? (first + threadIdx.y - above_row * sizes.outer.value) * (sizes.middle.value) + above_row : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&x_next[slot * 768 + p * 256], x + (base + i));
    }
    send_off();
  };
  send_row(first);
  slot = 1;
  send_row(first + stride);
  slot = 0;
  const float elements = elements_of<kPacks, kLanes>(threadIdx.x * kLanes, blockDim.x * kLanes, length);
  const Counts<float> counts = counted<false>(elements);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index above_row = divide(first + threadIdx.y, sizes.outer);
    const Index row = is_live ? (first + threadIdx.y - above_row * sizes.outer.value) * (sizes.middle.value) + above_row : 0, end = is_live ? length : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<bfloat16, kLanes> x_in[kPacks];
    wait_for_sent<1>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[slot * 768 + p * 256];
    }
    send_row(first + 2 * stride);
    slot ^= 1;
    Spread<float> spreads_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      float mean_term_lanes[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        mean_term_lanes[lane] = mean_term_value;
      }
      if (is_here) spreads_1[0].add_if(true, p == 0, mean_term_lanes);
    }
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
      if (!is_here) continue;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_term_value;
        float total_term_by_value;
        forward_row_values(x_value, mean_value, inverse_root_value, total_term_value, total_term_by_value);
        if (is_here) total_sum[p][lane].add(total_term_value, total_term_by_value);
      }
    }
  }
  // One partial for each column and thread: all rows of a thread have the same outer.
  const Index slot_row = blockIdx.x * blockDim.y + threadIdx.y;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) store_sums<4>(total_partials + (slot_row * length + i), total_sum[p]);
  }
}

__device__ __forceinline__ void forward_finalise_values(const float total, const float count_of_middle,
    const float weight, const float bias, float& out, float& saved_mean_) {
  // mean(1)
  out = fmaf(total * (1.0f / count_of_middle), weight, bias);
  saved_mean_ = total * (1.0f / count_of_middle);
}

// Reads weight by (inner), bias by (inner); merges partials into total; writes out, saved_mean_.
__global__ void __launch_bounds__(512)
forward_finalise(const bfloat16* weight, const bfloat16* bias, bfloat16* __restrict__ out,
    float* __restrict__ saved_mean_, const Sum<float>* total_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.outer.value * sizes.inner.value,
      strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index outer = above_inner;
  const float weight_value = widen(weight[inner]);
  const float bias_value = widen(bias[inner]);
  float out_value;
  float saved_mean__value;
  forward_finalise_values(total_value, count_of_middle_value, weight_value, bias_value, out_value,
      saved_mean__value);
  out[(outer) * sizes.inner.value + inner] = narrow<bfloat16>(out_value);
  saved_mean_[(outer) * sizes.inner.value + inner] = narrow<float>(saved_mean__value);
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_row_stage_1(const float d_out, const float weight, const float x,
    const float saved_mean, float& total_term, float& total_term_by, float& total_2_term,
    float& total_2_term_by) {
  total_term = d_out * weight;
  total_term_by = x - saved_mean;
  total_2_term = d_out;
  total_2_term_by = weight;
}

__device__ __forceinline__ void backward_row_values_once(const float count_of_middle,
    const float saved_variance, const float total, const float count_of_inner, const float total_2,
    float& quotient, float& inverse_root, float& negated, float& product) {
  quotient = narrow_div(1.0f, count_of_middle);
  inverse_root = rsqrtf(saved_variance + 1e-05f);
  const float quotient_2 = narrow_div(1.0f, count_of_inner);
  const float product_2 = total * quotient * inverse_root * inverse_root * inverse_root * quotient_2;
  negated = -product_2;
  product = total_2 * quotient * inverse_root * quotient_2;
}

__device__ __forceinline__ void backward_row_values(const float x, const float saved_mean,
    const float negated, const float d_out, const float weight, const float quotient,
    const float inverse_root, const float product, float& d_x) {
  // backward, down to layernorm(weight, bias)
  const float d_after_layernorm = d_out * weight * quotient;
  d_x = fmaf(x - saved_mean, negated, d_after_layernorm * inverse_root) - product;
}

// Reads x, d_out by (outer, inner), weight by (inner), saved_mean by (outer, middle), saved_variance by (outer, middle); writes d_x.
__global__ void __launch_bounds__(256, 4)
backward_row(const bfloat16* d_out, const bfloat16* weight, const bfloat16* x, const float* saved_mean,
    const float* saved_variance, bfloat16* __restrict__ d_x, BackwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  constexpr int kLanes = 8, kPacks = 3;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  // Rows behind each other share what some have in common: a block has two of them where there are many.
  const Index turns = (rows - 1) / (gridDim.x * blockDim.y) + 1, from = blockIdx.x * turns * blockDim.y;
  const Index past = min(rows, from + turns * blockDim.y);
  for (Index first = from; first < past; first += blockDim.y) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    const float saved_mean_value = widen(saved_mean[(outer) * sizes.middle.value + middle]);
    const float saved_variance_value = widen(saved_variance[(outer) * sizes.middle.value + middle]);
    Sum<float> sums_1[2];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<bfloat16, kLanes> d_out_in;
      if (is_here) d_out_in = load<kLanes>(d_out + ((outer) * length + i));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        const float d_out_value = widen(d_out_in, lane);
        float total_term_value;
        float total_term_by_value;
        float total_2_term_value;
        float total_2_term_by_value;
        backward_row_stage_1(d_out_value, weight_value, x_value, saved_mean_value, total_term_value,
            total_term_by_value, total_2_term_value, total_2_term_by_value);
        if (is_here) sums_1[0].add(total_term_value, total_term_by_value);
        if (is_here) sums_1[1].add(total_2_term_value, total_2_term_by_value);
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_value = sums_1[0].total;
    const float total_2_value = sums_1[1].total;
    float quotient_value;
    float inverse_root_value;
    float negated_value;
    float product_value;
    backward_row_values_once(count_of_middle_value, saved_variance_value, total_value, count_of_inner_value,
        total_2_value, quotient_value, inverse_root_value, negated_value, product_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<bfloat16, kLanes> d_out_in;
      if (is_here) d_out_in = load<kLanes>(d_out + ((outer) * length + i));
      Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        const float d_out_value = widen(d_out_in, lane);
        float d_x_value;
        backward_row_values(x_value, saved_mean_value, negated_value, d_out_value, weight_value,
            quotient_value, inverse_root_value, product_value, d_x_value);
        d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
      }
      if (is_here) store(d_x + (base + i), d_x_out);
    }
  }
}

__device__ __forceinline__ void backward_column_stage_1(const float d_out, const float saved_mean_,
    float& total_3_term, float& total_3_term_by, float& total_4_term) {
  total_3_term = d_out;
  total_3_term_by = saved_mean_;
  total_4_term = d_out;
}

__device__ __forceinline__ void backward_column_row_values(const float total_3, const float total_4,
    float& d_weight, float& d_bias) {
  d_weight = total_3;
  d_bias = total_4;
}

// Reads d_out, saved_mean_; writes d_weight, d_bias.
__global__ void __launch_bounds__(128, 4)
backward_column(const bfloat16* d_out, const float* saved_mean_, bfloat16* __restrict__ d_weight,
    bfloat16* __restrict__ d_bias, BackwardSizes sizes, Size across, Index tiles) {
  wait_for_kernel_before();
  constexpr int kLanes = 2, kPacks = 8;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = 1 * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    Pack<bfloat16, kLanes> d_out_in[kPacks];
    Pack<float, kLanes> saved_mean__in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) d_out_in[p] = load<kLanes>(d_out + (base + i * behind));
      if (is_here) saved_mean__in[p] = load<kLanes>(saved_mean_ + (base + i * behind));
    }
    Sum<float> sums_1[2][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float saved_mean__value = widen(saved_mean__in[p], lane);
        float total_3_term_value;
        float total_3_term_by_value;
        float total_4_term_value;
        backward_column_stage_1(d_out_value, saved_mean__value, total_3_term_value, total_3_term_by_value,
            total_4_term_value);
        sums_1[0][lane].add_if(is_here, total_3_term_value, total_3_term_by_value);
        sums_1[1][lane].add_if(is_here, total_4_term_value);
      }
    }
    {
      Pack<bfloat16, kLanes> d_weight_out;
      Pack<bfloat16, kLanes> d_bias_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_3_value = sums_1[0][lane].total;
        const float total_4_value = sums_1[1][lane].total;
        float d_weight_value;
        float d_bias_value;
        backward_column_row_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
        d_weight_out.at[lane] = narrow<bfloat16>(d_weight_value);
        d_bias_out.at[lane] = narrow<bfloat16>(d_bias_value);
      }
      const Index inner = beside;
      store(d_weight + (inner), d_weight_out);
      store(d_bias + (inner), d_bias_out);
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

// a: x, weight, bias, out, saved_mean, saved_variance, saved_mean_, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  auto* const saved_mean_ = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const ForwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_row_length = static_cast<int64_t>(sizes.inner.value);
  // So many rows at a time that all of a thread have the same outer.
  const int64_t forward_row_alike = static_cast<int64_t>(sizes.outer.value);
  const dim3 forward_row_block = alike_block(forward_row, row_block(ceil_divide(forward_row_length, 24),
      256), forward_row_alike, 24576, 24576, device);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 24576, 24576, device);
  const int64_t forward_row_step = alike_step(forward_row_alike, forward_row_block.y),
      forward_row_steps = forward_row_resident / forward_row_step;
  const int64_t forward_row_slots = forward_row_step * (forward_row_tasks < forward_row_resident ? ceil_divide(forward_row_tasks, forward_row_step) : forward_row_steps > 0 ? forward_row_steps : 1);
  const int64_t total_partials_slots = forward_row_slots * forward_row_block.y / forward_row_alike;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 24576, stream, x,
        saved_mean, saved_variance, total_partials, sizes);
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value), results = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(forward_finalise, blocks, block, 0, stream, weight, bias, out, saved_mean_, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, saved_mean, saved_variance, saved_mean_, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[2]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[3]);
  auto* const saved_mean_ = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[7]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[8]);
  const bool is_measuring = a[9] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[4] | a[5] | a[6] | a[7] | a[8]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[9])};
  const BackwardSizes sizes{ size_of(a[10]), size_of(a[11]), size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 backward_row_block = row_block(ceil_divide(backward_row_length, 24), 64);
  const int64_t backward_row_tasks = ceil_divide(backward_row_rows, backward_row_block.y);
  const int64_t backward_row_slots = backward_row_tasks < 4096 ? backward_row_tasks : ceil_divide(backward_row_tasks, 2);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 2,
      backward_column_packs = 1 * backward_column_across;
  const auto backward_column_beside = static_cast<unsigned>(power_of_two(backward_column_packs, 1, 32));
  const dim3 backward_column_block(backward_column_beside, 128 / backward_column_beside);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = ceil_divide(backward_column_tiles, backward_column_block.y);
  const int64_t backward_column_slots = backward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    follow(backward_row, static_cast<unsigned>(backward_row_slots), backward_row_block, 0, stream, d_out,
        weight, x, saved_mean, saved_variance, d_x, sizes);
  }
  {
    follow(backward_column, static_cast<unsigned>(backward_column_slots), backward_column_block, 0, stream,
        d_out, saved_mean_, d_weight, d_bias, sizes, size_of(backward_column_across),
        static_cast<Index>(backward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
