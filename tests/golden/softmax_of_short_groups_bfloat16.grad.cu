// fusegen 0.1.0   chain 671f358fd755   signature forward+backward: bias bfloat16, d_bias bfloat16, d_out bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, saved_bound float32, saved_mean float32, saved_sum float32, saved_variance float32, weight bfloat16, x bfloat16; 32-bit offsets
//   group_norm(16, weight, bias) | softmax(1)
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

// One instruction where exp2f takes four: what is below 2^-126 becomes zero. Relative error below 2^-22.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, inner;
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
  const Index rows = sizes.axis_1.value, columns = sizes.axis_2.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index kept_index = task / slots, slot = task % slots;
  const Index outer = kept_index;
  Moments<float> mean_sum[kLanes];
  if (column < columns) {
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        const Index axis_1 = row;
        x_in[p] = load<kLanes>(x + (((outer) * sizes.axis_1.value + axis_1) * columns + column));
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
  const Index columns = sizes.axis_2.value, strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index above_axis_2 = divide(result, sizes.axis_2);
  const Index axis_2 = result - above_axis_2 * sizes.axis_2.value;
  const Index outer = above_axis_2;
  float saved_mean_value;
  float saved_variance_value;
  float mean_scratch_value;
  float variance_scratch_value;
  forward_finalise_values(mean_value, variance_value, saved_mean_value, saved_variance_value,
      mean_scratch_value, variance_scratch_value);
  saved_mean[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(saved_mean_value);
  saved_variance[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(saved_variance_value);
  mean_scratch[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(mean_scratch_value);
  variance_scratch[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(variance_scratch_value);
}

__device__ __forceinline__ void forward_row_stage_1(const float x, const float mean, const float variance,
    const float weight, const float bias, float& peak_term) {
  // group_norm(16, weight, bias)
  peak_term = fmaf((x - mean) * (rsqrtf(variance + 1e-05f)), weight, bias);
}

__device__ __forceinline__ void forward_row_stage_2(const float x, const float mean, const float variance,
    const float weight, const float bias, const float peak, float& total_term, float& total_term_by,
    float& carried) {
  // group_norm(16, weight, bias)
  const float after_group_norm = fmaf((x - mean) * (rsqrtf(variance + 1e-05f)), weight, bias);
  total_term = exp2_flushed((after_group_norm - peak) * 0.721347511f);
  total_term_by = total_term;
  carried = total_term * total_term;
}

__device__ __forceinline__ void forward_row_values_once(const float total, float& chosen, float& inverse) {
  const float abs_value = fabsf(total);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total * chosen);
}

__device__ __forceinline__ void forward_row_values(const float carried, const float inverse,
    const float chosen, float& out) {
  // softmax(1)
  out = carried * inverse * chosen;
}

__device__ __forceinline__ void forward_row_row_values(const float peak, const float total,
    float& saved_bound, float& saved_sum) {
  saved_bound = peak;
  saved_sum = total;
}

// Reads x, mean by (outer, axis_2), variance by (outer, axis_2), weight by (axis_2, inner), bias by (axis_2, inner); writes out, saved_bound, saved_sum.
__global__ void __launch_bounds__(256, 4)
forward_row(const bfloat16* x, const float* mean, const float* variance, const bfloat16* weight,
    const bfloat16* bias, bfloat16* __restrict__ out, float* __restrict__ saved_bound,
    float* __restrict__ saved_sum, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_axis_1 = divide(row, sizes.axis_1);
    const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<bfloat16, kLanes> bias_in;
      if (is_here) bias_in = load<kLanes>(bias + i);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index above_inner = divide((is_here ? i + lane / 4 * 4 : 0), sizes.inner);
        const Index axis_2 = above_inner;
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        const float bias_value = widen(bias_in, lane);
        const float mean_value = widen(mean[(outer) * sizes.axis_2.value + axis_2]);
        const float variance_value = widen(variance[(outer) * sizes.axis_2.value + axis_2]);
        float peak_term_value;
        forward_row_stage_1(x_value, mean_value, variance_value, weight_value, bias_value, peak_term_value);
        peaks_1[0].add_if(is_here, peak_term_value);
      }
    }
    combine<8, false>(peaks_1, cells[turn++ & 1]);
    const float peak_value = peaks_1[0].best;
    Sum<float> sums_2[1];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<bfloat16, kLanes> bias_in;
      if (is_here) bias_in = load<kLanes>(bias + i);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index above_inner = divide((is_here ? i + lane / 4 * 4 : 0), sizes.inner);
        const Index axis_2 = above_inner;
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        const float bias_value = widen(bias_in, lane);
        const float mean_value = widen(mean[(outer) * sizes.axis_2.value + axis_2]);
        const float variance_value = widen(variance[(outer) * sizes.axis_2.value + axis_2]);
        float total_term_value;
        float total_term_by_value;
        float carried_value;
        forward_row_stage_2(x_value, mean_value, variance_value, weight_value, bias_value, peak_value,
            total_term_value, total_term_by_value, carried_value);
        sums_2[0].add_if(is_here, total_term_value, total_term_by_value);
        carried[p][lane] = carried_value;
      }
    }
    combine<8, false>(sums_2, cells[turn++ & 1]);
    const float total_value = sums_2[0].total;
    if (is_live && threadIdx.x == 0) {
      float saved_bound_value;
      float saved_sum_value;
      forward_row_row_values(peak_value, total_value, saved_bound_value, saved_sum_value);
      saved_bound[(outer) * sizes.axis_1.value + axis_1] = narrow<float>(saved_bound_value);
      saved_sum[(outer) * sizes.axis_1.value + axis_1] = narrow<float>(saved_sum_value);
    }
    float chosen_value;
    float inverse_value;
    forward_row_values_once(total_value, chosen_value, inverse_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float carried_value = carried[p][lane];
        float out_value;
        forward_row_values(carried_value, inverse_value, chosen_value, out_value);
        out_out.at[lane] = narrow<bfloat16>(out_value);
      }
      if (is_here) store(out + (base + i), out_out);
    }
  }
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner;
};

