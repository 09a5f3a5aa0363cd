// fusegen 0.1.0   chain 4a8576720123   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, out float32, x float32 with gaps; 32-bit offsets
//   add_channel(bias) | gelu | mean((2, 3))
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
  Pitch x_pitch;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, const float bias, float& total_term,
    float& total_term_by) {
  // add_channel(bias)
  const float after_add_channel = x + bias;
  total_term = after_add_channel;
  const float series = polynomial(fabsf(after_add_channel), -1.0f, -1.15110552f, -0.459209114f,
      -0.0524738058f, 0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f,
      9.13259044e-07f, -3.24377396e-08f);
  const float power = exp2_flushed(series);
  total_term_by = after_add_channel < 0.0f ? power : 1.0f - power;
}

__device__ __forceinline__ void forward_row_row_values(const float total, const float count_of_inner,
    float& out) {
  // mean((2, 3))
  out = total * (1.0f / count_of_inner);
}

// Reads x, bias by (middle); writes out.
__global__ void __launch_bounds__(256, 4)
forward_row(const float* x_memory, const float* bias, float* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  constexpr int kLanes = 4, kPacks = 4;
  __shared__ float cells[2][8];
  int turn = 0;
  const Index rows = sizes.outer.value * sizes.middle.value, length = sizes.inner.value;
  const Index first = blockIdx.x * blockDim.y;
  if (first < rows) {
    const bool is_live = first + threadIdx.y < rows;
    const Index row = is_live ? first + threadIdx.y : 0, base = row * length, end = is_live ? length : 0;
    const Index above_middle = divide(row, sizes.middle);
    const Index middle = row - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Pack<float, kLanes> x_in[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (is_here) x_in[p] = load<kLanes>(x + (base + i));
    }
    const float bias_value = widen(bias[middle]);
    Sum<float> sums_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_term_value;
        float total_term_by_value;
        forward_row_stage_1(x_value, bias_value, total_term_value, total_term_by_value);
        sums_1[0].add_if(is_here, total_term_value, total_term_by_value);
      }
    }
    combine<8, false>(sums_1, cells[turn++ & 1]);
    const float total_value = sums_1[0].total;
    if (is_live && threadIdx.x == 0) {
      float out_value;
      forward_row_row_values(total_value, count_of_inner_value, out_value);
      out[(outer) * sizes.middle.value + middle] = narrow<float>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
  Pitch x_pitch;
};

__device__ __forceinline__ void backward_inner_values_once(const float d_out, const float count_of_inner,
    float& d_after_gelu) {
  // backward, down to gelu
  d_after_gelu = d_out / count_of_inner;
}

__device__ __forceinline__ void backward_inner_values(const float d_after_gelu, const float x,
    const float bias, float& d_x, float& total_term) {
  // add_channel(bias)
  const float after_add_channel = x + bias;
  // backward, down to add_channel(bias)
  const float product = after_add_channel * 0.707106769f;
  const float product_2 = d_after_gelu * (after_add_channel * 0.5f) * (1.12837923f * expf(-(product * product)));
  d_x = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  total_term = d_x;
}

// Reads x, d_out by (outer, middle), bias by (middle); leaves partials of total; writes d_x.
__global__ void __launch_bounds__(128)
backward_inner(const float* d_out, const float* x_memory, const float* bias, float* __restrict__ d_x,
    Sum<float>* __restrict__ total_partials, BackwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  wait_for_kernel_before();
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Pitched<const float> x{x_memory, sizes.x_pitch};
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[128 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_middle = divide(row, sizes.middle);
  const Index middle = row - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  const float d_out_value = widen(d_out[(outer) * sizes.middle.value + middle]);
  const float bias_value = widen(bias[middle]);
  float d_after_gelu_value;
  backward_inner_values_once(d_out_value, count_of_inner_value, d_after_gelu_value);
  Sum<float> total_sum;
  const auto take = [&](Index inner, float x_value, float& d_x_stored) {
    float d_x_value;
    float total_term_value;
    backward_inner_values(d_after_gelu_value, x_value, bias_value, d_x_value, total_term_value);
    d_x_stored = narrow<float>(d_x_value);
    total_sum.add(total_term_value);
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
      take(inner, widen(x[i]), d_x[i]);
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      // Added up a turn at a time: a sum that runs through all of them would lose digits.
      const Sum<float> total_mine = total_sum;
      total_sum = Sum<float>();
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
        Pack<float, kLanes> d_x_out;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          take(i + lane - base, widen(x_in[p], lane), d_x_out.at[lane]);
        }
        store(d_x + i, d_x_out);
      }
      total_sum.merge(total_mine);
    }
  }
  merge_tree(total_sum, threadIdx.x, blockDim.x, shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

// Merges partials into total; writes d_bias.
__global__ void __launch_bounds__(512)
backward_finalise(float* __restrict__ d_bias, const Sum<float>* total_partials, BackwardSizes sizes,
    Index slots) {
  wait_for_kernel_before();
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index result = blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_live = result < sizes.middle.value;
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
  const Index middle = result;
  float d_bias_value;
  backward_finalise_values(total_value, d_bias_value);
  d_bias[middle] = narrow<float>(d_bias_value);
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

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, run and gap of x, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]), { size_of(a[7]),
      static_cast<Index>(a[8])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[10]);
  const int device = static_cast<int>(a[9]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length, 16), 256);
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, forward_row_block.y);
  const int64_t forward_row_slots = forward_row_tasks;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 0, stream, x, bias, out,
        sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, bias, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, run and gap of x, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_bias = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  if (!is_measuring && ((a[0] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ size_of(a[6]), size_of(a[7]), size_of(a[8]), { size_of(a[9]),
      static_cast<Index>(a[10])} };
  const auto stream = reinterpret_cast<cudaStream_t>(a[12]);
  const int device = static_cast<int>(a[11]);
  const DeviceGuard guard(device);
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t total_partials_slots = static_cast<int64_t>(sizes.outer.value) * backward_inner_pieces;
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    // A row has a thread for each element at its edges, at least.
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 8, 128));
    const dim3 block(lanes, 128 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
        block.y));
    follow(backward_inner, blocks, block, 0, stream, d_out, x, bias, d_x, total_partials, sizes,
        static_cast<Index>(backward_inner_rows), static_cast<Index>(backward_inner_pieces),
        static_cast<Index>(piece_length));
  }
  {
    // Threads for all slots of a result; where those are few, results beside each other.
    const int64_t results = static_cast<int64_t>(sizes.middle.value), slots = total_partials_slots;
    const auto along = static_cast<unsigned>(power_of_two(slots, 1, 512));
    const dim3 block(along < 32 ? 128 / along : 1, along);
    const auto blocks = static_cast<unsigned>(ceil_divide(results, block.x));
    follow(backward_finalise, blocks, block, 0, stream, d_bias, total_partials, sizes,
        static_cast<Index>(slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
