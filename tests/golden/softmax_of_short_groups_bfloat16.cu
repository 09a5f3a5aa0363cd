// fusegen 0.1.0   chain 671f358fd755   signature forward: bias bfloat16, out bfloat16, weight bfloat16, x bfloat16; 32-bit offsets
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
    float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

// Merges partials into mean; writes mean_scratch, variance_scratch.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
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
  float mean_scratch_value;
  float variance_scratch_value;
  forward_finalise_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
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

// Reads x, mean by (outer, axis_2), variance by (outer, axis_2), weight by (axis_2, inner), bias by (axis_2, inner); writes out.
__global__ void __launch_bounds__(256, 4)
forward_row(const bfloat16* x, const float* mean, const float* variance, const bfloat16* weight,
    const bfloat16* bias, bfloat16* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 2;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.axis_1.value, length = sizes.axis_2.value * sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_axis_1 = divide(row, sizes.axis_1);
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

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const weight = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const bias = reinterpret_cast<const bfloat16*>(a[2]);
  auto* const out = reinterpret_cast<bfloat16*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
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
    follow(forward_finalise, blocks, block, 0, stream, mean_scratch, variance_scratch, mean_partials, sizes,
        static_cast<Index>(slots));
  }
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x,
        mean_scratch, variance_scratch, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