__device__ __forceinline__ void backward_row_stage_1_once(const float saved_sum, float& chosen,
    float& inverse) {
  const float abs_value = fabsf(saved_sum);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (saved_sum * chosen);
}

__device__ __forceinline__ void backward_row_stage_1(const float x, const float saved_mean,
    const float saved_variance, const float weight, const float bias, const float saved_bound,
    const float d_out, const float inverse, const float chosen, float& total_3_term, float& total_3_term_by,
    float& carried) {
  // group_norm(16, weight, bias)
  const float after_group_norm = fmaf((x - saved_mean) * (rsqrtf(saved_variance + 1e-05f)), weight, bias);
  const float power = exp2_flushed((after_group_norm - saved_bound) * 0.721347511f);
  total_3_term = power * power;
  total_3_term_by = d_out;
  carried = d_out * inverse * chosen;
}

__device__ __forceinline__ void backward_row_values_once(const float total_3, const float saved_sum,
    float& quotient) {
  quotient = narrow_div(narrow_div(total_3, saved_sum), saved_sum);
}

__device__ __forceinline__ void backward_row_values(const float x, const float saved_mean,
    const float saved_variance, const float weight, const float bias, const float saved_bound,
    const float carried, const float quotient, float& total_term, float& total_term_by, float& total_2_term,
    float& total_2_term_by) {
  // group_norm(16, weight, bias)
  const float difference = x - saved_mean;
  const float after_group_norm = fmaf(difference * (rsqrtf(saved_variance + 1e-05f)), weight, bias);
  const float power = exp2_flushed((after_group_norm - saved_bound) * 0.721347511f);
  total_term = difference * (power * power);
  total_term_by = carried - quotient;
  total_2_term = power * power;
  total_2_term_by = total_term_by;
}

__device__ __forceinline__ void backward_row_row_values(const float total_3, float& total_3_scratch) {
  total_3_scratch = total_3;
}

