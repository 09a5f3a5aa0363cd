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

// The largest number; a NaN beats every number, as in torch.
template <typename T>
struct Peak {
  T best = static_cast<T>(-INFINITY);
  __device__ void add(T value) { best = value > best || value != value ? value : best; }
  template <typename U>
  __device__ void merge(const Peak<U>& other) {
    add(other.best);
  }
  __device__ T max() const { return best; }
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
  template <typename U>
  __device__ void merge(const Sum<U>& other) {
    total += other.total;
  }
  __device__ T sum() const { return total; }
};

// Everyone's accumulator merged over the lanes of a row, in a fixed tree; cells of one row lie `stride` apart.
template <typename Accumulator>
__device__ Accumulator merge_tree(const Accumulator& mine, int lane, int lanes, int cell, int stride,
    void* memory) {
  Accumulator* const cells = static_cast<Accumulator*>(memory);
  cells[cell] = mine;
  __syncthreads();
  for (int half = lanes / 2; half > 0; half /= 2) {
    if (lane < half) cells[cell].merge(cells[cell + half * stride]);
    __syncthreads();
  }
  const Accumulator all = cells[cell - lane * stride];
  __syncthreads();
  return all;
}

struct ForwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void forward_inner_values(const float x, float& peak_term) {
  peak_term = x;
}

// Reads x; leaves partials of peak.
__global__ void __launch_bounds__(256)
forward_inner(const float* __restrict__ x, Peak<float>* __restrict__ peak_partials, ForwardSizes sizes,
    Index rows, Index pieces, Index piece_length) {
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index outer = row;
  Peak<float> peak_sum;
  const auto element = [&](Index inner, float x_value) {
    float peak_term_value;
    forward_inner_values(x_value, peak_term_value);
    peak_sum.add(peak_term_value);
  };
  if (is_live) {
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      element(i - base, widen(x[i]));
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
          element(i + lane - base, widen(x_in[p], lane));
        }
      }
    }
  }
  peak_sum = merge_tree(peak_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  if (is_live && threadIdx.x == 0) {
    peak_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = peak_sum;
  }
}

__device__ __forceinline__ void forward_finalise_values(const float peak, float& saved_bound,
    float& peak_scratch) {
  saved_bound = peak;
  peak_scratch = peak;
}

// Merges partials into peak; writes saved_bound, peak_scratch.
__global__ void __launch_bounds__(512)
forward_finalise(float* __restrict__ saved_bound, float* __restrict__ peak_scratch,
    const Peak<float>* __restrict__ peak_partials, ForwardSizes sizes, Index slots) {
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = 1, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  Peak<double> peak_sum;
  if (column < columns) {
#pragma unroll 8
    for (Index slot = threadIdx.y; slot < slots; slot += blockDim.y) {
      peak_sum.merge(peak_partials[(above * slots + slot) * columns + column]);
    }
  }
  peak_sum = merge_tree(peak_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  if (threadIdx.y != 0 || column >= columns) return;
  const float peak_value = static_cast<float>(peak_sum.max());
  const Index result = above * columns + column;
  const Index outer = result;
  float saved_bound_value;
  float peak_scratch_value;
  forward_finalise_values(peak_value, saved_bound_value, peak_scratch_value);
  saved_bound[outer] = narrow<float>(saved_bound_value);
  peak_scratch[outer] = narrow<float>(peak_scratch_value);
}

__device__ __forceinline__ void forward_inner_2_values(const float x, const float peak, float& total_term) {
  total_term = expf(x - (fabsf(peak) == INFINITY ? 0.0f : peak));
}

// Reads x, peak by (outer); leaves partials of total.
__global__ void __launch_bounds__(256)
forward_inner_2(const float* __restrict__ x, const float* __restrict__ peak,
    Sum<float>* __restrict__ total_partials, ForwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index outer = row;
  const float peak_value = widen(peak[outer]);
  Sum<float> total_sum;
  const auto element = [&](Index inner, float x_value) {
    float total_term_value;
    forward_inner_2_values(x_value, peak_value, total_term_value);
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
      element(i - base, widen(x[i]));
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
          element(i + lane - base, widen(x_in[p], lane));
        }
      }
    }
  }
  total_sum = merge_tree(total_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1,
      shared);
  if (is_live && threadIdx.x == 0) {
    total_partials[(outer) * (1 * pieces) + (0) * pieces + piece] = total_sum;
  }
}

__device__ __forceinline__ void forward_finalise_2_values(const float total, const float peak, float& out,
    float& saved_sum) {
  // logsumexp(1)
  const float after_logsumexp = logf(total) + (fabsf(peak) == INFINITY ? 0.0f : peak);
  // gelu
  out = after_logsumexp * 0.5f * (1.0f + erff(after_logsumexp * 0.707106769f));
  saved_sum = total;
}

