// fusegen 0.1.0   chain ed67c91b5cb2   signature forward+backward: d_out bfloat16, d_x bfloat16, labels int64, out bfloat16, saved_bound float32, saved_sum float32, saved_sum__ float32, x bfloat16; 32-bit offsets
//   cross_entropy(labels)
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

// Neighbours, the first `left` of them here, the others in another row, by as few accesses as their addresses allow.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_anywhere(const T* here, const T* next = nullptr, Index left = N) {
  constexpr int kPart = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  Pack<T, N> pack;
  if (left >= N && reinterpret_cast<uintptr_t>(here) % (sizeof(T) * kPart) == 0) {
#pragma unroll
    for (int n = 0; n < N; n += kPart) *reinterpret_cast<Pack<T,
        kPart>*>(pack.at + n) = load<kPart>(here + n);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) pack.at[n] = n < left ? here[n] : next[n - left];
  }
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
  Size outer, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_row_stage_2(const float x, const float peak, float& total_4_term,
    float& total_4_term_by) {
  total_4_term = exp2_flushed((x - peak) * 0.721347511f);
  total_4_term_by = total_4_term;
}

__device__ __forceinline__ void forward_row_stage_2_total_3(const int position_along, const int labels,
    const float x, float& total_3_term) {
  total_3_term = position_along == labels ? x : 0.0f;
}

__device__ __forceinline__ void forward_row_row_values(const float peak, const float total_4,
    const int labels, const float count_of_inner, const float total_3, float& saved_bound, float& saved_sum,
    float& total_term, float& total_2_term) {
  saved_bound = peak;
  saved_sum = total_4;
  const bool is_equal = labels == -100.0f;
  const float chosen = labels >= 0.0f && labels < count_of_inner ? logf(total_4) - (total_3 - peak) : NAN;
  total_term = is_equal ? 0.0f : chosen;
  total_2_term = is_equal ? 0.0f : 1.0f;
}

__device__ __forceinline__ void forward_row_rescale(const float peak_before, const float peak,
    float& total_4_scale) {
  const float power = exp2_flushed((peak_before - peak) * 0.721347511f);
  total_4_scale = power * power;
}

