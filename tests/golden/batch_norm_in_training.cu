// fusegen 0.1.0   chain 70984f86c2ad   signature forward: bias float32, new_running_mean float32, new_running_var float32, out float32, running_mean float32, running_var float32, weight float32, x float32; 32-bit offsets
//   batch_norm(running_mean, running_var, weight, bias, training=True) | gelu
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

// Coefficients from the lowest power on.
__device__ __forceinline__ float polynomial(float, float coefficient) { return coefficient; }
template <typename... More>
__device__ __forceinline__ float polynomial(float x, float coefficient, More... more) {
  return fmaf(x, polynomial(x, more...), coefficient);
}

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

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_inner_values(const float x, float& mean_term) {
  mean_term = x;
}

// Reads x; leaves partials of mean.
__global__ void __launch_bounds__(128)
forward_inner(const float* x, Moments<float>* __restrict__ mean_partials, ForwardSizes sizes, Index rows,
    Index pieces, Index piece_length) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 16];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_middle = divide(row, sizes.middle);
  const Index middle = row - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  Moments<float> mean_sum;
  const auto take = [&](Index inner, float x_value) {
    float mean_term_value;
    forward_inner_values(x_value, mean_term_value);
    mean_sum.add(mean_term_value);
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
      take(inner, widen(x[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      Pack<float, kLanes> x_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        x_in[p] = load<kLanes>(x + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(x_in[p], lane));
        }
      }
    }
  }
  merge_tree(mean_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    mean_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = mean_sum;
  }
}

// The same for short rows: a block takes several.
__global__ void __launch_bounds__(128)
forward_inner_joined(const float* x, Moments<float>* __restrict__ mean_partials, ForwardSizes sizes,
    Index rows, Index pieces, Index piece_length, Index each) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 16];
  const Index task = blockIdx.x, above = task / pieces, piece = task % pieces;
  const Index alike = sizes.outer.value, shares = (alike + each - 1) / each, kept = above / shares,
      share = above % shares;
  const Index middle = kept;
  Moments<float> mean_sum;
  const Index past = min((share + 1) * each, alike);
  for (Index passing = share * each + threadIdx.y; passing < past; passing += blockDim.y) {
    const Index outer = passing;
    const Index row = (outer) * sizes.middle.value + middle;
    const auto take = [&](Index inner, float x_value) {
      float mean_term_value;
      forward_inner_values(x_value, mean_term_value);
      mean_sum.add(mean_term_value);
    };
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      const Index inner = i - base;
      take(inner, widen(x[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      Pack<float, kLanes> x_in[kPacks];
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
        x_in[p] = load<kLanes>(x + i);
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = head + (from + p * blockDim.x) * kLanes;
        if (i >= tail) break;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(x_in[p], lane));
        }
      }
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  merge_tree(mean_sum, thread, blockDim.x * blockDim.y, shared);
  if (thread == 0) {
    mean_partials[(kept * shares + share) * pieces + piece] = mean_sum;
  }
}

__device__ __forceinline__ void forward_finalise_values(const float mean, const float running_mean,
    const float variance, const float count_of_outer_inner, const float running_var, float& new_running_mean,
    float& new_running_var, float& mean_scratch, float& variance_scratch) {
  new_running_mean = fmaf(mean, 0.1f, running_mean * 0.9f);
  const float product = variance * (count_of_outer_inner / (count_of_outer_inner - 1.0f));
  new_running_var = fmaf(product, 0.1f, running_var * 0.9f);
  mean_scratch = mean;
  variance_scratch = variance;
}

// Reads running_mean, running_var; merges partials into mean; writes new_running_mean, new_running_var, mean_scratch, variance_scratch.
__global__ void __launch_bounds__(512)
forward_finalise(const float* running_mean, const float* running_var, float* new_running_mean,
    float* new_running_var, float* __restrict__ mean_scratch, float* __restrict__ variance_scratch,
    const Moments<float>* mean_partials, ForwardSizes sizes, Index slots) {
  wait_for_kernel_before();
  const float count_of_outer_inner_value = static_cast<float>(sizes.outer.value * sizes.inner.value);
  __shared__ alignas(16) unsigned char shared[512 * 32];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.middle.value;
  Moments<double> mean_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Moments<float> mean_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        mean_next[n] = mean_partials[result * slots + slot];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * blockDim.y >= slots) break;
        mean_sum.merge(mean_next[n]);
      }
    }
  }
  merge_trees(shared, mean_sum);
  if (threadIdx.y != 0 || !is_live) return;
  const float mean_value = static_cast<float>(mean_sum.mean());
  const float variance_value = static_cast<float>(mean_sum.variance());
  const Index middle = result;
  const float running_mean_value = widen(running_mean[middle]);
  const float running_var_value = widen(running_var[middle]);
  float new_running_mean_value;
  float new_running_var_value;
  float mean_scratch_value;
  float variance_scratch_value;
  forward_finalise_values(mean_value, running_mean_value, variance_value, count_of_outer_inner_value,
      running_var_value, new_running_mean_value, new_running_var_value, mean_scratch_value,
      variance_scratch_value);
  new_running_mean[middle] = narrow<float>(new_running_mean_value);
  new_running_var[middle] = narrow<float>(new_running_var_value);
  mean_scratch[middle] = narrow<float>(mean_scratch_value);
  variance_scratch[middle] = narrow<float>(variance_scratch_value);
}

