// fusegen 0.1.0   chain cc5396b5495f   signature forward+backward: d_out float32, d_x float32, out float32, saved_bound float32, saved_sum float32, saved_sum__ float32, target_operand int64, x float32; 32-bit offsets
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

// The largest number; a NaN beats every number, as in torch.
template <typename T>
struct Peak {
  T best = static_cast<T>(-INFINITY);
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

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_column_stage_2(const float x, const float peak,
    const int position_along, const int target_operand, float& total_2_term, float& total_term) {
  total_2_term = exp2_flushed((x - peak) * 1.44269502f);
  total_term = position_along == target_operand ? x : 0.0f;
}

__device__ __forceinline__ void forward_column_row_values(const float peak, const float total_2,
    const int target_operand, const float count_of_middle, const float total, float& saved_bound,
    float& saved_sum, float& common_scratch, float& common_2_scratch) {
  saved_bound = peak;
  saved_sum = total_2;
  const bool is_equal = target_operand == -100.0f;
  const float chosen = target_operand >= 0.0f && target_operand < count_of_middle ? logf(total_2) - (total - peak) : NAN;
  common_scratch = is_equal ? 0.0f : chosen;
  common_2_scratch = is_equal ? 0.0f : 1.0f;
}

// Reads x, position_along by (middle), target_operand by (outer, inner); writes saved_bound, saved_sum, common_scratch, common_2_scratch.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const int64_t* __restrict__ target_operand,
    float* __restrict__ saved_bound, float* __restrict__ saved_sum, float* __restrict__ common_scratch,
    float* __restrict__ common_2_scratch, ForwardSizes sizes, Size across, Index tiles) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 1, kPacks = 19;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    const Index outer = above;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    int target_operand_here[kLanes];
    {
      const Index inner = beside;
      const auto target_operand_in = load<kLanes>(target_operand + ((outer) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        target_operand_here[lane] = widen(target_operand_in, lane);
      }
    }
    Peak<float> peaks_1[1][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        forward_column_stage_1(x_value, peak_term_value);
        peaks_1[0][lane].add_if(is_here, peak_term_value);
      }
    }
    Sum<float> sums_2[2][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float peak_value = peaks_1[0][lane].best;
        const float x_value = again(widen(x_in[p], lane));
        const int target_operand_value = target_operand_here[lane];
        const int position_along_value = widen(position_along[middle]);
        float total_2_term_value;
        float total_term_value;
        forward_column_stage_2(x_value, peak_value, position_along_value, target_operand_value,
            total_2_term_value, total_term_value);
        sums_2[0][lane].add_if(is_here, total_2_term_value);
        sums_2[1][lane].add_if(is_here, total_term_value);
      }
    }
    {
      Pack<float, kLanes> saved_bound_out;
      Pack<float, kLanes> saved_sum_out;
      Pack<float, kLanes> common_scratch_out;
      Pack<float, kLanes> common_2_scratch_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float total_2_value = sums_2[0][lane].total;
        const float total_value = sums_2[1][lane].total;
        const int target_operand_value = target_operand_here[lane];
        float saved_bound_value;
        float saved_sum_value;
        float common_scratch_value;
        float common_2_scratch_value;
        forward_column_row_values(peak_value, total_2_value, target_operand_value, count_of_middle_value,
            total_value, saved_bound_value, saved_sum_value, common_scratch_value, common_2_scratch_value);
        saved_bound_out.at[lane] = narrow<float>(saved_bound_value);
        saved_sum_out.at[lane] = narrow<float>(saved_sum_value);
        common_scratch_out.at[lane] = narrow<float>(common_scratch_value);
        common_2_scratch_out.at[lane] = narrow<float>(common_2_scratch_value);
      }
      const Index inner = beside;
      store(saved_bound + ((outer) * sizes.inner.value + inner), saved_bound_out);
      store(saved_sum + ((outer) * sizes.inner.value + inner), saved_sum_out);
      store(common_scratch + ((outer) * sizes.inner.value + inner), common_scratch_out);
      store(common_2_scratch + ((outer) * sizes.inner.value + inner), common_2_scratch_out);
    }
  }
}