// Reads x, position_along by (inner), labels by (outer); leaves partials of total, total_2; writes saved_bound, saved_sum.
__global__ void __launch_bounds__(256, 8)
forward_row(const bfloat16* x, const int64_t* labels, float* __restrict__ saved_bound,
    float* __restrict__ saved_sum, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 8, kPacks = 2, kThreads = 256;
  __shared__ float cells[2][16];
  const Index row = blockIdx.x, length = sizes.inner.value, base = row * length, end = base + length;
  const Index outer = row;
  const int labels_value = widen(labels[outer]);
  Peak<float> peaks_1[1];
  Sum<float> sums_2[2];
  // The largest number of the turns so far; beside infinitely small ones, what is added up is 0.
  float peak_value = 0;
  const auto compare = [&](Index inner, float x_value) {
    float peak_term_value;
    forward_row_stage_1(x_value, peak_term_value);
    peaks_1[0].add(peak_term_value);
  };
  const auto add_up = [&](Index inner, float x_value) {
    float total_4_term_value;
    float total_4_term_by_value;
    forward_row_stage_2(x_value, peak_value, total_4_term_value, total_4_term_by_value);
    sums_2[0].add(total_4_term_value, total_4_term_by_value);
  };
  const auto add_to_total_3 = [&](Index inner, float x_value) {
    const int position_along_value = widen(position_along[inner]);
    float total_3_term_value;
    forward_row_stage_2_total_3(position_along_value, labels_value, x_value, total_3_term_value);
    sums_2[1].add(total_3_term_value);
  };
  const auto rescale = [&](float peak_before_value) {
    const float best = peaks_1[0].best;
    peak_value = best;
    float total_4_scale_value;
    forward_row_rescale(peak_before_value, peak_value, total_4_scale_value);
    const bool is_first = peak_before_value == -INFINITY && best != -INFINITY;
    sums_2[0].total *= is_first ? float(0) : total_4_scale_value;
  };
  // Packs start at multiples of their size; what stands before and behind them goes one by one.
  const Index head = min(end, (base + kLanes - 1) / kLanes * kLanes);
  const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
  if (threadIdx.x < (head - base) + (end - tail)) {
    const Index i = threadIdx.x < head - base ? base + threadIdx.x : tail + threadIdx.x - (head - base);
    const Index place = i - base;
    compare(place, widen(x[i]));
    if (peaks_1[0].best != -INFINITY) rescale(-INFINITY);
    add_up(place, widen(x[i]));
    add_to_total_3(place, widen(x[i]));
  }
  for (Index from = threadIdx.x; from < packs; from += kThreads * kPacks) {
    const float before = peaks_1[0].best;
    Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index pack = from + p * kThreads, i = head + pack * kLanes;
      if (pack >= packs) break;
      x_in[p] = load<kLanes>(x + i);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index pack = from + p * kThreads, i = head + pack * kLanes;
      if (pack >= packs) break;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) compare(i - base + lane, widen(x_in[p], lane));
    }
    if (peaks_1[0].best != before) rescale(before);
    // Added up a turn at a time: a sum that runs through all of them would lose digits.
    const Sum<float> total_4_mine = sums_2[0];
    sums_2[0] = Sum<float>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index pack = from + p * kThreads, i = head + pack * kLanes;
      if (pack >= packs) break;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) add_up(i - base + lane, widen(x_in[p], lane));
      if (static_cast<Index>(labels_value) - (i - base) < kLanes) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) add_to_total_3(i - base + lane, widen(x_in[p], lane));
      }
    }
    sums_2[0].merge(total_4_mine);
  }
  // What each thread has, beside the largest number of all.
  const float mine = peaks_1[0].best;
  combine<8, true>(peaks_1, cells[0]);
  rescale(mine);
  combine<8, true>(sums_2, cells[1]);
  const float total_4_value = sums_2[0].total;
  const float total_3_value = sums_2[1].total;
  if (threadIdx.x > 0) return;
  float saved_bound_value;
  float saved_sum_value;
  float total_term_value;
  float total_2_term_value;
  forward_row_row_values(peak_value, total_4_value, labels_value, count_of_inner_value, total_3_value,
      saved_bound_value, saved_sum_value, total_term_value, total_2_term_value);
  saved_bound[outer] = narrow<float>(saved_bound_value);
  saved_sum[outer] = narrow<float>(saved_sum_value);
  total_partials[row] = Sum<float>{total_term_value};
  total_2_partials[row] = Sum<float>{total_2_term_value};
}

__device__ __forceinline__ void forward_finalise_values(const float total, const float total_2, float& out,
    float& saved_sum__) {
  // cross_entropy(labels)
  out = narrow_div(total, total_2);
  saved_sum__ = total_2;
}

