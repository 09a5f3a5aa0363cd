// fusegen 0.1.0   chain 4bc0549bb524   signature forward+backward: d_out bfloat16, d_weight bfloat16, d_x bfloat16, out bfloat16, saved_bound float32, saved_sum float32, weight bfloat16, x bfloat16; 32-bit offsets
//   softmax(-1) | mul(weight)
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

// Elements that lie together, on their way to shared memory by all threads of a block, in packs of 16 bytes; those behind
// the last pack are there at once.
template <typename T, typename Tensor>
__device__ __forceinline__ void send_all(T* to, Tensor from, Index count) {
  constexpr Index kEach = 16 / sizeof(T);
  const Index packs = count / kEach, thread = threadIdx.y * blockDim.x + threadIdx.x,
      threads = blockDim.x * blockDim.y;
  for (Index n = thread; n < packs; n += threads) send(reinterpret_cast<Pack<T, kEach>*>(to) + n,
      from + n * kEach);
  for (Index n = packs * kEach + thread; n < count; n += threads) to[n] = from[n];
}

// The same from shared memory.
template <typename T>
__device__ __forceinline__ void store_all(T* to, const T* from, Index count) {
  constexpr Index kEach = 16 / sizeof(T);
  const Index packs = count / kEach, thread = threadIdx.y * blockDim.x + threadIdx.x,
      threads = blockDim.x * blockDim.y;
  for (Index n = thread; n < packs; n += threads) store(to + n * kEach, load<kEach>(from + n * kEach));
  for (Index n = packs * kEach + thread; n < count; n += threads) to[n] = from[n];
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

__device__ __forceinline__ void forward_row_stage_2(const float x, const float peak, float& total_term,
    float& total_term_by, float& carried) {
  total_term = exp2_flushed((x - peak) * 0.721347511f);
  total_term_by = total_term;
  carried = total_term * total_term;
}

__device__ __forceinline__ void forward_row_values_once(const float total, float& chosen, float& inverse) {
  const float abs_value = fabsf(total);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total * chosen);
}

__device__ __forceinline__ void forward_row_values(const float carried, const float inverse,
    const float chosen, const float weight, float& out) {
  // softmax(-1)
  const float after_softmax = carried * inverse * chosen;
  // mul(weight)
  out = after_softmax * weight;
}

__device__ __forceinline__ void forward_row_row_values(const float peak, const float total,
    float& saved_bound, float& saved_sum) {
  saved_bound = peak;
  saved_sum = total;
}

// Reads x, weight by (inner); writes out, saved_bound, saved_sum.
__global__ void __launch_bounds__(256, 2)
forward_row(const bfloat16* x, const bfloat16* weight, bfloat16* __restrict__ out,
    float* __restrict__ saved_bound, float* __restrict__ saved_sum, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 1, kPacks = 20;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  Pack<bfloat16, kLanes> weight_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.x * kPacks + p;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  // Rows beside each other lie together: a block moves them as a whole, by way of shared memory.
  auto* const x_staged = reinterpret_cast<bfloat16*>(room + 0);
  auto* const out_staged = reinterpret_cast<bfloat16*>(room + 640);
  const auto send_rows = [&](Index first) {
    const Index taken = first < rows ? min(static_cast<Index>(blockDim.y), rows - first) * length : 0;
    send_all(x_staged, x + first * length, taken);
    send_off();
  };
  send_rows(first);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, end = is_live ? length : 0;
    const Index outer = row;
    Pack<bfloat16, kLanes> x_in[kPacks];
    const Index taken = min(static_cast<Index>(blockDim.y), rows - first) * length;
    wait_for_sent<0>();
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x_staged + (threadIdx.y * length + i));
    }
    __syncthreads();
    send_rows(first + stride);
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
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
    Sum<float> sums_2[1];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_term_value;
        float total_term_by_value;
        float carried_value;
        forward_row_stage_2(x_value, peak_value, total_term_value, total_term_by_value, carried_value);
        if (is_here) sums_2[0].add(total_term_value, total_term_by_value);
        carried[p][lane] = carried_value;
      }
    }
    combine<8, false>(sums_2, cells[turn++ & 1]);
    const float total_value = sums_2[0].total;
    if (is_live && threadIdx.x == 0) {
      float saved_bound_value;
      float saved_sum_value;
      forward_row_row_values(peak_value, total_value, saved_bound_value, saved_sum_value);
      saved_bound[outer] = narrow<float>(saved_bound_value);
      saved_sum[outer] = narrow<float>(saved_sum_value);
    }
    float chosen_value;
    float inverse_value;
    forward_row_values_once(total_value, chosen_value, inverse_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
      Pack<bfloat16, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float weight_value = widen(weight_in[p], lane);
        const float carried_value = carried[p][lane];
        float out_value;
        forward_row_values(carried_value, inverse_value, chosen_value, weight_value, out_value);
        out_out.at[lane] = narrow<bfloat16>(out_value);
      }
      if (is_here) store(out_staged + (threadIdx.y * length + i), out_out);
    }
    __syncthreads();
    store_all(out + first * length, out_staged, taken);
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_row_stage_1_once(const float saved_sum, float& chosen,
    float& inverse) {
  const float abs_value = fabsf(saved_sum);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (saved_sum * chosen);
}

