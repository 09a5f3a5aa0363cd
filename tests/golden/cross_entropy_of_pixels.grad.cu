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

// What the threads of a block, which are whole warps, have of one sum, merged in a fixed tree, and left by the first.
template <typename T>
__device__ __forceinline__ void leave_total(Sum<T> mine, Sum<T>* partial) {
  __shared__ Sum<T> cells[32];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) mine.merge(exchange(mine, bit));
  if (thread % 32 == 0) cells[thread / 32] = mine;
  __syncthreads();
  if (thread == 0) {
    for (int other = 1; other < warps; ++other) mine.merge(cells[other]);
    *partial = mine;
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

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_column_stage_2(const float x, const float peak,
    const int position_along, const int target_operand, float& total_4_term, float& total_3_term) {
  total_4_term = exp2_flushed((x - peak) * 1.44269502f);
  total_3_term = position_along == target_operand ? x : 0.0f;
}

__device__ __forceinline__ void forward_column_row_values(const float peak, const float total_4,
    const int target_operand, const float count_of_middle, const float total_3, float& saved_bound,
    float& saved_sum, float& total_term, float& total_2_term) {
  saved_bound = peak;
  saved_sum = total_4;
  const bool is_equal = target_operand == -100.0f;
  const float chosen = target_operand >= 0.0f && target_operand < count_of_middle ? logf(total_4) - (total_3 - peak) : NAN;
  total_term = is_equal ? 0.0f : chosen;
  total_2_term = is_equal ? 0.0f : 1.0f;
}

// Reads x, position_along by (middle), target_operand by (outer, inner); leaves partials of total, total_2; writes saved_bound, saved_sum.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, const int64_t* __restrict__ target_operand,
    float* __restrict__ saved_bound, float* __restrict__ saved_sum, Sum<float>* __restrict__ total_partials,
    Sum<float>* __restrict__ total_2_partials, ForwardSizes sizes, Size across, Index tiles) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  const Positions<int32_t> position_along{};
  constexpr int kLanes = 1, kPacks = 19;
  const Index length = kPacks, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  Sum<float> total_sum;
  Sum<float> total_2_sum;
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
        float total_4_term_value;
        float total_3_term_value;
        forward_column_stage_2(x_value, peak_value, position_along_value, target_operand_value,
            total_4_term_value, total_3_term_value);
        sums_2[0][lane].add_if(is_here, total_4_term_value);
        sums_2[1][lane].add_if(is_here, total_3_term_value);
      }
    }
    {
      Pack<float, kLanes> saved_bound_out;
      Pack<float, kLanes> saved_sum_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float total_4_value = sums_2[0][lane].total;
        const float total_3_value = sums_2[1][lane].total;
        const int target_operand_value = target_operand_here[lane];
        float saved_bound_value;
        float saved_sum_value;
        float total_term_value;
        float total_2_term_value;
        forward_column_row_values(peak_value, total_4_value, target_operand_value, count_of_middle_value,
            total_3_value, saved_bound_value, saved_sum_value, total_term_value, total_2_term_value);
        saved_bound_out.at[lane] = narrow<float>(saved_bound_value);
        saved_sum_out.at[lane] = narrow<float>(saved_sum_value);
        total_sum.add(total_term_value);
        total_2_sum.add(total_2_term_value);
      }
      const Index inner = beside;
      store(saved_bound + ((outer) * sizes.inner.value + inner), saved_bound_out);
      store(saved_sum + ((outer) * sizes.inner.value + inner), saved_sum_out);
    }
  }
  leave_total(total_sum, total_partials + blockIdx.x);
  leave_total(total_2_sum, total_2_partials + blockIdx.x);
}

__device__ __forceinline__ void forward_finalise_values(const float total, const float total_2, float& out,
    float& saved_sum__) {
  // cross_entropy(target)
  out = total / total_2;
  saved_sum__ = total_2;
}

// Merges partials into total, total_2; writes out, saved_sum__.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ out, float* __restrict__ saved_sum__, const Sum<float>* total_partials,
    const Sum<float>* total_2_partials, ForwardSizes sizes, Index slots) {
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
  const int64_t total_partials_slots = forward_column_slots;
  const int64_t total_2_partials_slots = forward_column_slots;
  auto* const total_partials = scratch.take<Sum<float>>(1 * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(1 * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x,
        target_operand, saved_bound, saved_sum, total_partials, total_2_partials, sizes,
        size_of(forward_column_across), static_cast<Index>(forward_column_tiles));
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
