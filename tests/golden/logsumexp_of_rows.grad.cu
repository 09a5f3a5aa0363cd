// fusegen 0.1.0   chain 403f50d3fe60   signature forward+backward: d_out float32, d_x float32, out float32, saved_bound float32, saved_sum float32, x float32; 32-bit offsets
//   logsumexp(1) | gelu
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

__device__ __forceinline__ void forward_row_stage_2_once(const float peak, float& chosen) {
  chosen = fabsf(peak) == INFINITY ? 0.0f : peak;
}

__device__ __forceinline__ void forward_row_stage_2(const float x, const float chosen, float& total_term) {
  total_term = exp2_flushed((x - chosen) * 1.44269502f);
}

__device__ __forceinline__ void forward_row_row_values(const float total, const float peak, float& out,
    float& saved_bound, float& saved_sum) {
  // logsumexp(1)
  const float after_logsumexp = logf(total) + (fabsf(peak) == INFINITY ? 0.0f : peak);
  // gelu
  const float series = polynomial(fabsf(after_logsumexp), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  out = after_logsumexp * (after_logsumexp < 0.0f ? power : 1.0f - power);
  saved_bound = peak;
  saved_sum = total;
}

// Reads x; writes out, saved_bound, saved_sum.
__global__ void __launch_bounds__(256, 5)
forward_row(const float* x, float* __restrict__ out, float* __restrict__ saved_bound,
    float* __restrict__ saved_sum, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index outer = row;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
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
    float chosen_value;
    forward_row_stage_2_once(peak_value, chosen_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_term_value;
        forward_row_stage_2(x_value, chosen_value, total_term_value);
        if (is_here) sums_2[0].add(total_term_value);
      }
    }
    combine<8, false>(sums_2, cells[turn++ & 1]);
    const float total_value = sums_2[0].total;
    if (is_live && threadIdx.x == 0) {
      float out_value;
      float saved_bound_value;
      float saved_sum_value;
      forward_row_row_values(total_value, peak_value, out_value, saved_bound_value, saved_sum_value);
      out[outer] = narrow<float>(out_value);
      saved_bound[outer] = narrow<float>(saved_bound_value);
      saved_sum[outer] = narrow<float>(saved_sum_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_pointwise_values_once(const float saved_bound, const float d_out,
    const float saved_sum, float& chosen, float& quotient) {
  // logsumexp(1)
  const float after_logsumexp = logf(saved_sum) + (fabsf(saved_bound) == INFINITY ? 0.0f : saved_bound);
  // backward, down to logsumexp(1)
  const float power = exp2_flushed(after_logsumexp * after_logsumexp * -0.721347511f + -1.32574809f);
  const float series = polynomial(fabsf(after_logsumexp), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power_2 = exp2_flushed(series);
  const float sum = after_logsumexp * power + (after_logsumexp < 0.0f ? power_2 : 1.0f - power_2);
  const float d_after_logsumexp = d_out * sum;
  chosen = fabsf(saved_bound) == INFINITY ? 0.0f : saved_bound;
  quotient = d_after_logsumexp / saved_sum;
}

__device__ __forceinline__ void backward_pointwise_values(const float quotient, const float x,
    const float chosen, float& d_x) {
  d_x = quotient * expf(x - chosen);
}

// Reads x, d_out by (outer), saved_sum by (outer), saved_bound by (outer); writes d_x.
template <bool kMayCross>
__global__ void __launch_bounds__(64, 2)
backward_pointwise(const float* d_out, const float* saved_sum, const float* saved_bound, const float* x,
    float* __restrict__ d_x, BackwardSizes sizes, Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 4;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, float& quotient_row, float& chosen_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    const float d_out_value = widen(d_out[outer]);
    const float saved_sum_value = widen(saved_sum[outer]);
    const float saved_bound_value = widen(saved_bound[outer]);
    float chosen_value;
    float quotient_value;
    backward_pointwise_values_once(saved_bound_value, d_out_value, saved_sum_value, chosen_value,
        quotient_value);
    quotient_row = quotient_value;
    chosen_row = chosen_value;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    float quotient_here;
    float chosen_here;
    const Index left = enter_row(i, quotient_here, chosen_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      float quotient_next = quotient_here;
      float chosen_next = chosen_here;
      if (is_crossing) enter_row(i + left, quotient_next, chosen_next);
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool is_next = kMayCross && lane >= left;
        const float x_value = widen(x_in[p], lane);
        const float quotient_value = is_next ? quotient_next : quotient_here;
        const float chosen_value = is_next ? chosen_next : chosen_here;
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, chosen_value, d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      store(d_x + i, d_x_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, quotient_here, chosen_here);
        const float quotient_value = quotient_here;
        const float chosen_value = chosen_here;
        const float x_value = widen(x[j]);
        float d_x_value;
        backward_pointwise_values(quotient_value, x_value, chosen_value, d_x_value);
        d_x[j] = narrow<float>(d_x_value);
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

// a: x, out, saved_bound, saved_sum, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  auto* const saved_bound = reinterpret_cast<float*>(a[2]);
  auto* const saved_sum = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 16), 256);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_slots = forward_row_tasks;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x, out,
        saved_bound, saved_sum, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, saved_bound, saved_sum, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const saved_bound = reinterpret_cast<const float*>(a[1]);
  auto* const saved_sum = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 1024));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 4 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? backward_pointwise<true> : backward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, d_out, saved_sum, saved_bound, x, d_x, sizes,
        static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