__device__ __forceinline__ void backward_row_stage_1(const float x, const float saved_bound,
    const float d_out, const float weight, const float inverse, const float chosen, float& total_2_term,
    float& total_2_term_by, float& carried, float& carried_2, float& total_term, float& total_term_by) {
  // softmax(-1)
  const float power = exp2_flushed((x - saved_bound) * 0.721347511f);
  // backward, down to softmax(-1)
  const float d_after_softmax = d_out * weight;
  total_2_term = power * power;
  total_2_term_by = d_after_softmax;
  carried = d_after_softmax * inverse * chosen;
  carried_2 = total_2_term;
  total_term = d_out;
  total_term_by = total_2_term * inverse * chosen;
}

__device__ __forceinline__ void backward_row_values_once(const float total_2, const float saved_sum,
    float& quotient) {
  quotient = narrow_div(narrow_div(total_2, saved_sum), saved_sum);
}

__device__ __forceinline__ void backward_row_values(const float carried, const float quotient,
    const float carried_2, float& d_x) {
  d_x = (carried - quotient) * carried_2;
}

// Reads x, d_out, saved_bound by (outer), weight by (inner), saved_sum by (outer); leaves partials of total; writes d_x.
__global__ void __launch_bounds__(256, 3)
backward_row(const bfloat16* x, const float* saved_bound, const bfloat16* d_out, const bfloat16* weight,
    const float* saved_sum, bfloat16* __restrict__ d_x, Sum<float>* __restrict__ total_partials,
    BackwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 1, kPacks = 10;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  Sum<float> total_sum[kPacks][kLanes];
  Pack<bfloat16, kLanes> weight_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = threadIdx.x * kPacks + p;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  // Rows beside each other lie together: a block moves them as a whole, by way of shared memory.
  auto* const x_staged = reinterpret_cast<bfloat16*>(room + 0);
  auto* const d_out_staged = reinterpret_cast<bfloat16*>(room + 320);
  auto* const d_x_staged = reinterpret_cast<bfloat16*>(room + 640);
  const auto send_rows = [&](Index first) {
    const Index taken = first < rows ? min(static_cast<Index>(blockDim.y), rows - first) * length : 0;
    send_all(x_staged, x + first * length, taken);
    send_all(d_out_staged, d_out + first * length, taken);
    send_off();
  };
  send_rows(first);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, end = is_live ? length : 0;
    const Index outer = row;
    Pack<bfloat16, kLanes> x_in[kPacks];
    Pack<bfloat16, kLanes> d_out_in[kPacks];
    const Index taken = min(static_cast<Index>(blockDim.y), rows - first) * length;
    wait_for_sent<0>();
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x_staged + (threadIdx.y * length + i));
      if (is_here) d_out_in[p] = load<kLanes>(d_out_staged + (threadIdx.y * length + i));
    }
    __syncthreads();
    send_rows(first + stride);
    const float saved_bound_value = widen(saved_bound[outer]);
    const float saved_sum_value = widen(saved_sum[outer]);
    Sum<float> sums_1[1];
    float carried[kPacks][kLanes];
    float carried_2[kPacks][kLanes];
    float chosen_value;
    float inverse_value;
    backward_row_stage_1_once(saved_sum_value, chosen_value, inverse_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float d_out_value = widen(d_out_in[p], lane);
        const float weight_value = widen(weight_in[p], lane);
        float total_2_term_value;
        float total_2_term_by_value;
        float carried_value;
        float carried_2_value;
        float total_term_value;
        float total_term_by_value;
        backward_row_stage_1(x_value, saved_bound_value, d_out_value, weight_value, inverse_value,
            chosen_value, total_2_term_value, total_2_term_by_value, carried_value, carried_2_value,
            total_term_value, total_term_by_value);
        if (is_here) sums_1[0].add(total_2_term_value, total_2_term_by_value);
        carried[p][lane] = carried_value;
        carried_2[p][lane] = carried_2_value;
        if (is_here) total_sum[p][lane].add(total_term_value, total_term_by_value);
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_2_value = sums_1[0].total;
    float quotient_value;
    backward_row_values_once(total_2_value, saved_sum_value, quotient_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.x * kPacks + p;
      const bool is_here = i < end;
      Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float carried_value = carried[p][lane];
        const float carried_2_value = carried_2[p][lane];
        float d_x_value;
        backward_row_values(carried_value, quotient_value, carried_2_value, d_x_value);
        d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
      }
      if (is_here) store(d_x_staged + (threadIdx.y * length + i), d_x_out);
    }
    __syncthreads();
    store_all(d_x + first * length, d_x_staged, taken);
  }
  // One partial for each column and block.
  __shared__ alignas(16) Sum<float> cells_of_sums[2592];
  {
    Sum<float> mine[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) mine[p] = total_sum[p][0];
    leave_columns(mine, cells_of_sums, total_partials + blockIdx.x * length, length);
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_weight) {
  d_weight = total;
}