// Reads x, d_out, saved_mean by (outer, axis_2), saved_variance by (outer, axis_2), weight by (axis_2, inner), bias by (axis_2, inner), saved_bound by (outer, axis_1), saved_sum by (outer, axis_1); leaves partials of total, total_2; writes total_3_scratch.
__global__ void __launch_bounds__(256, 2)
backward_row(const bfloat16* x, const float* saved_mean, const float* saved_variance, const bfloat16* weight,
    const bfloat16* bias, const float* saved_bound, const bfloat16* d_out, const float* saved_sum,
    float* __restrict__ total_3_scratch, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Sum<float> total_sum[kPacks][kLanes];
  Sum<float> total_2_sum[kPacks][kLanes];
  auto* const x_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  auto* const d_out_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 256) + thread;
  Pack<bfloat16, kLanes> weight_in[kPacks];
  Pack<bfloat16, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
    if (i < length) bias_in[p] = load<kLanes>(bias + i);
  }
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  int slot = 0;
  float saved_bound_ahead[2];
  float saved_sum_ahead[2];
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index above_row = divide(first + threadIdx.y, sizes.outer);
    const Index row = is_live ? (first + threadIdx.y - above_row * sizes.outer.value) * (sizes.axis_1.value) + above_row : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&x_next[slot * 1024 + p * 256], x + (base + i));
      if (is_here) send(&d_out_next[slot * 1024 + p * 256], d_out + (base + i));
    }
    send_off();
    const Index above_axis_1 = divide(row, sizes.axis_1);
    const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    saved_bound_ahead[1] = widen(saved_bound[(outer) * sizes.axis_1.value + axis_1]);
    saved_sum_ahead[1] = widen(saved_sum[(outer) * sizes.axis_1.value + axis_1]);
  };
  send_row(first);
  saved_bound_ahead[0] = saved_bound_ahead[1];
  saved_sum_ahead[0] = saved_sum_ahead[1];
  slot = 1;
  send_row(first + stride);
  slot = 0;
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index above_row = divide(first + threadIdx.y, sizes.outer);
    const Index row = is_live ? (first + threadIdx.y - above_row * sizes.outer.value) * (sizes.axis_1.value) + above_row : 0, end = is_live ? length : 0;
    const Index above_axis_1 = divide(row, sizes.axis_1);
    const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Pack<bfloat16, kLanes> x_in[kPacks];
    Pack<bfloat16, kLanes> d_out_in[kPacks];
    wait_for_sent<1>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[slot * 1024 + p * 256];
      d_out_in[p] = d_out_next[slot * 1024 + p * 256];
    }
    const float saved_bound_value = saved_bound_ahead[0];
    const float saved_sum_value = saved_sum_ahead[0];
    saved_bound_ahead[0] = saved_bound_ahead[1];
    saved_sum_ahead[0] = saved_sum_ahead[1];
    send_row(first + 2 * stride);
    slot ^= 1;
    Sum<float> sums_1[1];
    float carried[kPacks][kLanes];
    float chosen_value;
    float inverse_value;
    backward_row_stage_1_once(saved_sum_value, chosen_value, inverse_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index above_inner = divide((is_here ? i + lane / 4 * 4 : 0), sizes.inner);
        const Index axis_2 = above_inner;
        const float x_value = widen(x_in[p], lane);
        const float d_out_value = widen(d_out_in[p], lane);
        const float weight_value = widen(weight_in[p], lane);
        const float bias_value = widen(bias_in[p], lane);
        const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_2.value + axis_2]);
        const float saved_variance_value = widen(saved_variance[(outer) * sizes.axis_2.value + axis_2]);
        float total_3_term_value;
        float total_3_term_by_value;
        float carried_value;
        backward_row_stage_1(x_value, saved_mean_value, saved_variance_value, weight_value, bias_value,
            saved_bound_value, d_out_value, inverse_value, chosen_value, total_3_term_value,
            total_3_term_by_value, carried_value);
        if (is_here) sums_1[0].add(total_3_term_value, total_3_term_by_value);
        carried[p][lane] = carried_value;
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_3_value = sums_1[0].total;
    if (is_live && threadIdx.x == 0) {
      float total_3_scratch_value;
      backward_row_row_values(total_3_value, total_3_scratch_value);
      total_3_scratch[(outer) * sizes.axis_1.value + axis_1] = narrow<float>(total_3_scratch_value);
    }
    float quotient_value;
    backward_row_values_once(total_3_value, saved_sum_value, quotient_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index above_inner = divide((is_here ? i + lane / 4 * 4 : 0), sizes.inner);
        const Index axis_2 = above_inner;
        const float x_value = widen(x_in[p], lane);
        const float weight_value = widen(weight_in[p], lane);
        const float bias_value = widen(bias_in[p], lane);
        const float carried_value = carried[p][lane];
        const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_2.value + axis_2]);
        const float saved_variance_value = widen(saved_variance[(outer) * sizes.axis_2.value + axis_2]);
        float total_term_value;
        float total_term_by_value;
        float total_2_term_value;
        float total_2_term_by_value;
        backward_row_values(x_value, saved_mean_value, saved_variance_value, weight_value, bias_value,
            saved_bound_value, carried_value, quotient_value, total_term_value, total_term_by_value,
            total_2_term_value, total_2_term_by_value);
        if (is_here) total_sum[p][lane].add(total_term_value, total_term_by_value);
        if (is_here) total_2_sum[p][lane].add(total_2_term_value, total_2_term_by_value);
      }
    }
  }
  // One partial for each column and thread: all rows of a thread have the same outer.
  const Index slot_row = blockIdx.x * blockDim.y + threadIdx.y;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) store_sums<4>(total_partials + (slot_row * length + i), total_sum[p]);
    if (i < length) store_sums<4>(total_2_partials + (slot_row * length + i), total_2_sum[p]);
  }
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
  const Index columns = sizes.outer.value * sizes.axis_2.value * sizes.inner.value,
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
  const Index above_axis_2 = divide(above_inner, sizes.axis_2);
  const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
  const Index outer = above_axis_2;
  float total_scratch_value;
  float total_2_scratch_value;
  backward_finalise_values(total_value, total_2_value, total_scratch_value, total_2_scratch_value);
  total_scratch[((outer) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(total_scratch_value);
  total_2_scratch[((outer) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner] = narrow<float>(total_2_scratch_value);
}

__device__ __forceinline__ void backward_row_2_stage_1_once(const float saved_variance, float& inverse_root) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
}

__device__ __forceinline__ void backward_row_2_stage_1(const float total, const float weight,
    const float total_2, const float inverse_root, float& total_6_term, float& total_6_term_by,
    float& total_7_term, float& total_7_term_by, float& total_4_term, float& total_4_term_by,
    float& total_5_term) {
  total_6_term = total;
  total_6_term_by = weight;
  total_7_term = total_2;
  total_7_term_by = weight;
  total_4_term = total;
  total_4_term_by = inverse_root;
  total_5_term = total_2;
}

__device__ __forceinline__ void backward_row_2_row_values(const float total_6, const float total_7,
    float& total_6_scratch, float& total_7_scratch) {
  total_6_scratch = total_6;
  total_7_scratch = total_7;
}

// Reads total, total_2, weight by (axis_2, inner), saved_variance by (outer, axis_2); leaves partials of total_4, total_5; writes total_6_scratch, total_7_scratch.
__global__ void __launch_bounds__(256, 2)
backward_row_2(const float* total, const bfloat16* weight, const float* total_2, const float* saved_variance,
    float* __restrict__ total_6_scratch, float* __restrict__ total_7_scratch,
    Sum<float>* __restrict__ total_4_partials, Sum<float>* __restrict__ total_5_partials,
    BackwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 1;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.axis_2.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Sum<float> total_4_sum[kPacks][kLanes];
  Sum<float> total_5_sum[kPacks][kLanes];
  auto* const total_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  auto* const total_2_next = reinterpret_cast<Pack<float, kLanes>*>(room + 256) + thread;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  int slot = 0;
  float saved_variance_ahead[2];
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&total_next[slot * 512 + p * 256], total + (base + i));
      if (is_here) send(&total_2_next[slot * 512 + p * 256], total_2 + (base + i));
    }
    send_off();
    const Index above_axis_2 = divide(row, sizes.axis_2);
    const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    saved_variance_ahead[1] = widen(saved_variance[(outer) * sizes.axis_2.value + axis_2]);
  };
  send_row(first);
  saved_variance_ahead[0] = saved_variance_ahead[1];
  slot = 1;
  send_row(first + stride);
  slot = 0;
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, end = is_live ? length : 0;
    const Index above_axis_2 = divide(row, sizes.axis_2);
    const Index axis_2 = row - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    Pack<float, kLanes> total_in[kPacks];
    Pack<float, kLanes> total_2_in[kPacks];
    wait_for_sent<1>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      total_in[p] = total_next[slot * 512 + p * 256];
      total_2_in[p] = total_2_next[slot * 512 + p * 256];
    }
    const float saved_variance_value = saved_variance_ahead[0];
    saved_variance_ahead[0] = saved_variance_ahead[1];
    send_row(first + 2 * stride);
    slot ^= 1;
    Sum<float> sums_1[2];
    float inverse_root_value;
    backward_row_2_stage_1_once(saved_variance_value, inverse_root_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      Pack<bfloat16, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + ((axis_2) * length + i));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float total_value = widen(total_in[p], lane);
        const float total_2_value = widen(total_2_in[p], lane);
        const float weight_value = widen(weight_in, lane);
        float total_6_term_value;
        float total_6_term_by_value;
        float total_7_term_value;
        float total_7_term_by_value;
        float total_4_term_value;
        float total_4_term_by_value;
        float total_5_term_value;
        backward_row_2_stage_1(total_value, weight_value, total_2_value, inverse_root_value,
            total_6_term_value, total_6_term_by_value, total_7_term_value, total_7_term_by_value,
            total_4_term_value, total_4_term_by_value, total_5_term_value);
        if (is_here) sums_1[0].add(total_6_term_value, total_6_term_by_value);
        if (is_here) sums_1[1].add(total_7_term_value, total_7_term_by_value);
        if (is_here) total_4_sum[p][lane].add(total_4_term_value, total_4_term_by_value);
        if (is_here) total_5_sum[p][lane].add(total_5_term_value);
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_6_value = sums_1[0].total;
    const float total_7_value = sums_1[1].total;
    if (is_live && threadIdx.x == 0) {
      float total_6_scratch_value;
      float total_7_scratch_value;
      backward_row_2_row_values(total_6_value, total_7_value, total_6_scratch_value, total_7_scratch_value);
      total_6_scratch[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(total_6_scratch_value);
      total_7_scratch[(outer) * sizes.axis_2.value + axis_2] = narrow<float>(total_7_scratch_value);
    }
  }
  // One partial for each column and thread: all rows of a thread have the same axis_2.
  const Index slot_row = blockIdx.x * blockDim.y + threadIdx.y;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
    if (i < length) store_sums<4>(total_4_partials + (slot_row * length + i), total_4_sum[p]);
    if (i < length) store_sums<4>(total_5_partials + (slot_row * length + i), total_5_sum[p]);
  }
}