// Reads peak; merges partials into total; writes out, saved_sum.
__global__ void __launch_bounds__(512)
forward_finalise_2(const float* __restrict__ peak, float* __restrict__ out, float* __restrict__ saved_sum,
    const Sum<float>* __restrict__ total_partials, ForwardSizes sizes, Index slots) {
  __shared__ alignas(16) unsigned char shared[512 * 8];
  const Index columns = 1, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  Sum<double> total_sum;
  if (column < columns) {
#pragma unroll 8
    for (Index slot = threadIdx.y; slot < slots; slot += blockDim.y) {
      total_sum.merge(total_partials[(above * slots + slot) * columns + column]);
    }
  }
  total_sum = merge_tree(total_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  if (threadIdx.y != 0 || column >= columns) return;
  const float total_value = static_cast<float>(total_sum.sum());
  const Index result = above * columns + column;
  const Index outer = result;
  const float peak_value = widen(peak[outer]);
  float out_value;
  float saved_sum_value;
  forward_finalise_2_values(total_value, peak_value, out_value, saved_sum_value);
  out[outer] = narrow<float>(out_value);
  saved_sum[outer] = narrow<float>(saved_sum_value);
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_pointwise_values(const float d_out, const float saved_sum,
    const float saved_bound, const float x, float& d_x) {
  // logsumexp(1)
  const float chosen = fabsf(saved_bound) == INFINITY ? 0.0f : saved_bound;
  const float after_logsumexp = logf(saved_sum) + chosen;
  // backward, down to logsumexp(1)
  const float product = after_logsumexp * 0.707106769f;
  const float product_2 = d_out * (after_logsumexp * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_logsumexp = product_2 * 0.707106769f + d_out * (1.0f + erff(product)) * 0.5f;
  d_x = d_after_logsumexp / saved_sum * expf(x - chosen);
}

// Reads x, d_out by (outer), saved_sum by (outer), saved_bound by (outer); writes d_x.
__global__ void __launch_bounds__(128, 2)
backward_pointwise(const float* __restrict__ d_out, const float* __restrict__ saved_sum,
    const float* __restrict__ saved_bound, const float* __restrict__ x, float* __restrict__ d_x,
    BackwardSizes sizes, Index count) {
  constexpr int kLanes = 4, kPacks = 8;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 128 + threadIdx.x) * kLanes;
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 128 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 128 * kLanes;
    if (i >= count) return;
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    const Index outer = above_inner;
    const bool is_whole = i + kLanes <= count && sizes.inner.value - inner >= kLanes;
    if (is_whole) {
      const float d_out_value = widen(d_out[outer]);
      const float saved_sum_value = widen(saved_sum[outer]);
      const float saved_bound_value = widen(saved_bound[outer]);
      Pack<float, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float d_x_value;
        backward_pointwise_values(d_out_value, saved_sum_value, saved_bound_value, x_value, d_x_value);
        d_x_out.at[lane] = narrow<float>(d_x_value);
      }
      store(d_x + i, d_x_out);
    } else {
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        const Index above_inner = divide(j, sizes.inner);
        const Index outer = above_inner;
        const float d_out_value = widen(d_out[outer]);
        const float saved_sum_value = widen(saved_sum[outer]);
        const float saved_bound_value = widen(saved_bound[outer]);
        const float x_value = widen(x[j]);
        float d_x_value;
        backward_pointwise_values(d_out_value, saved_sum_value, saved_bound_value, x_value, d_x_value);
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
  const int64_t forward_inner_rows = static_cast<int64_t>(sizes.outer.value),
      forward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t forward_inner_pieces = ceil_divide(forward_inner_length, 8192);
  const int64_t peak_partials_slots = 1 * forward_inner_pieces;
  const int64_t forward_inner_2_rows = static_cast<int64_t>(sizes.outer.value),
      forward_inner_2_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t forward_inner_2_pieces = ceil_divide(forward_inner_2_length, 8192);
  const int64_t total_partials_slots = 1 * forward_inner_2_pieces;
  auto* const peak_partials = scratch.take<Peak<float>>(static_cast<int64_t>(sizes.outer.value) * peak_partials_slots);
  auto* const peak_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.outer.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  {
    const int64_t piece_length = ceil_divide(forward_inner_length, forward_inner_pieces);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 32, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(forward_inner_rows * forward_inner_pieces,
        block.y));
    forward_inner<<<blocks, block, 0, stream>>>(x, peak_partials, sizes,
        static_cast<Index>(forward_inner_rows), static_cast<Index>(forward_inner_pieces),
        static_cast<Index>(piece_length));
  }
  {
    const int64_t columns = 1, results = static_cast<int64_t>(sizes.outer.value);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 8));
    const dim3 block(width, 512 / width);
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    forward_finalise<<<blocks, block, 0, stream>>>(saved_bound, peak_scratch, peak_partials, sizes,
        static_cast<Index>(peak_partials_slots));
  }
  {
    const int64_t piece_length = ceil_divide(forward_inner_2_length, forward_inner_2_pieces);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 32, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(forward_inner_2_rows * forward_inner_2_pieces,
        block.y));
    forward_inner_2<<<blocks, block, 0, stream>>>(x, peak_scratch, total_partials, sizes,
        static_cast<Index>(forward_inner_2_rows), static_cast<Index>(forward_inner_2_pieces),
        static_cast<Index>(piece_length));
  }
  {
    const int64_t columns = 1, results = static_cast<int64_t>(sizes.outer.value);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 8));
    const dim3 block(width, 512 / width);
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    forward_finalise_2<<<blocks, block, 0, stream>>>(peak_scratch, out, saved_sum, total_partials, sizes,
        static_cast<Index>(total_partials_slots));
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
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 4096));
    backward_pointwise<<<blocks, 128, 0, stream>>>(d_out, saved_sum, saved_bound, x, d_x, sizes,
        static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