// Merges partials into total; writes d_weight.
__global__ void __launch_bounds__(512)
backward_finalise(bfloat16* __restrict__ d_weight, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index inner = result;
  float d_weight_value;
  backward_finalise_values(total_value, d_weight_value);
  d_weight[inner] = narrow<bfloat16>(d_weight_value);
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

// a: x, weight, out, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 20), 256);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 20480, 20480, device);
  const int64_t forward_row_slots = forward_row_tasks < forward_row_resident ? forward_row_tasks : forward_row_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 20480, stream, x,
        weight, out, saved_bound, saved_sum, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, saved_bound, saved_sum, d_out, d_x, d_weight, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[3]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[4]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[5]);
  auto* const d_weight = reinterpret_cast<bfloat16*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[4] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value),
      backward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 backward_row_block = row_block(ceil_divide(backward_row_length, 10), 256);
  const int64_t backward_row_tasks = ceil_divide(backward_row_rows, backward_row_block.y);
  const int64_t backward_row_resident = resident_blocks(backward_row, backward_row_block, 15360, 15360,
      device);
  const int64_t backward_row_slots = backward_row_tasks < backward_row_resident ? backward_row_tasks : backward_row_resident;
  const int64_t total_partials_slots = backward_row_slots;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    follow(backward_row, static_cast<unsigned>(backward_row_slots), backward_row_block, 15360, stream, x,
        saved_bound, d_out, weight, saved_sum, d_x, total_partials, sizes);
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
    follow(backward_finalise, blocks, block, 0, stream, d_weight, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
