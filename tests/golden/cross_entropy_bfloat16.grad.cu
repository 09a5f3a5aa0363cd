// fusegen 0.1.0   chain cc5396b5495f   signature forward+backward: d_out bfloat16, d_x bfloat16, out bfloat16, saved_bound float32, saved_sum float32, saved_sum__ float32, target_operand int64, x bfloat16; 32-bit offsets
//   cross_entropy(target)
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

__device__ __forceinline__ void forward_row_stage_2(const float x, const float peak, float& total_2_term,
    float& total_2_term_by) {
  total_2_term = exp2_flushed((x - peak) * 0.721347511f);
  total_2_term_by = total_2_term;
}

__device__ __forceinline__ void forward_row_stage_2_total(const int position_along, const int target_operand,
    const float x, float& total_term) {
  total_term = position_along == target_operand ? x : 0.0f;
}

__device__ __forceinline__ void forward_row_row_values(const float peak, const float total_2,
    const int target_operand, const float count_of_inner, const float total, float& saved_bound,
    float& saved_sum, float& common_scratch, float& common_2_scratch) {
  saved_bound = peak;
  saved_sum = total_2;
  const bool is_equal = target_operand == -100.0f;
  const float chosen = target_operand >= 0.0f && target_operand < count_of_inner ? logf(total_2) - (total - peak) : NAN;
  common_scratch = is_equal ? 0.0f : chosen;
  common_2_scratch = is_equal ? 0.0f : 1.0f;
}

// Reads x, position_along by (inner), target_operand by (outer); writes saved_bound, saved_sum, common_scratch, common_2_scratch.
__global__ void __launch_bounds__(256, 5)
forward_row(const bfloat16* x, const int64_t* target_operand, float* __restrict__ saved_bound,
    float* __restrict__ saved_sum, float* __restrict__ common_scratch, float* __restrict__ common_2_scratch,
    ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 8, kPacks = 4;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index outer = row;
    Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    const int target_operand_value = widen(target_operand[outer]);
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        forward_row_stage_1(x_value, peak_term_value);
        peaks_1[0].add_if(is_here, peak_term_value);
      }
    }
    combine<8, false>(peaks_1, cells[turn++ & 1]);
    const float peak_value = peaks_1[0].best;
    Sum<float> sums_2[2];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_2_term_value;
        float total_2_term_by_value;
        forward_row_stage_2(x_value, peak_value, total_2_term_value, total_2_term_by_value);
        if (is_here) sums_2[0].add(total_2_term_value, total_2_term_by_value);
      }
      if (static_cast<Index>(target_operand_value) - (i) < kLanes) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const Index inner = (is_here ? i + lane : 0);
          const float x_value = widen(x_in[p], lane);
          const int position_along_value = widen(position_along[inner]);
          float total_term_value;
          forward_row_stage_2_total(position_along_value, target_operand_value, x_value, total_term_value);
          sums_2[1].add(total_term_value);
        }
      }
    }
    combine<8, false>(sums_2, cells[turn++ & 1]);
    const float total_2_value = sums_2[0].total;
    const float total_value = sums_2[1].total;
    if (is_live && threadIdx.x == 0) {
      float saved_bound_value;
      float saved_sum_value;
      float common_scratch_value;
      float common_2_scratch_value;
      forward_row_row_values(peak_value, total_2_value, target_operand_value, count_of_inner_value,
          total_value, saved_bound_value, saved_sum_value, common_scratch_value, common_2_scratch_value);
      saved_bound[outer] = narrow<float>(saved_bound_value);
      saved_sum[outer] = narrow<float>(saved_sum_value);
      common_scratch[outer] = narrow<float>(common_scratch_value);
      common_2_scratch[outer] = narrow<float>(common_2_scratch_value);
    }
  }
}

__device__ __forceinline__ void forward_row_2_stage_1(const float common, const float common_2,
    float& total_3_term, float& total_4_term) {
  total_3_term = common;
  total_4_term = common_2;
}

__device__ __forceinline__ void forward_row_2_row_values(const float total_3, const float total_4,
    float& out, float& saved_sum__) {
  // cross_entropy(target)
  out = narrow_div(total_3, total_4);
  saved_sum__ = total_4;
}