__device__ __forceinline__ void backward_finalise_2_values(const float total_4, const float total_5,
    float& d_weight, float& d_bias) {
  d_weight = total_4;
  d_bias = total_5;
}

// Merges partials into total_4, total_5; writes d_weight, d_bias.
__global__ void __launch_bounds__(512)
backward_finalise_2(bfloat16* __restrict__ d_weight, bfloat16* __restrict__ d_bias,
    const Sum<float>* total_4_partials, const Sum<float>* total_5_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index columns = sizes.axis_2.value * sizes.inner.value,
      strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index result = above * columns + column;
  const bool is_live = column < columns;
  Sum<double> total_4_sum;
  Sum<double> total_5_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_4_next[kAtOnce];
      Sum<float> total_5_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_4_next[n] = total_4_partials[(above * slots + slot) * columns + column];
        total_5_next[n] = total_5_partials[(above * slots + slot) * columns + column];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        total_4_sum.merge(total_4_next[n]);
        total_5_sum.merge(total_5_next[n]);
      }
    }
  }
  merge_trees(shared, total_4_sum, total_5_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float total_4_value = static_cast<float>(total_4_sum.sum());
  const float total_5_value = static_cast<float>(total_5_sum.sum());
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index axis_2 = above_inner;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_2_values(total_4_value, total_5_value, d_weight_value, d_bias_value);
  d_weight[(axis_2) * sizes.inner.value + inner] = narrow<bfloat16>(d_weight_value);
  d_bias[(axis_2) * sizes.inner.value + inner] = narrow<bfloat16>(d_bias_value);
}