__device__ __forceinline__ void forward_inner_values(const float common, const float common_2,
    float& total_3_term, float& total_4_term) {
  total_3_term = common;
  total_4_term = common_2;
}

// Reads common, common_2; leaves partials of total_3, total_4.
__global__ void __launch_bounds__(128)
forward_inner(const float* common, const float* common_2, Sum<float>* __restrict__ total_3_partials,
    Sum<float>* __restrict__ total_4_partials, ForwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index outer = row;
  Sum<float> total_3_sum;
  Sum<float> total_4_sum;
  const auto take = [&](Index inner, float common_value, float common_2_value) {
    float total_3_term_value;
    float total_4_term_value;
    forward_inner_values(common_value, common_2_value, total_3_term_value, total_4_term_value);
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
      take(inner, widen(common[i]), widen(common_2[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_3_mine = total_3_sum;
      total_3_sum = Sum<float>();
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_4_mine = total_4_sum;
      total_4_sum = Sum<float>();
      Pack<float, kLanes> common_in[kPacks];
      Pack<float, kLanes> common_2_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        common_in[p] = load<kLanes>(common + i);
        common_2_in[p] = load<kLanes>(common_2 + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(common_in[p], lane), widen(common_2_in[p], lane));
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
    total_3_partials[(0) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_3_sum;
    total_4_partials[(0) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_4_sum;
  }
}

// The same for short rows: a block takes several.
__global__ void __launch_bounds__(128)
forward_inner_joined(const float* common, const float* common_2, Sum<float>* __restrict__ total_3_partials,
    Sum<float>* __restrict__ total_4_partials, ForwardSizes sizes, Index rows, Index pieces,
    Index piece_length, Index each) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = blockIdx.x, above = task / pieces, piece = task % pieces;
  const Index alike = sizes.outer.value, shares = (alike + each - 1) / each, kept = above / shares,
      share = above % shares;
  Sum<float> total_3_sum;
  Sum<float> total_4_sum;
  const Index past = min((share + 1) * each, alike);
  for (Index passing = share * each + threadIdx.y; passing < past; passing += blockDim.y) {
    const Index outer = passing;
    const Index row = outer;
    const auto take = [&](Index inner, float common_value, float common_2_value) {
      float total_3_term_value;
      float total_4_term_value;
      forward_inner_values(common_value, common_2_value, total_3_term_value, total_4_term_value);
      total_3_sum.add(total_3_term_value);
      total_4_sum.add(total_4_term_value);
    };
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(common[i]), widen(common_2[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_3_mine = total_3_sum;
      total_3_sum = Sum<float>();
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_4_mine = total_4_sum;
      total_4_sum = Sum<float>();
      Pack<float, kLanes> common_in[kPacks];
      Pack<float, kLanes> common_2_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        common_in[p] = load<kLanes>(common + i);
        common_2_in[p] = load<kLanes>(common_2 + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(common_in[p], lane), widen(common_2_in[p], lane));
        }
      }
      total_3_sum.merge(total_3_mine);
      total_4_sum.merge(total_4_mine);
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  merge_tree(total_3_sum, thread, blockDim.x * blockDim.y, shared);
  __syncthreads();
  merge_tree(total_4_sum, thread, blockDim.x * blockDim.y, shared);
  if (thread == 0) {
    total_3_partials[(kept * shares + share) * pieces + piece] = total_3_sum;
    total_4_partials[(kept * shares + share) * pieces + piece] = total_4_sum;
  }
}

__device__ __forceinline__ void forward_finalise_values(const float total_3, const float total_4, float& out,
    float& saved_sum__) {
  // cross_entropy(target)
  out = total_3 / total_4;
  saved_sum__ = total_4;
}

// Merges partials into total_3, total_4; writes out, saved_sum__.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ out, float* __restrict__ saved_sum__,
    const Sum<float>* total_3_partials, const Sum<float>* total_4_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < 1;
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
  float out_value;
  float saved_sum___value;
  forward_finalise_values(total_3_value, total_4_value, out_value, saved_sum___value);
  out[0] = narrow<float>(out_value);
  saved_sum__[0] = narrow<float>(saved_sum___value);
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_column_values_once(const int target_operand,
    const float count_of_middle, const float d_out, const float saved_sum__, const float saved_sum,
    float& quotient, float& negated) {
  const float chosen = target_operand >= 0.0f && target_operand < count_of_middle ? (target_operand == -100.0f ? 0.0f : d_out / saved_sum__) : 0.0f;
  quotient = chosen / saved_sum;
  negated = -chosen;
}

__device__ __forceinline__ void backward_column_values(const float quotient, const float x,
    const float saved_bound, const int position_along, const int target_operand, const float negated,
    float& d_x) {
  d_x = fmaf(quotient, expf(x - saved_bound), position_along == target_operand ? negated : 0.0f);
}

// Reads x, position_along by (middle), target_operand by (outer, inner), d_out by (), saved_sum__ by (), saved_sum by (outer, inner), saved_bound by (outer, inner); writes d_x.
__global__ void __launch_bounds__(128, 4)
backward_column(const int64_t* __restrict__ target_operand, const float* __restrict__ d_out,
    const float* __restrict__ saved_sum__, const float* __restrict__ saved_sum, const float* __restrict__ x,
    const float* __restrict__ saved_bound, float* __restrict__ d_x, BackwardSizes sizes, Size across,
    Index tiles) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 1, kPacks = 19;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  for (Index tile = blockIdx.x * blockDim.y + threadIdx.y; tile < tiles; tile += gridDim.x * blockDim.y) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    const Index outer = above;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    int target_operand_here[kLanes];
    float d_out_here[kLanes];
    float saved_sum___here[kLanes];
    float saved_sum_here[kLanes];
    float saved_bound_here[kLanes];
    {
      const Index inner = beside;
      const auto target_operand_in = load<kLanes>(target_operand + ((outer) * sizes.inner.value + inner));
      const auto saved_sum_in = load<kLanes>(saved_sum + ((outer) * sizes.inner.value + inner));
      const auto saved_bound_in = load<kLanes>(saved_bound + ((outer) * sizes.inner.value + inner));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        target_operand_here[lane] = widen(target_operand_in, lane);
        saved_sum_here[lane] = widen(saved_sum_in, lane);
        saved_bound_here[lane] = widen(saved_bound_in, lane);
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      d_out_here[lane] = widen(d_out[0]);
      saved_sum___here[lane] = widen(saved_sum__[0]);
    }
    float quotient_beside[kLanes];
    float negated_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const int target_operand_value = target_operand_here[lane];
      const float d_out_value = d_out_here[lane];
      const float saved_sum___value = saved_sum___here[lane];
      const float saved_sum_value = saved_sum_here[lane];
      float quotient_value;
      float negated_value;
      backward_column_values_once(target_operand_value, count_of_middle_value, d_out_value,
          saved_sum___value, saved_sum_value, quotient_value, negated_value);
      quotient_beside[lane] = quotient_value;
      negated_beside[lane] = negated_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (!is_here) continue;
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = (is_here ? i : 0);
        const float x_value = widen(x_in[p], lane);
        const int target_operand_value = target_operand_here[lane];
        const float saved_bound_value = saved_bound_here[lane];
        const int position_along_value = widen(position_along[middle]);
        float d_x_value;
        const float quotient_value = quotient_beside[lane];
        const float negated_value = negated_beside[lane];
        backward_column_values(quotient_value, x_value, saved_bound_value, position_along_value,
            target_operand_value, negated_value, d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      if (is_here) store(d_x + (base + i * behind), d_x_out);
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

// How many rows of so many elements a block takes together: as many as have 8,192, but there are to be 2,048 blocks.
static int64_t rows_of_block(int64_t rows, int64_t length, int64_t alike) {
  const int64_t most = length > 0 ? 8192 / length : 1, spare = rows / 2048;
  const int64_t wanted = most < spare ? most : spare;
  return wanted < 1 ? 1 : wanted < alike ? wanted : alike;
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

// a: x, target_operand, out, saved_bound, saved_sum, saved_sum__, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const target_operand = reinterpret_cast<const int64_t*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const saved_bound = reinterpret_cast<float*>(a[3]);
  auto* const saved_sum = reinterpret_cast<float*>(a[4]);
  auto* const saved_sum__ = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const ForwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 1,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * forward_column_across;
  const auto forward_column_beside = static_cast<unsigned>(power_of_two(forward_column_packs, 1, 32));
  const dim3 forward_column_block(forward_column_beside, 128 / forward_column_beside);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = ceil_divide(forward_column_tiles, forward_column_block.y);
  const int64_t forward_column_slots = forward_column_tasks;
  const int64_t forward_inner_rows = static_cast<int64_t>(sizes.outer.value),
      forward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t forward_inner_pieces = ceil_divide(forward_inner_length, 8192);
  const int64_t forward_inner_each = rows_of_block(forward_inner_rows, forward_inner_length,
      static_cast<int64_t>(sizes.outer.value));
  const int64_t forward_inner_shares = ceil_divide(static_cast<int64_t>(sizes.outer.value),
      forward_inner_each);
  const int64_t total_3_partials_slots = forward_inner_shares * forward_inner_pieces;
  const int64_t total_4_partials_slots = forward_inner_shares * forward_inner_pieces;
  auto* const common_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const common_2_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum<float>>(1 * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum<float>>(1 * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x,
        target_operand, saved_bound, saved_sum, common_scratch, common_2_scratch, sizes,
        size_of(forward_column_across), static_cast<Index>(forward_column_tiles));
  }
  {
    const int64_t piece_length = ceil_divide(forward_inner_length, forward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    if (forward_inner_each > 1) {
      const auto blocks = static_cast<unsigned>(1 * forward_inner_shares * forward_inner_pieces);
      follow(forward_inner_joined, blocks, block, 0, stream, common_scratch, common_2_scratch,
          total_3_partials, total_4_partials, sizes, static_cast<Index>(forward_inner_rows),
          static_cast<Index>(forward_inner_pieces), static_cast<Index>(piece_length),
          static_cast<Index>(forward_inner_each));
    } else {
      const auto blocks = static_cast<unsigned>(ceil_divide(forward_inner_rows * forward_inner_pieces,
          block.y));
      follow(forward_inner, blocks, block, 0, stream, common_scratch, common_2_scratch, total_3_partials,
          total_4_partials, sizes, static_cast<Index>(forward_inner_rows),
          static_cast<Index>(forward_inner_pieces), static_cast<Index>(piece_length));
    }
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = 1, slots = total_3_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(forward_finalise, blocks, block, 0, stream, out, saved_sum__, total_3_partials, total_4_partials,
        sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, target_operand, saved_bound, saved_sum, saved_sum__, d_out, d_x, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const target_operand = reinterpret_cast<const int64_t*>(a[1]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[3]);
  auto* const saved_sum__ = reinterpret_cast<const float*>(a[4]);
  auto* const d_out = reinterpret_cast<const float*>(a[5]);
  auto* const d_x = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[6]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t backward_column_across = static_cast<int64_t>(sizes.inner.value) / 1,
      backward_column_packs = static_cast<int64_t>(sizes.outer.value) * backward_column_across;
  const auto backward_column_beside = static_cast<unsigned>(power_of_two(backward_column_packs, 1, 32));
  const dim3 backward_column_block(backward_column_beside, 128 / backward_column_beside);
  const int64_t backward_column_tiles = ceil_divide(backward_column_packs, backward_column_block.x),
      backward_column_tasks = ceil_divide(backward_column_tiles, backward_column_block.y);
  const int64_t backward_column_slots = backward_column_tasks;
  if (is_measuring) return scratch.used;
  {
    backward_column<<<static_cast<unsigned>(backward_column_slots), backward_column_block, 0,
        stream>>>(target_operand, d_out, saved_sum__, saved_sum, x, saved_bound, d_x, sizes,
        size_of(backward_column_across), static_cast<Index>(backward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
