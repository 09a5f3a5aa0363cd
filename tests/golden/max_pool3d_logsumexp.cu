// fusegen 0.1.0   chain 964f958a855b   signature forward: out float32, x float32; 32-bit offsets
//   max_pool3d(2) | logsumexp(1, keepdim=True) | relu
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

// The first maximum and where it stands; a NaN beats every number, as in torch. It begins as its constructor says, and not
// its members, for nvcc 13.0 does not heed those of arrays of arrays.
template <typename T>
struct Maximum {
  T best;
  int at;
  __device__ Maximum() : best(0), at(-1) {}
  __device__ void add(T value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  __device__ T max() const { return best; }
  __device__ int argmax() const { return at; }
};

// The accumulator of the thread whose number in the warp differs in one bit.
template <template <typename> class Kind, typename T>
__device__ __forceinline__ Kind<T> exchange(Kind<T> mine, int bit) {
  return {__shfl_xor_sync(0xffffffffu, mine.number(), bit)};
}

// Merges the accumulators of the threads with the same x, in a fixed order: within warps, then over them.
template <template <typename> class Kind, typename T, int N, int L>
__device__ __forceinline__ void combine_across(Kind<T> (&mine)[N][L], T* cells, T* totals) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32,
      warps = blockDim.x * blockDim.y / 32;
  const int width = blockDim.x * N * L;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) {
      for (int bit = blockDim.x; bit < 32; bit *= 2) mine[n][lane].merge(exchange(mine[n][lane], bit));
      if (thread % 32 < blockDim.x) cells[warp * width + threadIdx.x * N * L + n * L + lane] = mine[n][lane].number();
    }
  }
  __syncthreads();
  for (int i = thread; i < width; i += blockDim.x * blockDim.y) {
    Kind<T> all;
    for (int other = 0; other < warps; ++other) all.merge(Kind<T>{cells[other * width + i]});
    totals[i] = all.number();
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int lane = 0; lane < L; ++lane) mine[n][lane] = {totals[threadIdx.x * N * L + n * L + lane]};
  }
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_bundle_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_bundle_stage_2(const float peak, float& peak_2_term) {
  peak_2_term = peak;
}

__device__ __forceinline__ void forward_bundle_stage_3(const float peak_2, float& held) {
  held = fabsf(peak_2) == INFINITY ? 0.0f : peak_2;
}

__device__ __forceinline__ void forward_bundle_stage_4(const float peak, const float held,
    float& total_term) {
  total_term = expf(peak - held);
}

__device__ __forceinline__ void forward_bundle_stage_5(const float total, const float peak_2,
    float& held_after_relu) {
  // logsumexp(1, keepdim=True)
  const float after_logsumexp = logf(total) + (fabsf(peak_2) == INFINITY ? 0.0f : peak_2);
  // relu
  held_after_relu = after_logsumexp <= 0.0f ? 0.0f : after_logsumexp;
}