__device__ __forceinline__ void backward_outer_values_once(const float saved_variance, const float total_6,
    const float count_of_axis_1_inner, const float total_7, float& inverse_root, float& quotient,
    float& quotient_2) {
  inverse_root = rsqrtf(saved_variance + 1e-05f);
  quotient = narrow_div(-(total_6 * inverse_root * inverse_root * inverse_root), count_of_axis_1_inner);
  quotient_2 = narrow_div(total_7 * inverse_root, count_of_axis_1_inner);
}

__device__ __forceinline__ void backward_outer_values(const float x, const float saved_mean,
    const float quotient, const float d_out, const float saved_sum, const float total_3,
    const float inverse_root, const float weight, const float bias, const float saved_bound,
    const float quotient_2, float& d_x) {
  // group_norm(16, weight, bias)
  const float difference = x - saved_mean;
  const float after_group_norm = fmaf(difference * inverse_root, weight, bias);
  // backward, down to group_norm(16, weight, bias)
  const float abs_value = fabsf(saved_sum);
  const float chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  const float difference_2 = d_out * (1.0f / (saved_sum * chosen)) * chosen - narrow_div(narrow_div(total_3,
      saved_sum), saved_sum);
  const float power = exp2_flushed((after_group_norm - saved_bound) * 0.721347511f);
  const float d_after_group_norm = difference_2 * (power * power);
  const float sum = fmaf(difference, quotient, d_after_group_norm * weight * inverse_root);
  d_x = sum - quotient_2;
}

