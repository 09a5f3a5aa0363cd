// fusegen 0.1.0   chain dbcb9d4669e1   signature forward: bias float32, out float32, residual float32, weight float32, x float32; 32-bit offsets
//   add(residual) | layernorm(8192, weight, bias) | gelu
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

// A thread's elements around the mean of the first of them: what they are off by, and squared. Merged, around their mean.
template <typename T>
struct Spread {
  T centre = 0, off = 0, squares = 0;
  template <int kLanes>
  __device__ void add_if(bool is_here, bool is_first, const T (&values)[kLanes]) {
#pragma unroll
    for (int lane = 0; lane < kLanes && is_first; ++lane) centre += is_here ? values[lane] / kLanes : T(0);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const T distance = is_here ? values[lane] - centre : T(0);
      off += distance;
      squares = fma(distance, distance, squares);
    }
  }
  // The same elements around another centre.
  __device__ void move(T to, T count) {
    const T gap = centre - to;
    squares = fma(gap, fma(count, gap, 2 * off), squares);
    off = fma(count, gap, off);
    centre = to;
  }
};

// How many of a row's elements this thread has, which come in packs of neighbours, so many apart.
template <int kPacks, int kLanes>
__device__ __forceinline__ int elements_of(Index first, Index apart, Index length) {
  int packs = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs += first + p * apart < length;
  return packs * kLanes;
}

// How many of a row's elements a thread has, and how many those of its warp that share the row.
template <typename T>
struct Counts {
  T mine, of_warp;
};

template <bool kIsWide, typename T>
__device__ __forceinline__ Counts<T> counted(T mine) {
  T all = mine;
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (kIsWide || bit < blockDim.x) all += __shfl_xor_sync(0xffffffffu, all, bit);
  }
  return {mine, all};
}

// The same for means and squared distances from them: a warp finds its own mean before it adds up the distances from it,
// and what warps have is merged by Chan's formula, so that there is one barrier.
template <int kWarps, bool kIsWide, bool kForAll = true, typename T, int N>
__device__ __forceinline__ void combine(Spread<T> (&mine)[N], const Counts<T>& counts, T length, T* cells) {
  T beyond[N], base[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = __shfl_sync(0xffffffffu, mine[n].centre, 0, kIsWide ? 32 : min(32, blockDim.x));
    beyond[n] = fma(counts.mine, mine[n].centre - base[n], mine[n].off);
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) mine[n].move(base[n] + ratio(beyond[n], counts.of_warp), counts.mine);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (!kIsWide && bit >= blockDim.x) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
  }
  if (!kIsWide && blockDim.x <= 32) return;
  constexpr int kCells = 2 * N + 1;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, place = threadIdx.x % 32;
  T* const row_cells = cells + threadIdx.y * warps * kCells;
  if (place == 0) {
    row_cells[warp * kCells] = counts.of_warp;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      row_cells[warp * kCells + 2 * n + 1] = mine[n].centre;
      row_cells[warp * kCells + 2 * n + 2] = mine[n].squares;
    }
  }
  __syncthreads();
  if (!kForAll && warp > 0) return;
  const int other = place % kWarps;
  const T count = other < warps ? row_cells[other * kCells] : T(0);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    base[n] = row_cells[2 * n + 1];
    mine[n].centre = other < warps ? row_cells[other * kCells + 2 * n + 1] : T(0);
    mine[n].squares = other < warps ? row_cells[other * kCells + 2 * n + 2] : T(0);
    beyond[n] = count * (mine[n].centre - base[n]);
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) beyond[n] += __shfl_xor_sync(0xffffffffu, beyond[n], bit);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const T mean = base[n] + ratio(beyond[n], length), gap = mine[n].centre - mean;
    mine[n].squares = fma(count * gap, gap, mine[n].squares);
    mine[n].centre = mean;
  }