__device__ __forceinline__ void forward_pointwise_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_pointwise_values(const float x, const float mean,
    const float inverse_root, const float weight, const float bias, float& out) {
  // batch_norm(running_mean, running_var, weight, bias, training=True)
  const float after_batch_norm = fmaf((x - mean) * inverse_root, weight, bias);
  // gelu
  const float series = polynomial(fabsf(after_batch_norm), -1.0f, -1.15110552f, -0.459209114f,
      -0.0524738058f, 0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f,
      9.13259044e-07f, -3.24377396e-08f);
  const float power = exp2_flushed(series);
  out = after_batch_norm * (after_batch_norm < 0.0f ? power : 1.0f - power);
}

// Reads x, mean by (middle), variance by (middle), weight by (middle), bias by (middle); writes out.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 2)
forward_pointwise(const float* x, const float* mean, const float* variance, const float* weight,
    const float* bias, float* __restrict__ out, ForwardSizes sizes, Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 4;
  const Index first = (static_cast<Index>(gridDim.x - 1 - blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, float& mean_row, float& inverse_root_row, float& weight_row,
      float& bias_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const float mean_value = widen(mean[middle]);
    const float variance_value = widen(variance[middle]);
    const float weight_value = widen(weight[middle]);
    const float bias_value = widen(bias[middle]);
    float inverse_root_value;
    forward_pointwise_values_once(variance_value, inverse_root_value);
    mean_row = mean_value;
    inverse_root_row = inverse_root_value;
    weight_row = weight_value;
    bias_row = bias_value;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    float mean_here;
    float inverse_root_here;
    float weight_here;
    float bias_here;
    const Index left = enter_row(i, mean_here, inverse_root_here, weight_here, bias_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      float mean_next = mean_here;
      float inverse_root_next = inverse_root_here;
      float weight_next = weight_here;
      float bias_next = bias_here;
      if (is_crossing) enter_row(i + left, mean_next, inverse_root_next, weight_next, bias_next);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_next = kMayCross && lane >= left;
        const float x_value = widen(x_in[p], lane);
        const float mean_value = is_next ? mean_next : mean_here;
        const float inverse_root_value = is_next ? inverse_root_next : inverse_root_here;
        const float weight_value = is_next ? weight_next : weight_here;
        const float bias_value = is_next ? bias_next : bias_here;
        float out_value;
        forward_pointwise_values(x_value, mean_value, inverse_root_value, weight_value, bias_value,
            out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, mean_here, inverse_root_here, weight_here, bias_here);
        const float mean_value = mean_here;
        const float inverse_root_value = inverse_root_here;
        const float weight_value = weight_here;
        const float bias_value = bias_here;
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(x_value, mean_value, inverse_root_value, weight_value, bias_value,
            out_value);
        out[j] = narrow<float>(out_value);
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

// a: x, running_mean, running_var, weight, bias, out, new_running_mean, new_running_var, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const running_mean = reinterpret_cast<const float*>(a[1]);
  auto* const running_var = reinterpret_cast<const float*>(a[2]);
  auto* const weight = reinterpret_cast<const float*>(a[3]);
  auto* const bias = reinterpret_cast<const float*>(a[4]);
  auto* const out = reinterpret_cast<float*>(a[5]);
  auto* const new_running_mean = reinterpret_cast<float*>(a[6]);
  auto* const new_running_var = reinterpret_cast<float*>(a[7]);
  const bool is_measuring = a[8] == -1;
  if (!is_measuring && ((a[0] | a[5]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[8])};
  const ForwardSizes sizes{ size_of(a[9]), size_of(a[10]), size_of(a[11]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  const int64_t forward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t forward_inner_pieces = ceil_divide(forward_inner_length, 8192);
  const int64_t forward_inner_each = rows_of_block(forward_inner_rows, forward_inner_length,
      static_cast<int64_t>(sizes.outer.value));
  const int64_t forward_inner_shares = ceil_divide(static_cast<int64_t>(sizes.outer.value),
      forward_inner_each);
  const int64_t mean_partials_slots = forward_inner_shares * forward_inner_pieces;
  auto* const mean_partials = scratch.take<Moments<float>>(static_cast<int64_t>(sizes.middle.value) * mean_partials_slots);
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.middle.value));
  if (is_measuring) return scratch.used;
  {
    const int64_t piece_length = ceil_divide(forward_inner_length, forward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    if (forward_inner_each > 1) {
      const auto blocks = static_cast<unsigned>(static_cast<int64_t>(sizes.middle.value) * forward_inner_shares * forward_inner_pieces);
      follow(forward_inner_joined, blocks, block, 0, stream, x, mean_partials, sizes,
          static_cast<Index>(forward_inner_rows), static_cast<Index>(forward_inner_pieces),
          static_cast<Index>(piece_length), static_cast<Index>(forward_inner_each));
    } else {
      const auto blocks = static_cast<unsigned>(ceil_divide(forward_inner_rows * forward_inner_pieces,
          block.y));
      follow(forward_inner, blocks, block, 0, stream, x, mean_partials, sizes,
          static_cast<Index>(forward_inner_rows), static_cast<Index>(forward_inner_pieces),
          static_cast<Index>(piece_length));
    }
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.middle.value), slots = mean_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(forward_finalise, blocks, block, 0, stream, running_mean, running_var, new_running_mean,
        new_running_var, mean_scratch, variance_scratch, mean_partials, sizes, static_cast<Index>(slots));
  }
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 4 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? forward_pointwise<true> : forward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, x, mean_scratch, variance_scratch, weight, bias, out, sizes,
        static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