// Merges partials into total, total_2; writes out, saved_sum__.
__global__ void __launch_bounds__(512)
forward_finalise(bfloat16* __restrict__ out, float* __restrict__ saved_sum__,
    const Sum<float>* total_partials, const Sum<float>* total_2_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < 1;
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
        total_next[n] = total_partials[result * slots + slot];
        total_2_next[n] = total_2_partials[result * slots + slot];
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
  float out_value;
  float saved_sum___value;
  forward_finalise_values(total_value, total_2_value, out_value, saved_sum___value);
  out[0] = narrow<bfloat16>(out_value);
  saved_sum__[0] = narrow<float>(saved_sum___value);
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_pointwise_values_once(const int labels, const float count_of_inner,
    const float d_out, const float saved_sum__, const float saved_sum, float& quotient, float& negated) {
  const bool both_hold = labels >= 0.0f && labels < count_of_inner && !(labels == -100.0f);
  const float chosen = both_hold ? narrow_div(d_out, saved_sum__) : 0.0f;
  quotient = narrow_div(chosen, saved_sum);
  negated = -chosen;
}

__device__ __forceinline__ void backward_pointwise_values(const float quotient, const float x,
    const float saved_bound, const int position_along, const int labels, const float negated, float& d_x) {
  const float power = exp2_flushed((x - saved_bound) * 0.721347511f);
  d_x = fmaf(quotient, power * power, position_along == labels ? negated : 0.0f);
}

// Reads x, position_along by (inner), labels by (outer), d_out by (), saved_sum__ by (), saved_sum by (outer), saved_bound by (outer); writes d_x.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 2)
backward_pointwise(const int64_t* labels, const bfloat16* d_out, const float* saved_sum__,
    const float* saved_sum, const bfloat16* x, const float* saved_bound, bfloat16* __restrict__ d_x,
    BackwardSizes sizes, Index count) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 8, kPacks = 2;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, float& quotient_row, float& saved_bound_row, int& labels_row,
      float& negated_row, Index& position_along_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    const int labels_value = widen(labels[outer]);
    const float d_out_value = widen(d_out[0]);
    const float saved_sum___value = widen(saved_sum__[0]);
    const float saved_sum_value = widen(saved_sum[outer]);
    const float saved_bound_value = widen(saved_bound[outer]);
    float quotient_value;
    float negated_value;
    backward_pointwise_values_once(labels_value, count_of_inner_value, d_out_value, saved_sum___value,
        saved_sum_value, quotient_value, negated_value);
    quotient_row = quotient_value;
    saved_bound_row = saved_bound_value;
    labels_row = labels_value;
    negated_row = negated_value;
    position_along_row = inner;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    float quotient_here;
    float saved_bound_here;
    int labels_here;
    float negated_here;
    Index position_along_here;
    const Index left = enter_row(i, quotient_here, saved_bound_here, labels_here, negated_here,
        position_along_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      float quotient_next = quotient_here;
      float saved_bound_next = saved_bound_here;
      int labels_next = labels_here;
      float negated_next = negated_here;
      Index position_along_next = position_along_here;
      if (is_crossing) enter_row(i + left, quotient_next, saved_bound_next, labels_next, negated_next,
          position_along_next);
      Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_next = kMayCross && lane >= left;
        const float x_value = widen(x_in[p], lane);
        const float quotient_value = is_next ? quotient_next : quotient_here;
        const float saved_bound_value = is_next ? saved_bound_next : saved_bound_here;
        const int labels_value = is_next ? labels_next : labels_here;
        const float negated_value = is_next ? negated_next : negated_here;
        const int position_along_value = widen(position_along[is_next ? position_along_next + lane - left : position_along_here + lane]);
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, saved_bound_value, position_along_value,
            labels_value, negated_value, d_x_value);
        d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
      }
      store(d_x + i, d_x_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, quotient_here, saved_bound_here, labels_here, negated_here, position_along_here);
        const float quotient_value = quotient_here;
        const float saved_bound_value = saved_bound_here;
        const int labels_value = labels_here;
        const float negated_value = negated_here;
        const int position_along_value = widen(position_along[position_along_here]);
        const float x_value = widen(x[j]);
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, saved_bound_value, position_along_value,
            labels_value, negated_value, d_x_value);
        d_x[j] = narrow<bfloat16>(d_x_value);
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

// a: x, labels, out, saved_bound, saved_sum, saved_sum__, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const labels = reinterpret_cast<const int64_t*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  auto* const saved_sum__ = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  const dim3 forward_row_block(256);
  const int64_t forward_row_tasks = static_cast<int64_t>(sizes.outer.value);
  const int64_t forward_row_slots = forward_row_tasks;
  const int64_t total_partials_slots = forward_row_slots;
  const int64_t total_2_partials_slots = forward_row_slots;
  auto* const total_partials = scratch.take<Sum<float>>(1 * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(1 * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x, labels,
        saved_bound, saved_sum, total_partials, total_2_partials, sizes);
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = 1, slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(forward_finalise, blocks, block, 0, stream, out, saved_sum__, total_partials, total_2_partials,
        sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, labels, saved_bound, saved_sum, saved_sum__, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const labels = reinterpret_cast<const int64_t*>(a[1]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[3]);
  auto* const saved_sum__ = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[5]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 8 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? backward_pointwise<true> : backward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, labels, d_out, saved_sum__, saved_sum, x, saved_bound, d_x, sizes,
        static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
