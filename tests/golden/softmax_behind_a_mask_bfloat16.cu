// fusegen 0.1.0   chain 9f203f281f88   signature forward: mask bfloat16, out bfloat16, x bfloat16; 32-bit offsets
//   mul(0.125) | add(mask) | softmax(-1)
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

// Neighbours that lie anywhere, one by one.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_singly(const T* from) {
  Pack<T, N> pack;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) pack.at[lane] = from[lane];
  return pack;
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
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, const float mask, float& peak_term) {
  // mul(0.125)
  const float after_mul = x * 0.125f;
  // add(mask)
  peak_term = after_mul + mask;
}

__device__ __forceinline__ void forward_row_stage_2(const float x, const float mask, const float peak,
    float& total_term, float& total_term_by, float& carried) {
  // mul(0.125)
  const float after_mul = x * 0.125f;
  // add(mask)
  const float after_add = after_mul + mask;
  total_term = exp2_flushed((after_add - peak) * 0.721347511f);
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
  // softmax(-1)
  out = carried * inverse * chosen;
}

// Reads x, mask by (middle, inner); writes out.
__global__ void __launch_bounds__(256, 4)
forward_row(const bfloat16* x, const bfloat16* mask, bfloat16* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 2;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  // Packs begin at multiples of their size in memory: `head` elements behind the start of each of this block's rows, which
  // are multiples of kLanes apart. What stands before the first pack and behind the last is taken one by one.
  const Index head = (kLanes - blockIdx.x % kLanes * length % kLanes) % kLanes,
      whole = (length - head) / kLanes * kLanes;
  const Index edge = threadIdx.x < head ? threadIdx.x : whole + threadIdx.x;
  const bool is_edge = threadIdx.x < length - whole;
  const Index first = blockIdx.x / kLanes * kLanes * blockDim.y + blockIdx.x % kLanes;
  if (first < rows) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0, base = row * length + head,
        end = is_live ? whole : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    Pack<bfloat16, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    bfloat16 x_edge = {};
    if (is_edge && is_live) x_edge = x[row * length + edge];
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      const auto mask_in = load_singly<kLanes>(mask + (middle) * length + (is_here ? i + head : 0));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float mask_value = widen(mask_in, lane);
        float peak_term_value;
        forward_row_stage_1(x_value, mask_value, peak_term_value);
        peaks_1[0].add_if(is_here, peak_term_value);
      }
    }
    if (is_edge) {
      const bool is_here = is_live;
      const Index inner = (is_here ? edge : 0);
      const float x_value = widen(x_edge);
      const float mask_value = widen(mask[(middle) * sizes.inner.value + inner]);
      float peak_term_value;
      forward_row_stage_1(x_value, mask_value, peak_term_value);
      peaks_1[0].add_if(is_here, peak_term_value);
    }
    combine<8, false>(peaks_1, cells[turn++ & 1]);
    const float peak_value = peaks_1[0].best;
    Sum<float> sums_2[1];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      const auto mask_in = load_singly<kLanes>(mask + (middle) * length + (is_here ? i + head : 0));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float mask_value = widen(mask_in, lane);
        float total_term_value;
        float total_term_by_value;
        float carried_value;
        forward_row_stage_2(x_value, mask_value, peak_value, total_term_value, total_term_by_value,
            carried_value);
        sums_2[0].add_if(is_here, total_term_value, total_term_by_value);
        carried[p][lane] = carried_value;
      }
    }
    float carried_edge = {};
    if (is_edge) {
      const bool is_here = is_live;
      const Index inner = (is_here ? edge : 0);
      const float x_value = widen(x_edge);
      const float mask_value = widen(mask[(middle) * sizes.inner.value + inner]);
      float total_term_value;
      float total_term_by_value;
      float carried_value;
      forward_row_stage_2(x_value, mask_value, peak_value, total_term_value, total_term_by_value,
          carried_value);
      sums_2[0].add_if(is_here, total_term_value, total_term_by_value);
      carried_edge = carried_value;
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
    if (is_edge && is_live) {
      const float carried_value = carried_edge;
      float out_value;
      forward_row_values(carried_value, inverse_value, chosen_value, out_value);
      out[row * length + edge] = narrow<bfloat16>(out_value);
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

// a: x, mask, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const mask = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const out = reinterpret_cast<bfloat16*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length / 8 * 8, 16), 64, 16);
  // Rows that begin alike within a pack go to the same blocks.
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, 8 * forward_row_block.y) * 8;
  const int64_t forward_row_slots = forward_row_tasks;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x, mask, out,
        sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