// Reads x, d_out, saved_mean by (outer, axis_2), total_6 by (outer, axis_2), saved_variance by (outer, axis_2), saved_sum by (outer, axis_1), total_3 by (outer, axis_1), weight by (axis_2, inner), bias by (axis_2, inner), saved_bound by (outer, axis_1), total_7 by (outer, axis_2); writes d_x.
template <int kLanes>
__global__ void __launch_bounds__(256, 2)
backward_outer(const bfloat16* x, const float* saved_mean, const float* total_6, const float* saved_variance,
    const bfloat16* d_out, const float* saved_sum, const float* total_3, const bfloat16* weight,
    const bfloat16* bias, const float* saved_bound, const float* total_7, bfloat16* __restrict__ d_x,
    BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  const float count_of_axis_1_inner_value = static_cast<float>(sizes.axis_1.value * sizes.inner.value);
  constexpr int kRows = 2;
  const Index rows = sizes.axis_1.value, columns = sizes.axis_2.value * sizes.inner.value;
  const Index strips = (columns + blockDim.x * kLanes - 1) / (blockDim.x * kLanes);
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index strip = blockIdx.x % strips * blockDim.x * kLanes, column = strip + threadIdx.x * kLanes;
  const Index kept_index = task / slots, slot = task % slots;
  const Index outer = kept_index;
  if (column < columns) {
    const Pack<bfloat16, kLanes> weight_in = load<kLanes>(weight + column);
    const Pack<bfloat16, kLanes> bias_in = load<kLanes>(bias + column);
    float saved_mean_column[kLanes];
    float quotient_column[kLanes];
    float inverse_root_column[kLanes];
    float quotient_2_column[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Index above_inner = divide(column + lane, sizes.inner);
      const Index axis_2 = above_inner;
      const float saved_mean_value = widen(saved_mean[(outer) * sizes.axis_2.value + axis_2]);
      const float total_6_value = widen(total_6[(outer) * sizes.axis_2.value + axis_2]);
      const float saved_variance_value = widen(saved_variance[(outer) * sizes.axis_2.value + axis_2]);
      const float total_7_value = widen(total_7[(outer) * sizes.axis_2.value + axis_2]);
      float inverse_root_value;
      float quotient_value;
      float quotient_2_value;
      backward_outer_values_once(saved_variance_value, total_6_value, count_of_axis_1_inner_value,
          total_7_value, inverse_root_value, quotient_value, quotient_2_value);
      saved_mean_column[lane] = saved_mean_value;
      quotient_column[lane] = quotient_value;
      inverse_root_column[lane] = inverse_root_value;
      quotient_2_column[lane] = quotient_2_value;
    }
    const Index share = (rows + slots - 1) / slots, end = min(rows, (slot + 1) * share);
    for (Index from = slot * share + threadIdx.y; from < end; from += blockDim.y * kRows) {
      Pack<bfloat16, kLanes> x_in[kRows];
      Pack<bfloat16, kLanes> d_out_in[kRows];
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        const Index axis_1 = row;
        x_in[p] = load<kLanes>(x + (((outer) * sizes.axis_1.value + axis_1) * columns + column));
        d_out_in[p] = load<kLanes>(d_out + (((outer) * sizes.axis_1.value + axis_1) * columns + column));
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool is_here = from + p * blockDim.y < end;
        const Index row = is_here ? from + p * blockDim.y : from;
        const Index axis_1 = row;
        const float saved_sum_value = widen(saved_sum[(outer) * sizes.axis_1.value + axis_1]);
        const float total_3_value = widen(total_3[(outer) * sizes.axis_1.value + axis_1]);
        const float saved_bound_value = widen(saved_bound[(outer) * sizes.axis_1.value + axis_1]);
        Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float saved_mean_value = saved_mean_column[lane];
          const float quotient_value = quotient_column[lane];
          const float inverse_root_value = inverse_root_column[lane];
          const float quotient_2_value = quotient_2_column[lane];
          const float x_value = widen(x_in[p], lane);
          const float d_out_value = widen(d_out_in[p], lane);
          const float weight_value = widen(weight_in, lane);
          const float bias_value = widen(bias_in, lane);
          float d_x_value;
          backward_outer_values(x_value, saved_mean_value, quotient_value, d_out_value, saved_sum_value,
              total_3_value, inverse_root_value, weight_value, bias_value, saved_bound_value,
              quotient_2_value, d_x_value);
          d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
        }
        if (is_here) store(d_x + (((outer) * sizes.axis_1.value + axis_1) * columns + column), d_x_out);
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

// a: x, weight, bias, out, saved_mean, saved_variance, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  auto* const saved_mean = reinterpret_cast<float*>(a[4]);
  auto* const saved_variance = reinterpret_cast<float*>(a[5]);
  auto* const saved_bound = reinterpret_cast<float*>(a[6]);
  auto* const saved_sum = reinterpret_cast<float*>(a[7]);
  const bool is_measuring = a[8] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const ForwardSizes sizes{ size_of(a[9]), size_of(a[10]), size_of(a[11]), size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const int64_t forward_outer_rows = static_cast<int64_t>(sizes.axis_1.value),
      forward_outer_columns = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), forward_outer_kept = static_cast<int64_t>(sizes.outer.value);
  const bool forward_outer_is_packed = forward_outer_columns % 8 == 0;
  const auto forward_outer_kernel = forward_outer_is_packed ? &forward_outer<8> : &forward_outer<1>;
  // Some 32 threads side by side, 64 where much is kept apart, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t forward_outer_along = power_of_two(ceil_divide(forward_outer_rows, 8), 1,
      256 / (forward_outer_kept < 32 ? 32 : 64));
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
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value), forward_row_length = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 16), 64);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_slots = forward_row_tasks;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  if (is_measuring) return scratch.used;
  {
    const auto blocks = static_cast<unsigned>(forward_outer_kept * forward_outer_slots * forward_outer_strips);
    follow(forward_outer_kernel, blocks, forward_outer_block, 0, stream, x, mean_partials, sizes,
        static_cast<Index>(forward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.axis_2.value),
        results = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value);
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
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x,
        mean_scratch, variance_scratch, weight, bias, out, saved_bound, saved_sum, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, bias, saved_mean, saved_variance, saved_bound, saved_sum, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const saved_mean = reinterpret_cast<const float*>(a[3]);
  auto* const saved_variance = reinterpret_cast<const float*>(a[4]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[5]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[6]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[7]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[8]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[9]);
  auto* const d_bias = reinterpret_cast<bfloat16*>(a[10]);
  const bool is_measuring = a[11] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[7] | a[8]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[11])};
  const BackwardSizes sizes{ size_of(a[12]), size_of(a[13]), size_of(a[14]), size_of(a[15]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[17]);
  const int device = static_cast<int>(a[16]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value), backward_row_length = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
  // So many rows at a time that all of a thread have the same outer.
  const int64_t backward_row_alike = static_cast<int64_t>(sizes.outer.value);
  const dim3 backward_row_block = alike_block(backward_row, row_block(ceil_divide(backward_row_length, 8),
      256), backward_row_alike, 16384, 16384, device);
  const int64_t backward_row_tasks = ceil_divide(backward_row_rows, backward_row_block.y);
  const int64_t backward_row_resident = resident_blocks(backward_row, backward_row_block, 16384, 16384,
      device);
  const int64_t backward_row_step = alike_step(backward_row_alike, backward_row_block.y),
      backward_row_steps = backward_row_resident / backward_row_step;
  const int64_t backward_row_slots = backward_row_step * (backward_row_tasks < backward_row_resident ? ceil_divide(backward_row_tasks, backward_row_step) : backward_row_steps > 0 ? backward_row_steps : 1);
  const int64_t total_partials_slots = backward_row_slots * backward_row_block.y / backward_row_alike;
  const int64_t total_2_partials_slots = backward_row_slots * backward_row_block.y / backward_row_alike;
  const int64_t backward_row_2_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value), backward_row_2_length = static_cast<int64_t>(sizes.inner.value);
  // So many rows at a time that all of a thread have the same axis_2.
  const int64_t backward_row_2_alike = static_cast<int64_t>(sizes.axis_2.value);
  const dim3 backward_row_2_block = alike_block(backward_row_2, row_block(ceil_divide(backward_row_2_length,
      4), 256), backward_row_2_alike, 16384, 16384, device);
  const int64_t backward_row_2_tasks = ceil_divide(backward_row_2_rows, backward_row_2_block.y);
  const int64_t backward_row_2_resident = resident_blocks(backward_row_2, backward_row_2_block, 16384, 16384,
      device);
  const int64_t backward_row_2_step = alike_step(backward_row_2_alike, backward_row_2_block.y),
      backward_row_2_steps = backward_row_2_resident / backward_row_2_step;
  const int64_t backward_row_2_slots = backward_row_2_step * (backward_row_2_tasks < backward_row_2_resident ? ceil_divide(backward_row_2_tasks, backward_row_2_step) : backward_row_2_steps > 0 ? backward_row_2_steps : 1);
  const int64_t total_4_partials_slots = backward_row_2_slots * backward_row_2_block.y / backward_row_2_alike;
  const int64_t total_5_partials_slots = backward_row_2_slots * backward_row_2_block.y / backward_row_2_alike;
  const int64_t backward_outer_rows = static_cast<int64_t>(sizes.axis_1.value),
      backward_outer_columns = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), backward_outer_kept = static_cast<int64_t>(sizes.outer.value);
  const bool backward_outer_is_packed = backward_outer_columns % 8 == 0;
  const auto backward_outer_kernel = backward_outer_is_packed ? &backward_outer<8> : &backward_outer<1>;
  // Some 32 threads side by side, 64 where much is kept apart, and more where rows are few, so that each goes down 8 of them; as many in every strip.
  const int64_t backward_outer_along = power_of_two(ceil_divide(backward_outer_rows, 8), 1,
      256 / (backward_outer_kept < 32 ? 32 : 64));
  const int64_t backward_outer_packs = ceil_divide(backward_outer_columns, backward_outer_is_packed ? 8 : 1),
      backward_outer_widest = 256 / backward_outer_along;
  const int64_t backward_outer_room = resident_blocks(backward_outer_kernel, dim3(256), 0, 0,
      device) / backward_outer_kept;
  const unsigned backward_outer_width = strip_width(backward_outer_packs, backward_outer_widest, 256,
      backward_outer_room);
  const dim3 backward_outer_block(backward_outer_width, 256 / backward_outer_width);
  const int64_t backward_outer_strips = ceil_divide(backward_outer_columns,
      backward_outer_width * (backward_outer_is_packed ? 8 : 1));
  const int64_t backward_outer_most = ceil_divide(backward_outer_rows, backward_outer_block.y * 2);
  // No more than work at once: a few blocks behind the others would take as long again.
  const int64_t backward_outer_wanted = backward_outer_room < backward_outer_strips ? 1 : backward_outer_room / backward_outer_strips;
  const int64_t backward_outer_slots = backward_outer_wanted < backward_outer_most ? backward_outer_wanted : backward_outer_most;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_2_partials_slots);
  auto* const total_3_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value));
  auto* const total_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_4_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  auto* const total_5_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value) * total_5_partials_slots);
  auto* const total_6_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  auto* const total_7_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value));
  if (is_measuring) return scratch.used;
  {
    follow(backward_row, static_cast<unsigned>(backward_row_slots), backward_row_block, 16384, stream, x,
        saved_mean, saved_variance, weight, bias, saved_bound, d_out, saved_sum, total_3_scratch,
        total_partials, total_2_partials, sizes);
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), results = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
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
    follow(backward_row_2, static_cast<unsigned>(backward_row_2_slots), backward_row_2_block, 16384, stream,
        total_scratch, weight, total_2_scratch, saved_variance, total_6_scratch, total_7_scratch,
        total_4_partials, total_5_partials, sizes);
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), results = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_4_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(backward_finalise_2, blocks, block, 0, stream, d_weight, d_bias, total_4_partials,
        total_5_partials, sizes, static_cast<Index>(slots));
  }
  {
    const auto blocks = static_cast<unsigned>(backward_outer_kept * backward_outer_slots * backward_outer_strips);
    follow(backward_outer_kernel, blocks, backward_outer_block, 0, stream, x, saved_mean, total_6_scratch,
        saved_variance, d_out, saved_sum, total_3_scratch, weight, bias, saved_bound, total_7_scratch, d_x,
        sizes, static_cast<Index>(backward_outer_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
