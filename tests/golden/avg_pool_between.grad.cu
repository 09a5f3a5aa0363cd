// fusegen 0.1.0   chain d8963ba78a90   signature forward+backward: d_out float32, d_scale float32, d_x float32, out float32, scale float32, x float32; 32-bit offsets
//   gelu | avg_pool2d(2) | mul_channel(scale) | tanh
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

// Neighbours in as few accesses as their size allows, where they begin at a multiple of it; else one by one.
template <bool kIsWide, int N, typename T>
__device__ __forceinline__ void load_line(const T* from, T (&to)[N]) {
  constexpr int kBytes = N * sizeof(T),
      kLanes = kIsWide ? (kBytes % 16 == 0 ? 16 : kBytes & -kBytes) / sizeof(T) : 1;
  using Whole = typename Bits<sizeof(T) * kLanes>::type;
#pragma unroll
  for (int i = 0; i < N; i += kLanes) {
    Pack<T, kLanes> pack;
    *reinterpret_cast<Whole*>(&pack) = *reinterpret_cast<const Whole*>(from + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = pack.at[lane];
  }
}

template <bool kIsWide, int N, typename T>
__device__ __forceinline__ void store_line(const T (&from)[N], T* to) {
  constexpr int kBytes = N * sizeof(T),
      kLanes = kIsWide ? (kBytes % 16 == 0 ? 16 : kBytes & -kBytes) / sizeof(T) : 1;
#pragma unroll
  for (int i = 0; i < N; i += kLanes) {
    Pack<T, kLanes> pack;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) pack.at[lane] = from[i + lane];
    store(to + i, pack);
  }
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
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void forward_window_stage_1(const float x, float& total_term) {
  // gelu
  const float series = polynomial(fabsf(x), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  total_term = x * (x < 0.0f ? power : 1.0f - power);
}

__device__ __forceinline__ void forward_window_row_values(const float total, const float scale, float& out) {
  // avg_pool2d(2)
  const float after_avg_pool2d = total * 0.25f;
  // mul_channel(scale)
  const float after_mul_channel = after_avg_pool2d * scale;
  // tanh
  out = tanhf(after_mul_channel);
}

// Reads x, scale by (axis_1); writes out.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
forward_window(const float* x, const float* scale, float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  const Index results = sizes.outer.value * sizes.axis_1.value * sizes.axis_2.value * sizes.inner.value;
  const Index result = (static_cast<Index>(blockIdx.x) * 256 + threadIdx.x) * kWindows;
  if (result >= results) return;
  const Index above_inner = divide(result, sizes.inner);
  const Index inner = result - above_inner * sizes.inner.value;
  const Index above_axis_2 = divide(above_inner, sizes.axis_2);
  const Index axis_2 = above_inner - above_axis_2 * sizes.axis_2.value;
  const Index above_axis_1 = divide(above_axis_2, sizes.axis_1);
  const Index axis_1 = above_axis_2 - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  float x_in[2][kWindows * 2];
#pragma unroll
  for (int line = 0; line < 2; ++line) {
    const Index window_1 = line;
    constexpr Index window_2 = 0;
    load_line<kIsWide>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), x_in[line]);
  }
  const float scale_value = widen(scale[axis_1]);
  float out_out[kWindows];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    Sum<float> total_sum;
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
      float total_term_value;
      forward_window_stage_1(x_value, total_term_value);
      total_sum.add(total_term_value);
    }
    const float total_value = total_sum.sum();
    float out_value;
    forward_window_row_values(total_value, scale_value, out_value);
    out_out[beside] = narrow<float>(out_value);
  }
  store_line<kIsWide>(out_out,
      out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_window_stage_1(const float x, float& total_2_term) {
  // gelu
  const float series = polynomial(fabsf(x), 0.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  total_2_term = x * 0.5f * (x < 0.0f ? power : 2.0f - power);
}

__device__ __forceinline__ void backward_window_values_once(const float d_out, const float total_2,
    const float scale, float& d_after_gelu) {
  // avg_pool2d(2)
  const float after_avg_pool2d = total_2 * 0.25f;
  // mul_channel(scale)
  const float after_mul_channel = after_avg_pool2d * scale;
  // tanh
  const float after_tanh = tanhf(after_mul_channel);
  // backward, down to mul_channel(scale)
  const float d_after_mul_channel = d_out * (1.0f - after_tanh * after_tanh);
  // backward, down to avg_pool2d(2)
  const float d_after_avg_pool2d = d_after_mul_channel * scale;
  // backward, down to gelu
  d_after_gelu = d_after_avg_pool2d * 0.25f;
}

__device__ __forceinline__ void backward_window_values(const float d_after_gelu, const float x, float& d_x) {
  const float series = polynomial(fabsf(x), 0.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  const float sum = fmaf(x * 0.5f, exp2_flushed(fmaf(x * x, -0.721347511f, -0.325748056f)),
      (x < 0.0f ? power : 2.0f - power) * 0.5f);
  d_x = d_after_gelu * sum;
}

__device__ __forceinline__ void backward_window_row_values(const float total_2, const float d_out,
    const float scale, float& total_term) {
  // avg_pool2d(2)
  const float after_avg_pool2d = total_2 * 0.25f;
  // mul_channel(scale)
  const float after_mul_channel = after_avg_pool2d * scale;
  // tanh
  const float after_tanh = tanhf(after_mul_channel);
  // backward, down to mul_channel(scale)
  const float d_after_mul_channel = d_out * (1.0f - after_tanh * after_tanh);
  total_term = total_2 * d_after_mul_channel;
}

// Reads x, d_out by (outer, axis_1, axis_2, inner), scale by (axis_1); leaves partials of total; writes d_x.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
backward_window(const float* x, const float* d_out, const float* scale, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_axis_1 = divide(row, sizes.axis_1);
  const Index axis_1 = row - above_axis_1 * sizes.axis_1.value;
  const Index outer = above_axis_1;
  Sum<float> total_sum;
  if (is_live) {
    const Index end = min((piece + 1) * piece_length, sizes.axis_2.value * sizes.inner.value);
    for (Index result = piece * piece_length + threadIdx.x * kWindows; result < end; result += blockDim.x * kWindows) {
      const Index above_inner = divide(result, sizes.inner);
      const Index inner = result - above_inner * sizes.inner.value;
      const Index axis_2 = above_inner;
      float x_in[2][kWindows * 2];
#pragma unroll
      for (int line = 0; line < 2; ++line) {
        const Index window_1 = line;
        constexpr Index window_2 = 0;
        load_line<kIsWide>(x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2), x_in[line]);
      }
      float d_out_in[kWindows];
      load_line<kIsWide>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, d_out_in);
      const float scale_value = widen(scale[axis_1]);
      float d_x_out[2][kWindows * 2];
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const float d_out_value = widen(d_out_in[beside]);
        Sum<float> total_2_sum;
#pragma unroll
        for (int position_value = 0; position_value < 4; ++position_value) {
          const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
          float total_2_term_value;
          backward_window_stage_1(x_value, total_2_term_value);
          total_2_sum.add(total_2_term_value);
        }
        const float total_2_value = total_2_sum.sum();
        float d_after_gelu_value;
        backward_window_values_once(d_out_value, total_2_value, scale_value, d_after_gelu_value);
#pragma unroll
        for (int position_value = 0; position_value < 4; ++position_value) {
          const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
          float d_x_value;
          backward_window_values(d_after_gelu_value, x_value, d_x_value);
          d_x_out[position_value / 2][beside * 2 + position_value % 2] = narrow<float>(d_x_value);
        }
        float total_term_value;
        backward_window_row_values(total_2_value, d_out_value, scale_value, total_term_value);
        total_sum.add(total_term_value);
      }
#pragma unroll
      for (int line = 0; line < 2; ++line) {
        const Index window_1 = line;
        constexpr Index window_2 = 0;
        store_line<kIsWide>(d_x_out[line],
            d_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2));
      }
      const Index window_1_room = axis_2 + 1 == sizes.axis_2.value ? sizes.axis_2_unpooled.value - axis_2 * 2 : 2;
      const Index window_2_room = inner + kWindows == sizes.inner.value ? sizes.inner_unpooled.value - inner * 2 : kWindows * 2;
      if (window_1_room > 2 || window_2_room > kWindows * 2) {
        for (Index window_1 = 0; window_1 < window_1_room; ++window_1) {
          const bool is_outside = window_1 >= 2;
          for (Index window_2 = is_outside ? 0 : kWindows * 2; window_2 < window_2_room; ++window_2) d_x[(((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2_unpooled.value + (axis_2 * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2)] = narrow<float>(0.0f);
        }
      }
    }
  }
  merge_tree(total_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(axis_1) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_scale) {
  d_scale = total * 0.25f;
}

// Merges partials into total; writes d_scale.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_scale, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.axis_1.value;
  Sum<double> total_sum;
  constexpr int kAtOnce = 8;
  if (is_live) {
    for (Index first = threadIdx.y; first < slots; first += kAtOnce * blockDim.y) {
      Sum<float> total_next[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Index slot = first + n * blockDim.y;
        if (slot >= slots) break;
        total_next[n] = total_partials[result * slots + slot];
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
  const Index axis_1 = result;
  float d_scale_value;
  backward_finalise_values(total_value, d_scale_value);
  d_scale[axis_1] = narrow<float>(d_scale_value);
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

// a: x, scale, out, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), size_of(a[7]), size_of(a[8]),
      size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int device = static_cast<int>(a[10]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner_unpooled.value % 4 == 0 ? 2 : 1 : 1;
    const auto run = windows == 2 ? forward_window<2,
        true> : is_aligned && sizes.inner_unpooled.value % 2 == 0 ? forward_window<1,
        true> : forward_window<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, scale, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, scale, d_out, d_x, d_scale, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_scale = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]),
      size_of(a[11]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[13]);
  const int device = static_cast<int>(a[12]);
  const DeviceGuard guard(device);
  const int64_t backward_window_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value), backward_window_length = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_window_pieces = ceil_divide(backward_window_length, 512);
  const int64_t total_partials_slots = static_cast<int64_t>(sizes.outer.value) * backward_window_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(d_x) | reinterpret_cast<uintptr_t>(d_out)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner_unpooled.value % 4 == 0 ? 2 : 1 : 1;
    const auto run = windows == 2 ? backward_window<2,
        true> : is_aligned && sizes.inner_unpooled.value % 2 == 0 ? backward_window<1,
        true> : backward_window<1, false>;
    const int64_t piece_length = ceil_divide(backward_window_length, backward_window_pieces * 2) * 2;
    // Four turns a thread of a whole row, so that short rows share a block, and are merged together.
    const int64_t turns = backward_window_pieces == 1 || windows == 1 ? 4 : 1;
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, turns * windows), 1,
        256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(backward_window_rows * backward_window_pieces,
        block.y));
    follow(run, blocks, block, 0, stream, x, d_out, scale, d_x, total_partials, sizes,
        static_cast<Index>(backward_window_rows), static_cast<Index>(backward_window_pieces),
        static_cast<Index>(piece_length));
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.axis_1.value), slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise, blocks, block, 0, stream, d_scale, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
