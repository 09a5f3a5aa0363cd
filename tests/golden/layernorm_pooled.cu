// fusegen 0.1.0   chain 8c6971b5613f   signature forward: bias float32, out float32, p_operand float32, weight float32, x float32; 32-bit offsets
//   add(p) | layernorm(weight, bias) | avg_pool3d(2) | gelu
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
  Size outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_bundle_stage_1(const float x, const float p_operand,
    float& total_term) {
  // add(p)
  total_term = x + p_operand;
}

__device__ __forceinline__ void forward_bundle_stage_2(const float count_of_window_3_inner, float& held) {
  held = 1.0f / count_of_window_3_inner;
}

__device__ __forceinline__ void forward_bundle_stage_3(const float total, const float held, float& held_2,
    float& held_4) {
  held_2 = total * held;
  held_4 = held_2;
}

__device__ __forceinline__ void forward_bundle_stage_4(const float x, const float p_operand,
    const float held_2, float& total_2_term, float& total_2_term_by) {
  // add(p)
  const float after_add = x + p_operand;
  total_2_term = after_add - held_2;
  total_2_term_by = total_2_term;
}

__device__ __forceinline__ void forward_bundle_stage_5(const float total_2, const float held, float& held_3) {
  held_3 = rsqrtf(fmaf(total_2, held, 1e-05f));
}

__device__ __forceinline__ void forward_bundle_stage_6(const float x, const float p_operand,
    const float held_4, const float held_3, const float weight, const float bias, float& total_3_term) {
  // add(p)
  const float after_add = x + p_operand;
  total_3_term = fmaf((after_add - held_4) * held_3, weight, bias);
}

__device__ __forceinline__ void forward_bundle_stage_7(const float total_3, float& held_after_gelu) {
  // avg_pool3d(2)
  const float after_avg_pool3d = total_3 * 0.125f;
  // gelu
  const float series = polynomial(fabsf(total_3), -1.0f, -0.14388819f, -0.00717514241f, -0.000102487902f,
      1.70592193e-06f, -7.66805119e-10f, -1.03863085e-09f, 3.61999007e-11f, -6.67045412e-13f,
      6.80431011e-15f, -3.02099992e-17f);
  const float power = exp2_flushed(series);
  held_after_gelu = after_avg_pool3d * (total_3 < 0.0f ? power : 1.0f - power);
}

// Reads x, p_operand by (), weight by (inner, window_3), bias by (inner, window_3); writes out.
__global__ void __launch_bounds__(256, 3)
forward_bundle(const float* x, const float* p_operand, const float* weight, const float* bias,
    float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_window_3_inner_value = static_cast<float>(2 * sizes.inner.value);
  // A thread has packs of each of a bundle's rows.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 4, kPacks = 1, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[2][32];
  int turn = 0;
  const Index length = sizes.inner.value * 2;
  Pack<float, kLanes> weight_in[kPacks];
  Pack<float, kLanes> bias_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) weight_in[p] = load<kLanes>(weight + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
    if (i < length) bias_in[p] = load<kLanes>(bias + i);
  }
  const Index bundles = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value;
  for (Index first = blockIdx.x * blockDim.y; first < bundles; first += gridDim.x * blockDim.y) {
    const bool is_live = first + threadIdx.y < bundles;
    const Index bundle = is_live ? first + threadIdx.y : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_axis_2 = divide(bundle, sizes.axis_2);
    const Index axis_2 = bundle - above_axis_2 * sizes.axis_2.value;
    const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
    const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
    const Index outer = above_axis_1;
    Pack<float, kLanes> x_in[kRows][kPacks];
    float p_operand_in;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        if (i < end) x_in[r][p] = load<kLanes>(x + (((outer) * sizes.axis_1_unpooled.value + (axis_1 * 2 + window_1)) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_2)) * length + i);
      }
    }
    p_operand_in = p_operand[0];
    Sum<float> sums_1[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          float total_term_value;
          forward_bundle_stage_1(x_value, p_operand_value, total_term_value);
          if (is_here) sums_1[r].add(total_term_value);
        }
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    float held_here;
    {
      float held_value;
      forward_bundle_stage_2(count_of_window_3_inner_value, held_value);
      held_here = held_value;
    }
    float held_2_here[kRows];
    float held_4_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_value = sums_1[r].total;
      const float held_value = held_here;
      float held_2_value;
      float held_4_value;
      forward_bundle_stage_3(total_value, held_value, held_2_value, held_4_value);
      held_2_here[r] = held_2_value;
      held_4_here[r] = held_4_value;
    }
    Sum<float> sums_4[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
        const bool is_here = i < end;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float held_2_value = held_2_here[r];
          float total_2_term_value;
          float total_2_term_by_value;
          forward_bundle_stage_4(x_value, p_operand_value, held_2_value, total_2_term_value,
              total_2_term_by_value);
          if (is_here) sums_4[r].add(total_2_term_value, total_2_term_by_value);
        }
      }
    }
    combine<8, false>(sums_4, cells[turn++ & 1]);
    float held_3_here[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float total_2_value = sums_4[r].total;
      const float held_value = held_here;
      float held_3_value;
      forward_bundle_stage_5(total_2_value, held_value, held_3_value);
      held_3_here[r] = held_3_value;
    }
    Sum<float> total_3_sum[kPacks][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const float x_value = widen(x_in[r][p], lane);
          const float p_operand_value = widen(p_operand_in);
          const float held_4_value = held_4_here[r];
          const float held_3_value = held_3_here[r];
          const float weight_value = widen(weight_in[p], lane);
          const float bias_value = widen(bias_in[p], lane);
          float total_3_term_value;
          forward_bundle_stage_6(x_value, p_operand_value, held_4_value, held_3_value, weight_value,
              bias_value, total_3_term_value);
          total_3_sum[p][lane / kInner].add(total_3_term_value);
        }
      }
    }
    float held_after_gelu_here[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float total_3_value = total_3_sum[p][beside].sum();
        float held_after_gelu_value;
        forward_bundle_stage_7(total_3_value, held_after_gelu_value);
        held_after_gelu_here[p][beside] = held_after_gelu_value;
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (threadIdx.x + p * blockDim.x) * kLanes;
      Pack<float, kWindows> out_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        out_out.at[beside] = narrow<float>(held_after_gelu_here[p][beside]);
      }
      if (i < end) store(out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * (length / kInner) + i / kInner, out_out);
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

// a: x, p_operand, weight, bias, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_1_unpooled, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const p_operand = reinterpret_cast<const float*>(a[1]);
  auto* const weight = reinterpret_cast<const float*>(a[2]);
  auto* const bias = reinterpret_cast<const float*>(a[3]);
  auto* const out = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[2] | a[3] | a[4]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]),
      size_of(a[11]), size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const dim3 forward_bundle_block = row_block(ceil_divide(static_cast<int64_t>(sizes.inner.value) * static_cast<int64_t>(2), 4), 256);
  const int64_t forward_bundle_tasks = ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value), forward_bundle_block.y);
  const int64_t forward_bundle_resident = resident_blocks(forward_bundle, forward_bundle_block, 0, 0, device);
  const int64_t forward_bundle_slots = forward_bundle_tasks < forward_bundle_resident ? forward_bundle_tasks : forward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_bundle, static_cast<unsigned>(forward_bundle_slots), forward_bundle_block, 0, stream, x,
        p_operand, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