// Reads common, common_2; writes out, saved_sum__.
__global__ void __launch_bounds__(256, 2)
forward_row_2(const float* common, const float* common_2, bfloat16* __restrict__ out,
    float* __restrict__ saved_sum__, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 2, kPacks = 8;
  __shared__ float cells[2][16];
  int turn = 0;
  const Index rows = 1, length = sizes.outer.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const common_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  auto* const common_2_next = reinterpret_cast<Pack<float, kLanes>*>(room + 1024) + thread;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  int slot = 0;
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&common_next[slot * 4096 + p * 256], common + (base + i));
      if (is_here) send(&common_2_next[slot * 4096 + p * 256], common_2 + (base + i));
    }
    send_off();
  };
  send_row(first);
  slot = 1;
  send_row(first + stride);
  slot = 0;
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index end = is_live ? length : 0;
    Pack<float, kLanes> common_in[kPacks];
    Pack<float, kLanes> common_2_in[kPacks];
    wait_for_sent<1>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      common_in[p] = common_next[slot * 4096 + p * 256];
      common_2_in[p] = common_2_next[slot * 4096 + p * 256];
    }
    send_row(first + 2 * stride);
    slot ^= 1;
    Sum<float> sums_1[2];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float common_value = widen(common_in[p], lane);
        const float common_2_value = widen(common_2_in[p], lane);
        float total_3_term_value;
        float total_4_term_value;
        forward_row_2_stage_1(common_value, common_2_value, total_3_term_value, total_4_term_value);
        if (is_here) sums_1[0].add(total_3_term_value);
        if (is_here) sums_1[1].add(total_4_term_value);
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_3_value = sums_1[0].total;
    const float total_4_value = sums_1[1].total;
    if (is_live && threadIdx.x == 0) {
      float out_value;
      float saved_sum___value;
      forward_row_2_row_values(total_3_value, total_4_value, out_value, saved_sum___value);
      out[0] = narrow<bfloat16>(out_value);
      saved_sum__[0] = narrow<float>(saved_sum___value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_pointwise_values_once(const int target_operand,
    const float count_of_inner, const float d_out, const float saved_sum__, const float saved_sum,
    float& quotient, float& negated) {
  const bool both_hold = target_operand >= 0.0f && target_operand < count_of_inner && !(target_operand == -100.0f);
  const float chosen = both_hold ? narrow_div(d_out, saved_sum__) : 0.0f;
  quotient = narrow_div(chosen, saved_sum);
  negated = -chosen;
}

__device__ __forceinline__ void backward_pointwise_values(const float quotient, const float x,
    const float saved_bound, const int position_along, const int target_operand, const float negated,
    float& d_x) {
  const float power = exp2_flushed((x - saved_bound) * 0.721347511f);
  d_x = fmaf(quotient, power * power, position_along == target_operand ? negated : 0.0f);
}

// Reads x, position_along by (inner), target_operand by (outer), d_out by (), saved_sum__ by (), saved_sum by (outer), saved_bound by (outer); writes d_x.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 2)
backward_pointwise(const int64_t* target_operand, const bfloat16* d_out, const float* saved_sum__,
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
  const auto enter_row = [&](Index i, float& quotient_row, float& saved_bound_row, int& target_operand_row,
      float& negated_row, Index& position_along_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    const int target_operand_value = widen(target_operand[outer]);
    const float d_out_value = widen(d_out[0]);
    const float saved_sum___value = widen(saved_sum__[0]);
    const float saved_sum_value = widen(saved_sum[outer]);
    const float saved_bound_value = widen(saved_bound[outer]);
    float quotient_value;
    float negated_value;
    backward_pointwise_values_once(target_operand_value, count_of_inner_value, d_out_value,
        saved_sum___value, saved_sum_value, quotient_value, negated_value);
    quotient_row = quotient_value;
    saved_bound_row = saved_bound_value;
    target_operand_row = target_operand_value;
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
    int target_operand_here;
    float negated_here;
    Index position_along_here;
    const Index left = enter_row(i, quotient_here, saved_bound_here, target_operand_here, negated_here,
        position_along_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      float quotient_next = quotient_here;
      float saved_bound_next = saved_bound_here;
      int target_operand_next = target_operand_here;
      float negated_next = negated_here;
      Index position_along_next = position_along_here;
      if (is_crossing) enter_row(i + left, quotient_next, saved_bound_next, target_operand_next,
          negated_next, position_along_next);
      Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_next = kMayCross && lane >= left;
        const float x_value = widen(x_in[p], lane);
        const float quotient_value = is_next ? quotient_next : quotient_here;
        const float saved_bound_value = is_next ? saved_bound_next : saved_bound_here;
        const int target_operand_value = is_next ? target_operand_next : target_operand_here;
        const float negated_value = is_next ? negated_next : negated_here;
        const int position_along_value = widen(position_along[is_next ? position_along_next + lane - left : position_along_here + lane]);
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, saved_bound_value, position_along_value,
            target_operand_value, negated_value, d_x_value);
        d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
      }
      store(d_x + i, d_x_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, quotient_here, saved_bound_here, target_operand_here, negated_here, position_along_here);
        const float quotient_value = quotient_here;
        const float saved_bound_value = saved_bound_here;
        const int target_operand_value = target_operand_here;
        const float negated_value = negated_here;
        const int position_along_value = widen(position_along[position_along_here]);
        const float x_value = widen(x[j]);
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, saved_bound_value, position_along_value,
            target_operand_value, negated_value, d_x_value);
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

// a: x, target_operand, out, saved_bound, saved_sum, saved_sum__, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const target_operand = reinterpret_cast<const int64_t*>(a[1]);
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
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 32), 256);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_slots = forward_row_tasks;
  const int64_t forward_row_2_rows = 1, forward_row_2_length = static_cast<int64_t>(sizes.outer.value);
  const dim3 forward_row_2_block = row_block(ceil_divide(forward_row_2_length, 16), 256);
  const int64_t forward_row_2_tasks = ceil_divide(forward_row_2_rows, forward_row_2_block.y);
  const int64_t forward_row_2_resident = resident_blocks(forward_row_2, forward_row_2_block, 65536, 65536,
      device);
  const int64_t forward_row_2_slots = forward_row_2_tasks < forward_row_2_resident ? forward_row_2_tasks : forward_row_2_resident;
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const common_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x,
        target_operand, saved_bound, saved_sum, common_scratch, common_2_scratch, sizes);
  }
  {
    follow(forward_row_2, static_cast<unsigned>(forward_row_2_slots), forward_row_2_block, 65536, stream,
        common_scratch, common_2_scratch, out, saved_sum__, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, target_operand, saved_bound, saved_sum, saved_sum__, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const target_operand = reinterpret_cast<const int64_t*>(a[1]);
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
    follow(run, blocks, 64, 0, stream, target_operand, d_out, saved_sum__, saved_sum, x, saved_bound, d_x,
        sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
