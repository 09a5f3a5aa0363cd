// fusegen 0.1.0   chain 1fe48fbfef5b   signature forward+backward: d_mean_operand float32, d_out float32, d_std_operand float32, mean_operand float32, out float32, std_operand float32, x uint8; 32-bit offsets
//   to('bfloat16') | div(255) | sub_channel(mean) | div_channel(std)
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

// A value as it would come back from memory.
template <typename Stored, typename Value>
__device__ __forceinline__ Value rounded_to(Value x) {
  return static_cast<Value>(widen(narrow<Stored>(x)));
}

// Within 2 ulp, for all operands.
__device__ __forceinline__ float narrow_div(float a, float b) {
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

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
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_pointwise_values(const float x, const float mean_operand,
    const float std_operand, float& out) {
  // to('bfloat16')
  const float after_to = rounded_to<bfloat16>(x);
  // div(255)
  const float after_div = after_to / 255.0f;
  // sub_channel(mean)
  const float after_sub_channel = after_div - mean_operand;
  // div_channel(std)
  out = after_sub_channel / std_operand;
}

// Reads x, mean_operand by (middle), std_operand by (middle); writes out.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 2)
forward_pointwise(const uint8_t* x, const float* mean_operand, const float* std_operand,
    float* __restrict__ out, ForwardSizes sizes, Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 4;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<uint8_t, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, float& mean_operand_row, float& std_operand_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const float mean_operand_value = widen(mean_operand[middle]);
    const float std_operand_value = widen(std_operand[middle]);
    mean_operand_row = mean_operand_value;
    std_operand_row = std_operand_value;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    float mean_operand_here;
    float std_operand_here;
    const Index left = enter_row(i, mean_operand_here, std_operand_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      float mean_operand_next = mean_operand_here;
      float std_operand_next = std_operand_here;
      if (is_crossing) enter_row(i + left, mean_operand_next, std_operand_next);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_next = kMayCross && lane >= left;
        const float x_value = widen(x_in[p], lane);
        const float mean_operand_value = is_next ? mean_operand_next : mean_operand_here;
        const float std_operand_value = is_next ? std_operand_next : std_operand_here;
        float out_value;
        forward_pointwise_values(x_value, mean_operand_value, std_operand_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, mean_operand_here, std_operand_here);
        const float mean_operand_value = mean_operand_here;
        const float std_operand_value = std_operand_here;
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(x_value, mean_operand_value, std_operand_value, out_value);
        out[j] = narrow<float>(out_value);
      }
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_inner_values(const float d_out, const float x,
    const float mean_operand, float& total_term, float& total_2_term) {
  // to('bfloat16')
  const float after_to = rounded_to<bfloat16>(x);
  // div(255)
  const float after_div = after_to * 0.00392156886f;
  // sub_channel(mean)
  const float after_sub_channel = after_div - mean_operand;
  total_term = d_out;
  total_2_term = after_sub_channel * d_out;
}

// Reads d_out, x, mean_operand by (middle); leaves partials of total, total_2.
__global__ void __launch_bounds__(128)
backward_inner(const float* d_out, const uint8_t* x, const float* mean_operand,
    Sum<float>* __restrict__ total_partials, Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes,
    Index rows, Index pieces, Index piece_length) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_middle = divide(row, sizes.middle);
  const Index middle = row - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  const float mean_operand_value = widen(mean_operand[middle]);
  Sum<float> total_sum;
  Sum<float> total_2_sum;
  const auto take = [&](Index inner, float d_out_value, float x_value) {
    float total_term_value;
    float total_2_term_value;
    backward_inner_values(d_out_value, x_value, mean_operand_value, total_term_value, total_2_term_value);
    total_sum.add(total_term_value);
    total_2_sum.add(total_2_term_value);
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
      take(inner, widen(d_out[i]), widen(x[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_mine = total_sum;
      total_sum = Sum<float>();
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_2_mine = total_2_sum;
      total_2_sum = Sum<float>();
      Pack<float, kLanes> d_out_in[kPacks];
      Pack<uint8_t, kLanes> x_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        d_out_in[p] = load<kLanes>(d_out + i);
        x_in[p] = load<kLanes>(x + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(d_out_in[p], lane), widen(x_in[p], lane));
        }
      }
      total_sum.merge(total_mine);
      total_2_sum.merge(total_2_mine);
    }
  }
  merge_tree(total_sum, threadIdx.x, blockDim.x, shared);
  __syncthreads();
  merge_tree(total_2_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_sum;
    total_2_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_2_sum;
  }
}

// The same for short rows: a block takes several.
__global__ void __launch_bounds__(128)
backward_inner_joined(const float* d_out, const uint8_t* x, const float* mean_operand,
    Sum<float>* __restrict__ total_partials, Sum<float>* __restrict__ total_2_partials, BackwardSizes sizes,
    Index rows, Index pieces, Index piece_length, Index each) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = blockIdx.x, above = task / pieces, piece = task % pieces;
  const Index alike = sizes.outer.value, shares = (alike + each - 1) / each, kept = above / shares,
      share = above % shares;
  const Index middle = kept;
  Sum<float> total_sum;
  Sum<float> total_2_sum;
  const Index past = min((share + 1) * each, alike);
  for (Index passing = share * each + threadIdx.y; passing < past; passing += blockDim.y) {
    const Index outer = passing;
    const Index row = (outer) * sizes.middle.value + middle;
    const float mean_operand_value = widen(mean_operand[middle]);
    const auto take = [&](Index inner, float d_out_value, float x_value) {
      float total_term_value;
      float total_2_term_value;
      backward_inner_values(d_out_value, x_value, mean_operand_value, total_term_value, total_2_term_value);
      total_sum.add(total_term_value);
      total_2_sum.add(total_2_term_value);
    };
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(d_out[i]), widen(x[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_mine = total_sum;
      total_sum = Sum<float>();
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_2_mine = total_2_sum;
      total_2_sum = Sum<float>();
      Pack<float, kLanes> d_out_in[kPacks];
      Pack<uint8_t, kLanes> x_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        d_out_in[p] = load<kLanes>(d_out + i);
        x_in[p] = load<kLanes>(x + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(d_out_in[p], lane), widen(x_in[p], lane));
        }
      }
      total_sum.merge(total_mine);
      total_2_sum.merge(total_2_mine);
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  merge_tree(total_sum, thread, blockDim.x * blockDim.y, shared);
  __syncthreads();
  merge_tree(total_2_sum, thread, blockDim.x * blockDim.y, shared);
  if (thread == 0) {
    total_partials[(kept * shares + share) * pieces + piece] = total_sum;
    total_2_partials[(kept * shares + share) * pieces + piece] = total_2_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, const float std_operand,
    const float total_2, float& d_mean_operand, float& d_std_operand) {
  d_mean_operand = -narrow_div(total, std_operand);
  d_std_operand = -narrow_div(narrow_div(total_2, std_operand), std_operand);
}

// Reads std_operand; merges partials into total, total_2; writes d_mean_operand, d_std_operand.
__global__ void __launch_bounds__(512)
backward_finalise(const float* std_operand, float* __restrict__ d_mean_operand,
    float* __restrict__ d_std_operand, const Sum<float>* total_partials, const Sum<float>* total_2_partials,
    BackwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 16];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.middle.value;
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
  const Index middle = result;
  const float std_operand_value = widen(std_operand[middle]);
  float d_mean_operand_value;
  float d_std_operand_value;
  backward_finalise_values(total_value, std_operand_value, total_2_value, d_mean_operand_value,
      d_std_operand_value);
  d_mean_operand[middle] = narrow<float>(d_mean_operand_value);
  d_std_operand[middle] = narrow<float>(d_std_operand_value);
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

// a: x, mean_operand, std_operand, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const mean_operand = reinterpret_cast<const float*>(a[1]);
  auto* const std_operand = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 4 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? forward_pointwise<true> : forward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, x, mean_operand, std_operand, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, mean_operand, std_operand, d_out, d_mean_operand, d_std_operand, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const uint8_t*>(a[0]);
  auto* const mean_operand = reinterpret_cast<const float*>(a[1]);
  auto* const std_operand = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_mean_operand = reinterpret_cast<float*>(a[4]);
  auto* const d_std_operand = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t backward_inner_each = rows_of_block(backward_inner_rows, backward_inner_length,
      static_cast<int64_t>(sizes.outer.value));
  const int64_t backward_inner_shares = ceil_divide(static_cast<int64_t>(sizes.outer.value),
      backward_inner_each);
  const int64_t total_partials_slots = backward_inner_shares * backward_inner_pieces;
  const int64_t total_2_partials_slots = backward_inner_shares * backward_inner_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  auto* const total_2_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_2_partials_slots);
  if (is_measuring) return scratch.used;
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    if (backward_inner_each > 1) {
      const auto blocks = static_cast<unsigned>(static_cast<int64_t>(sizes.middle.value) * backward_inner_shares * backward_inner_pieces);
      follow(backward_inner_joined, blocks, block, 0, stream, d_out, x, mean_operand, total_partials,
          total_2_partials, sizes, static_cast<Index>(backward_inner_rows),
          static_cast<Index>(backward_inner_pieces), static_cast<Index>(piece_length),
          static_cast<Index>(backward_inner_each));
    } else {
      const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
          block.y));
      follow(backward_inner, blocks, block, 0, stream, d_out, x, mean_operand, total_partials,
          total_2_partials, sizes, static_cast<Index>(backward_inner_rows),
          static_cast<Index>(backward_inner_pieces), static_cast<Index>(piece_length));
    }
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.middle.value), slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise, blocks, block, 0, stream, std_operand, d_mean_operand, d_std_operand,
        total_partials, total_2_partials, sizes, static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