#pragma unroll
  for (int bit = kWarps / 2; bit > 0; bit /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) mine[n].squares += __shfl_xor_sync(0xffffffffu, mine[n].squares, bit);
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

__device__ __forceinline__ void forward_row_stage_1(const float x, const float residual, float& mean_term,
    float& carried_after_add) {
  // add(residual)
  mean_term = x + residual;
  carried_after_add = mean_term;
}

__device__ __forceinline__ void forward_row_values_once(const float variance, float& inverse_root) {
  inverse_root = rsqrtf(variance + 1e-05f);
}

__device__ __forceinline__ void forward_row_values(const float carried_after_add, const float mean,
    const float inverse_root, const float weight, const float bias, float& out) {
  // layernorm(8192, weight, bias)
  const float after_layernorm = fmaf((carried_after_add - mean) * inverse_root, weight, bias);
  // gelu
  const float series = polynomial(fabsf(after_layernorm), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  out = after_layernorm * (after_layernorm < 0.0f ? power : 1.0f - power);
}

// Reads x, residual, weight by (inner), bias by (inner); writes out.
__global__ void __launch_bounds__(1024, 1)
forward_row(const float* x, const float* residual, const float* weight, const float* bias,
    float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ float cells[2][96];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  auto* const residual_next = reinterpret_cast<Pack<float, kLanes>*>(room + 2048) + thread;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x * blockDim.y;
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) send(&x_next[p * 1024], x + (base + i));
      if (is_here) send(&residual_next[p * 1024], residual + (base + i));
    }
    send_off();
  };
  send_row(first);
  const float elements = elements_of<kPacks, kLanes>(threadIdx.x * kLanes, blockDim.x * kLanes, length);
  const Counts<float> counts = counted<false>(elements);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    Pack<float, kLanes> x_in[kPacks];
    Pack<float, kLanes> residual_in[kPacks];
    wait_for_sent<0>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[p * 1024];
      residual_in[p] = residual_next[p * 1024];
    }
    send_row(first + stride);
    Spread<float> spreads_1[1];
    float carried_after_add[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      float mean_term_lanes[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        const float residual_value = widen(residual_in[p], lane);
        float mean_term_value;
        float carried_after_add_value;
        forward_row_stage_1(x_value, residual_value, mean_term_value, carried_after_add_value);
        mean_term_lanes[lane] = mean_term_value;
        carried_after_add[p][lane] = carried_after_add_value;
      }
      spreads_1[0].add_if(is_here, p == 0, mean_term_lanes);
    }
    combine<32, false>(spreads_1, counts, static_cast<float>(length), cells[turn++ & 1]);
    const float mean_value = spreads_1[0].centre;
    const float variance_value = spreads_1[0].squares / static_cast<float>(length);
    float inverse_root_value;
    forward_row_values_once(variance_value, inverse_root_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      Pack<float, kLanes> weight_in;
      if (is_here) weight_in = load<kLanes>(weight + i);
      Pack<float, kLanes> bias_in;
      if (is_here) bias_in = load<kLanes>(bias + i);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float weight_value = widen(weight_in, lane);
        const float bias_value = widen(bias_in, lane);
        const float carried_after_add_value = carried_after_add[p][lane];
        float out_value;
        forward_row_values(carried_after_add_value, mean_value, inverse_root_value, weight_value, bias_value,
            out_value);
        out_out.at[lane] = narrow<float>(out_value);
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

// a: x, residual, weight, bias, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const residual = reinterpret_cast<const float*>(a[1]);
  auto* const weight = reinterpret_cast<const float*>(a[2]);
  auto* const bias = reinterpret_cast<const float*>(a[3]);
  auto* const out = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 8), 256);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_resident = resident_blocks(forward_row, forward_row_block, 65536, 65536, device);
  const int64_t forward_row_slots = forward_row_tasks < forward_row_resident ? forward_row_tasks : forward_row_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 65536, stream, x,
        residual, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
