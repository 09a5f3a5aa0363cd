// fusegen 0.1.0   chain 9d652eae45ab   signature forward+backward: d_out float32, d_scale float32, d_x float32, out float32, picked_x float32, scale float32, winner_index uint8, x float32 with gaps; 32-bit offsets
//   mul_channel(scale) | max_pool2d(2)
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

// Elements that lie one after the other, a run, with a gap behind it.
struct Pitch {
  Size run;
  Index gap;
};

// A tensor of such runs in the guise of a pointer to one without gaps. No pack that begins at a multiple of its size crosses
// the end of a run.
template <typename T>
struct Pitched {
  T* from;
  Pitch pitch;
  Index at = 0;
  template <typename Offset>
  __device__ __forceinline__ Pitched operator+(Offset offset) const {
    return {from, pitch, at + static_cast<Index>(offset)};
  }
  __device__ __forceinline__ T* here() const { return from + (at + divide(at, pitch.run) * pitch.gap); }
  template <typename Offset>
  __device__ __forceinline__ T& operator[](Offset offset) const {
    return *(*this + offset).here();
  }
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(Pitched<const T> from) {
  return load<N>(from.here());
}

template <bool kIsWide, int N, typename T>
__device__ __forceinline__ void load_line(Pitched<const T> from, T (&to)[N]) {
  constexpr int kBytes = N * sizeof(T),
      kLanes = kIsWide ? (kBytes % 16 == 0 ? 16 : kBytes & -kBytes) / sizeof(T) : 1;
#pragma unroll
  for (int i = 0; i < N; i += kLanes) {
    const auto pack = load<kLanes>(from + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = pack.at[lane];
  }
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

template <typename T>
struct Picked {
  T value = 0;
  __device__ void add(T candidate, bool is_it) { value = is_it ? candidate : value; }
  __device__ T pick() const { return value; }
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
  Pitch x_pitch;
};

__device__ __forceinline__ void forward_window_stage_1(const float x, const float scale, float& peak_term) {
  // mul_channel(scale)
  peak_term = x * scale;
}

__device__ __forceinline__ void forward_window_stage_2(const float x, const int winner_index_2,
    float& picked_x_2_term, int& picked_x_2_term_at) {
  picked_x_2_term = x;
  picked_x_2_term_at = winner_index_2;
}

__device__ __forceinline__ void forward_window_row_values(const float peak, const float picked_x_2,
    const int winner_index_2, float& out, float& picked_x, int& winner_index) {
  out = peak;
  picked_x = picked_x_2;
  winner_index = winner_index_2;
}

// Reads x, scale by (axis_1); writes out, picked_x, winner_index.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
forward_window(const float* x_memory, const float* scale, float* __restrict__ out,
    float* __restrict__ picked_x, uint8_t* __restrict__ winner_index, ForwardSizes sizes) {
  wait_for_kernel_before();
  const Pitched<const float> x{x_memory, sizes.x_pitch};
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
  float picked_x_out[kWindows];
  uint8_t winner_index_out[kWindows];
#pragma unroll
  for (int beside = 0; beside < kWindows; ++beside) {
    Maximum<float> peak_sum;
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
      float peak_term_value;
      forward_window_stage_1(x_value, scale_value, peak_term_value);
      peak_sum.add(peak_term_value, position_value);
    }
    const float peak_value = peak_sum.max();
    const int winner_index_2_value = peak_sum.argmax();
    Picked<float> picked_x_2_sum;
#pragma unroll
    for (int position_value = 0; position_value < 4; ++position_value) {
      const float x_value = widen(x_in[position_value / 2][beside * 2 + position_value % 2]);
      float picked_x_2_term_value;
      int picked_x_2_term_at_value;
      forward_window_stage_2(x_value, winner_index_2_value, picked_x_2_term_value, picked_x_2_term_at_value);
      picked_x_2_sum.add(picked_x_2_term_value, picked_x_2_term_at_value == position_value);
    }
    const float picked_x_2_value = picked_x_2_sum.pick();
    float out_value;
    float picked_x_value;
    int winner_index_value;
    forward_window_row_values(peak_value, picked_x_2_value, winner_index_2_value, out_value, picked_x_value,
        winner_index_value);
    out_out[beside] = narrow<float>(out_value);
    picked_x_out[beside] = narrow<float>(picked_x_value);
    winner_index_out[beside] = narrow<uint8_t>(winner_index_value);
  }
  store_line<kIsWide>(out_out,
      out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
  store_line<kIsWide>(picked_x_out,
      picked_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
  store_line<kIsWide>(winner_index_out,
      winner_index + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner);
}

struct BackwardSizes {
  Size outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled;
};

__device__ __forceinline__ void backward_window_values_once(const float d_out, const float scale,
    float& product) {
  product = d_out * scale;
}

__device__ __forceinline__ void backward_window_values(const int position, const int winner_index,
    const float product, float& d_x) {
  d_x = position == winner_index ? product : 0.0f;
}

__device__ __forceinline__ void backward_window_row_values(const float d_out, const float picked_x,
    float& total_term) {
  total_term = d_out * picked_x;
}

// Reads winner_index by (outer, axis_1, axis_2, inner), d_out by (outer, axis_1, axis_2, inner), scale by (axis_1), picked_x by (outer, axis_1, axis_2, inner); leaves partials of total; writes d_x.
template <int kWindows, bool kIsWide>  // windows side by side, and whether lines of them make wide accesses
__global__ void __launch_bounds__(256)
backward_window(const uint8_t* winner_index, const float* d_out, const float* scale, const float* picked_x,
    float* __restrict__ d_x, Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Index rows,
    Index pieces, Index piece_length) {
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
      uint8_t winner_index_in[kWindows];
      load_line<kIsWide>(winner_index + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, winner_index_in);
      float d_out_in[kWindows];
      load_line<kIsWide>(d_out + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, d_out_in);
      float picked_x_in[kWindows];
      load_line<kIsWide>(picked_x + (((outer) * sizes.axis_1.value + axis_1) * sizes.axis_2.value + axis_2) * sizes.inner.value + inner, picked_x_in);
      const float scale_value = widen(scale[axis_1]);
      float d_x_out[2][kWindows * 2];
#pragma unroll
      for (int beside = 0; beside < kWindows; ++beside) {
        const int winner_index_value = widen(winner_index_in[beside]);
        const float d_out_value = widen(d_out_in[beside]);
        const float picked_x_value = widen(picked_x_in[beside]);
        float product_value;
        backward_window_values_once(d_out_value, scale_value, product_value);
#pragma unroll
        for (int position_value = 0; position_value < 4; ++position_value) {
          float d_x_value;
          backward_window_values(position_value, winner_index_value, product_value, d_x_value);
          d_x_out[position_value / 2][beside * 2 + position_value % 2] = narrow<float>(d_x_value);
        }
        float total_term_value;
        backward_window_row_values(d_out_value, picked_x_value, total_term_value);
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
  d_scale = total;
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

// a: x, scale, out, picked_x, winner_index, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, run and gap of x, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const scale = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  auto* const picked_x = reinterpret_cast<float*>(a[3]);
  auto* const winner_index = reinterpret_cast<uint8_t*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const ForwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]),
      size_of(a[11]), { size_of(a[12]), static_cast<Index>(a[13])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[15]);
  const int device = static_cast<int>(a[14]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(picked_x) | reinterpret_cast<uintptr_t>(winner_index)) % 16 == 0;
    const int64_t windows = is_aligned ? sizes.inner_unpooled.value % 4 == 0 ? 2 : 1 : 1;
    const auto run = windows == 2 ? forward_window<2,
        true> : is_aligned && sizes.inner_unpooled.value % 2 == 0 ? forward_window<1,
        true> : forward_window<1, false>;
    const auto blocks = static_cast<unsigned>(ceil_divide(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value) * static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value), 256 * windows));
    follow(run, blocks, 256, 0, stream, x, scale, out, picked_x, winner_index, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: scale, picked_x, winner_index, d_out, d_x, d_scale, scratch (-1: return the bytes it needs), outer, axis_1, axis_2, inner, axis_2_unpooled, inner_unpooled, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const scale = reinterpret_cast<const float*>(a[0]);
  auto* const picked_x = reinterpret_cast<const float*>(a[1]);
  auto* const winner_index = reinterpret_cast<const uint8_t*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_scale = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]), size_of(a[10]), size_of(a[11]),
      size_of(a[12]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[14]);
  const int device = static_cast<int>(a[13]);
  const DeviceGuard guard(device);
  const int64_t backward_window_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.axis_1.value), backward_window_length = static_cast<int64_t>(sizes.axis_2.value) * static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_window_pieces = ceil_divide(backward_window_length, 512);
  const int64_t total_partials_slots = static_cast<int64_t>(sizes.outer.value) * backward_window_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.axis_1.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    // Where each line begins at a multiple of their size, 2 windows go in wide accesses.
    const bool is_aligned = (reinterpret_cast<uintptr_t>(d_x) | reinterpret_cast<uintptr_t>(winner_index) | reinterpret_cast<uintptr_t>(d_out) | reinterpret_cast<uintptr_t>(picked_x)) % 16 == 0;
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
    follow(run, blocks, block, 0, stream, winner_index, d_out, scale, picked_x, d_x, total_partials, sizes,
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
