// fusegen 0.1.0   chain 6ac408ccee32   signature forward: out float32, x float32; 32-bit offsets
//   hardswish | softmax(1) | mean((2, 3))
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term,
    float& carried_after_hardswish) {
  // hardswish
  peak_term = x * (x < 3.0f ? (x > -3.0f ? (x + 3.0f) * 0.166666672f : 0.0f) : 1.0f);
  carried_after_hardswish = peak_term;
}

__device__ __forceinline__ void forward_column_stage_2(const float carried_after_hardswish, const float peak,
    float& total_2_term, float& carried) {
  total_2_term = exp2_flushed((carried_after_hardswish - peak) * 1.44269502f);
  carried = total_2_term;
}

__device__ __forceinline__ void forward_column_values_once(const float total_2, float& chosen,
    float& inverse) {
  const float abs_value = fabsf(total_2);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total_2 * chosen);
}

__device__ __forceinline__ void forward_column_values(const float carried, const float inverse,
    const float chosen, float& total_term, float& total_term_by) {
  total_term = carried * inverse;
  total_term_by = chosen;
}

// Reads x; leaves partials of total.
__global__ void __launch_bounds__(128, 4)
forward_column(const float* __restrict__ x, Sum<float>* __restrict__ total_partials, ForwardSizes sizes) {
  constexpr int kLanes = 1, kPacks = 16;
  const Index length = kPacks, behind = sizes.inner.value;
  const Index strips = (behind + blockDim.x * kLanes - 1) / (blockDim.x * kLanes), rows = sizes.outer.value;
  Sum<float> total_sum[kPacks];
  // A thread has so many strips that have all before the axis in common, and leaves their sums.
  constexpr Index kStrips = 16;
  const Index slots = (strips + kStrips - 1) / kStrips, task = blockIdx.x * blockDim.y + threadIdx.y;
  const Index above = task / slots, slot = task - above * slots;
  const Index last = above < rows ? min((slot + 1) * kStrips, strips) : 0;
  for (Index strip = slot * kStrips; strip < last; ++strip) {
    const Index beside = (strip * blockDim.x + threadIdx.x) * kLanes;
    const bool is_beside = beside < behind;
    if (!is_beside) continue;
    const Index base = above * length * behind + beside;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i * behind));
    }
    Peak<float> peaks_1[1][kLanes];
    float carried_after_hardswish[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        float carried_after_hardswish_value;
        forward_column_stage_1(x_value, peak_term_value, carried_after_hardswish_value);
        peaks_1[0][lane].add_if(is_here, peak_term_value);
        carried_after_hardswish[p][lane] = carried_after_hardswish_value;
      }
    }
    Sum<float> sums_2[1][kLanes];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float carried_after_hardswish_value = carried_after_hardswish[p][lane];
        float total_2_term_value;
        float carried_value;
        forward_column_stage_2(carried_after_hardswish_value, peak_value, total_2_term_value, carried_value);
        if (is_here) sums_2[0][lane].add(total_2_term_value);
        carried[p][lane] = carried_value;
      }
    }
    float chosen_beside[kLanes];
    float inverse_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_2_value = sums_2[0][lane].total;
      float chosen_value;
      float inverse_value;
      forward_column_values_once(total_2_value, chosen_value, inverse_value);
      chosen_beside[lane] = chosen_value;
      inverse_beside[lane] = inverse_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p;
      constexpr bool is_here = true;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float carried_value = carried[p][lane];
        float total_term_value;
        float total_term_by_value;
        const float chosen_value = chosen_beside[lane];
        const float inverse_value = inverse_beside[lane];
        forward_column_values(carried_value, inverse_value, chosen_value, total_term_value,
            total_term_by_value);
        if (is_here) total_sum[p].add(total_term_value, total_term_by_value);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = p;
    {
      Sum<float> total = total_sum[p];
      for (int offset = blockDim.x / 2; offset > 0; offset /= 2) total.merge(exchange(total, offset));
      if (threadIdx.x == 0 && above < rows) total_partials[(slot * rows + above) * length + i] = total;
    }
  }
}

__device__ __forceinline__ void forward_finalise_values(const float total, const float count_of_inner,
    float& out) {
  // mean((2, 3))
  out = total * (1.0f / count_of_inner);
}

// Merges partials into total; writes out.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ out, const Sum<float>* total_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = sizes.outer.value * sizes.middle.value,
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
  const Index above_middle = divide(result, sizes.middle);
  const Index middle = result - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  float out_value;
  forward_finalise_values(total_value, count_of_inner_value, out_value);
  out[(outer) * sizes.middle.value + middle] = narrow<float>(out_value);
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

// a: x, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]), size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  const int device = static_cast<int>(a[6]);
  const DeviceGuard guard(device);
  const int64_t forward_column_behind = static_cast<int64_t>(sizes.inner.value);
  const auto forward_column_beside = static_cast<unsigned>(power_of_two(ceil_divide(forward_column_behind,
      1), 1, 32));
  const dim3 forward_column_block(forward_column_beside, 128 / forward_column_beside);
  const int64_t forward_column_each = ceil_divide(forward_column_behind, forward_column_beside * 16);
  const int64_t forward_column_slots = ceil_divide(static_cast<int64_t>(sizes.outer.value) * forward_column_each, forward_column_block.y);
  const int64_t total_partials_slots = forward_column_each;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 0, stream>>>(x,
        total_partials, sizes);
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), results = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value);
    // Threads for all slots of a column, but no more than keep the device at work, and columns beside each other.
    const int64_t slots = total_partials_slots, most_along = power_of_two(ceil_divide(1 << 17, results), 1,
        64);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 512 / power_of_two(slots, 1,
        most_along)));
    const dim3 block(width, static_cast<unsigned>(power_of_two(slots, width < 32 ? 32 / width : 1,
        512 / width)));
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    follow(forward_finalise, blocks, block, 0, stream, out, total_partials, sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
