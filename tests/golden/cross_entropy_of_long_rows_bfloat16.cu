// fusegen 0.1.0   chain ed67c91b5cb2   signature forward: labels int64, out bfloat16, x bfloat16; 32-bit offsets
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

__device__ __forceinline__ void forward_row_row_values(const int labels, const float count_of_inner,
    const float total_4, const float total_3, const float peak, float& total_term, float& total_2_term) {
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

// Reads x, position_along by (inner), labels by (outer); leaves partials of total, total_2.
__global__ void __launch_bounds__(256, 8)
forward_row(const bfloat16* x, const int64_t* labels, Sum<float>* __restrict__ total_partials,
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
  float total_term_value;
  float total_2_term_value;
  forward_row_row_values(labels_value, count_of_inner_value, total_4_value, total_3_value, peak_value,
      total_term_value, total_2_term_value);
  total_partials[row] = Sum<float>{total_term_value};
  total_2_partials[row] = Sum<float>{total_2_term_value};
}

__device__ __forceinline__ void forward_finalise_values(const float total, const float total_2, float& out) {
  // cross_entropy(labels)
  out = narrow_div(total, total_2);
}

// Merges partials into total, total_2; writes out.
__global__ void __launch_bounds__(512)
forward_finalise(bfloat16* __restrict__ out, const Sum<float>* total_partials,
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
  forward_finalise_values(total_value, total_2_value, out_value);
  out[0] = narrow<bfloat16>(out_value);
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

// a: x, labels, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const labels = reinterpret_cast<const int64_t*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  const int device = static_cast<int>(a[6]);
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
        total_partials, total_2_partials, sizes);
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = 1, slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(forward_finalise, blocks, block, 0, stream, out, total_partials, total_2_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