// Reads x; writes out.
__global__ void __launch_bounds__(256, 3)
forward_bundle(const float* x, float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  // A thread has packs across neighbouring rows, for elements that are blockDim.y apart.
  // kInner elements of a pack side by side are of one window.
  [[maybe_unused]] constexpr int kRows = 4, kPacks = 4, kLanes = 4, kInner = 2, kWindows = kLanes / kInner;
  __shared__ float cells[512], totals[64];
  const Index length = sizes.axis_1.value;
  const Index packs = sizes.outer.value * sizes.axis_2.value * sizes.axis_3.value * sizes.inner.value / kWindows;
  for (Index first = blockIdx.x * blockDim.x; first < packs; first += gridDim.x * blockDim.x) {
    const bool is_live = first + threadIdx.x < packs;
    const Index bundle = is_live ? (first + threadIdx.x) * kWindows : 0;
    [[maybe_unused]] const Index end = is_live ? length : 0;
    const Index above_inner = divide(bundle, sizes.inner);
    const Index inner = bundle - above_inner * sizes.inner.value;
    const Index above_axis_3 = divide(above_inner, sizes.axis_3);
    const Index axis_3 = above_inner - above_axis_3 * sizes.axis_3.value;
    const Index above_axis_2 = divide(above_axis_3, sizes.axis_2);
    const Index axis_2 = above_axis_3 - above_axis_2 * sizes.axis_2.value;
    const Index outer = above_axis_2;
    Maximum<float> peak_sum[kPacks][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.y + p * blockDim.y;
      Pack<float, kLanes> x_in[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int window_1 = r / 2;
        const int window_2 = r % 2;
        const int window_3 = 0;
        const Index axis_1 = min(i, length - 1);
        x_in[r] = load<kLanes>(x + ((((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.axis_3_unpooled.value + (axis_3 * 2 + window_2)) * sizes.inner_unpooled.value + (inner * 2 + window_3));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const int window_1 = r / 2;
          const int window_2 = r % 2;
          const int window_3 = lane % kInner;
          const int position_value = ((window_1) * 2 + window_2) * 2 + window_3;
          const float x_value = widen(x_in[r], lane);
          float peak_term_value;
          forward_bundle_stage_1(x_value, peak_term_value);
          peak_sum[p][lane / kInner].add(peak_term_value, position_value);
        }
      }
    }
    Peak<float> peaks_2_windows[1][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.y + p * blockDim.y;
      const bool is_here = i < end;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float peak_value = peak_sum[p][beside].max();
        float peak_2_term_value;
        forward_bundle_stage_2(peak_value, peak_2_term_value);
        peaks_2_windows[0][beside].add_if(is_here, peak_2_term_value);
      }
    }
    combine_across(peaks_2_windows, cells, totals);
    float held_here[kWindows];
#pragma unroll
    for (int beside = 0; beside < kWindows; ++beside) {
      const float peak_2_value = peaks_2_windows[0][beside].best;
      float held_value;
      forward_bundle_stage_3(peak_2_value, held_value);
      held_here[beside] = held_value;
    }
    Sum<float> sums_4_windows[1][kWindows];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = threadIdx.y + p * blockDim.y;
      const bool is_here = i < end;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float peak_value = peak_sum[p][beside].max();
        const float held_value = held_here[beside];
        float total_term_value;
        forward_bundle_stage_4(peak_value, held_value, total_term_value);
        sums_4_windows[0][beside].add_if(is_here, total_term_value);
      }
    }
    combine_across(sums_4_windows, cells, totals);
    float held_after_relu_here[kWindows];
#pragma unroll
    for (int beside = 0; beside < kWindows; ++beside) {
      const float total_value = sums_4_windows[0][beside].total;
      const float peak_2_value = peaks_2_windows[0][beside].best;
      float held_after_relu_value;
      forward_bundle_stage_5(total_value, peak_2_value, held_after_relu_value);
      held_after_relu_here[beside] = held_after_relu_value;
    }
    if (is_live && threadIdx.y == 0) {
      Pack<float, kWindows> out_out;
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        out_out.at[beside] = narrow<float>(held_after_relu_here[beside]);
      }
      store(out + (((outer) * sizes.axis_2.value + axis_2) * sizes.axis_3.value + axis_3) * sizes.inner.value + inner, out_out);
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

// Threads beside each other along x, in whole warps with those along a strided row.
static dim3 column_block(int64_t beside, int64_t along, int64_t most_beside, int64_t most) {
  int64_t x = power_of_two(beside, 1, most_beside);
  while (x > 1 && x * ceil_divide(along, 32 / x) * (32 / x) > most) x /= 2;
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(ceil_divide(along, 32 / x) * (32 / x)));
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

// a: x, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, axis_3, inner, axis_2_unpooled, axis_3_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  if (!is_measuring && ((a[0] | a[1]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]), size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]),
      size_of(a[8]), size_of(a[9]), size_of(a[10]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t forward_bundle_across = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.axis_3.value) * static_cast<int64_t>(sizes.inner.value) / 2;
  const dim3 forward_bundle_block = column_block(forward_bundle_across,
      ceil_divide(static_cast<int64_t>(sizes.axis_1.value), 4), 32, 256);
  const int64_t forward_bundle_tasks = ceil_divide(forward_bundle_across, forward_bundle_block.x);
  const int64_t forward_bundle_resident = resident_blocks(forward_bundle, forward_bundle_block, 0, 0, device);
  const int64_t forward_bundle_slots = forward_bundle_tasks < forward_bundle_resident ? forward_bundle_tasks : forward_bundle_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_bundle, static_cast<unsigned>(forward_bundle_slots), forward_bundle_block, 0, stream, x,
        out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
