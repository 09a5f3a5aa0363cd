// fusegen 0.1.0   chain 4b84aacee5b2   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, weight float32, x float32; 32-bit offsets
//   layernorm(weight, bias, axis=1)
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

// N neighbours, moved by one access that leaves no trace in the caches: every element is used once.
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

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  Pack<T, N> pack;
  *reinterpret_cast<Whole*>(&pack) = __ldcs(reinterpret_cast<const Whole*>(from));
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  __stcs(reinterpret_cast<Whole*>(to), *reinterpret_cast<const Whole*>(&pack));
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

// Count, mean and the sum of squared distances from it: Welford's way, merged by Chan's formula.
template <typename T>
struct Moments {
  T count = 0, centre = 0, distances = 0;
  __device__ void add(T term) {
    count += 1;
    const T gap = term - centre;
    centre += gap / count;
    distances += gap * (term - centre);
  }
  template <typename U>
  __device__ void merge(const Moments<U>& other) {
    if (other.count == 0) return;
    const T all = count + other.count, gap = other.centre - centre, share = other.count / all;
    centre += gap * share;
    distances += other.distances + gap * gap * (count * share);
    count = all;
  }
  __device__ T mean() const { return centre; }
  __device__ T variance() const { return distances / count; }
};

// Everyone's accumulator merged over the lanes of a row, in a fixed tree; cells of one row lie `stride` apart.
template <typename Accumulator>
__device__ Accumulator combine(const Accumulator& mine, int lane, int lanes, int cell, int stride,
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
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_column_values(const float x, const float mean, const float variance,
    const float weight, const float bias, float& out) {
  // layernorm(weight, bias, axis=1)
  out = (x - mean) * (rsqrtf(variance + 1e-05f)) * weight + bias;
}

// Reads x, weight by (middle), bias by (middle); writes out.
__global__ void __launch_bounds__(256)
forward_column(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ out, ForwardSizes sizes) {
  __shared__ alignas(16) unsigned char shared[256 * 12];
  const Index rows = sizes.outer.value * sizes.inner.value, length = sizes.middle.value;
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool is_live = row < rows;
  const Index above_inner = divide(row, sizes.inner);
  const Index inner = row - above_inner * sizes.inner.value;
  const Index outer = above_inner;
  Moments<float> mean_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.y; r < length; r += blockDim.y) {
      const Index middle = r;
      const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      float mean_term_value;
      forward_column_stage_1(x_value, mean_term_value);
      mean_sum.add(mean_term_value);
    }
  }
  mean_sum = combine(mean_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x,
      shared);
  const float mean_value = mean_sum.mean();
  const float variance_value = mean_sum.variance();
  if (!is_live) return;
#pragma unroll 4
  for (Index r = threadIdx.y; r < length; r += blockDim.y) {
    const Index middle = r;
    const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
    const float weight_value = widen(weight[middle]);
    const float bias_value = widen(bias[middle]);
    float out_value;
    forward_column_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
    out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(out_value);
  }
}

struct BackwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void backward_column_stage_1(const float d_out, const float weight, const float x,
    float& total_term, float& mean_term) {
  total_term = d_out * weight;
  mean_term = x;
}

__device__ __forceinline__ void backward_column_stage_2(const float d_out, const float weight, const float x,
    const float mean, float& total_2_term) {
  total_2_term = d_out * weight * (x - mean);
}

__device__ __forceinline__ void backward_column_values(const float x, const float mean, const float total_2,
    const float variance, const float count_of_middle, const float d_out, const float weight,
    const float total, float& d_x) {
  const float inverse_root = rsqrtf(variance + 1e-05f);
  const float product = 2.0f * (-0.5f * total_2 * (inverse_root * inverse_root * inverse_root));
  const float sum = (x - mean) * (product / count_of_middle) + d_out * weight * inverse_root;
  d_x = sum - total * inverse_root / count_of_middle;
}

__device__ __forceinline__ void backward_column_row_values(const float mean, const float variance,
    float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

// Reads d_out, x, weight by (middle); writes d_x, mean_scratch, variance_scratch.
__global__ void __launch_bounds__(256)
backward_column(const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ x, float* __restrict__ d_x, float* __restrict__ mean_scratch,
    float* __restrict__ variance_scratch, BackwardSizes sizes) {
  const float count_of_middle_value = static_cast<float>(sizes.middle.value);
  __shared__ alignas(16) unsigned char shared[256 * 12];
  const Index rows = sizes.outer.value * sizes.inner.value, length = sizes.middle.value;
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool is_live = row < rows;
  const Index above_inner = divide(row, sizes.inner);
  const Index inner = row - above_inner * sizes.inner.value;
  const Index outer = above_inner;
  Sum<float> total_sum;
  Moments<float> mean_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.y; r < length; r += blockDim.y) {
      const Index middle = r;
      const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      const float weight_value = widen(weight[middle]);
      const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      float total_term_value;
      float mean_term_value;
      backward_column_stage_1(d_out_value, weight_value, x_value, total_term_value, mean_term_value);
      total_sum.add(total_term_value);
      mean_sum.add(mean_term_value);
    }
  }
  total_sum = combine(total_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x,
      shared);
  mean_sum = combine(mean_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x,
      shared);
  const float total_value = total_sum.sum();
  const float mean_value = mean_sum.mean();
  const float variance_value = mean_sum.variance();
  Sum<float> total_2_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.y; r < length; r += blockDim.y) {
      const Index middle = r;
      const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      const float weight_value = widen(weight[middle]);
      const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
      float total_2_term_value;
      backward_column_stage_2(d_out_value, weight_value, x_value, mean_value, total_2_term_value);
      total_2_sum.add(total_2_term_value);
    }
  }
  total_2_sum = combine(total_2_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  const float total_2_value = total_2_sum.sum();
  if (!is_live) return;
#pragma unroll 4
  for (Index r = threadIdx.y; r < length; r += blockDim.y) {
    const Index middle = r;
    const float d_out_value = widen(d_out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
    const float weight_value = widen(weight[middle]);
    const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
    float d_x_value;
    backward_column_values(x_value, mean_value, total_2_value, variance_value, count_of_middle_value,
        d_out_value, weight_value, total_value, d_x_value);
    d_x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(d_x_value);
  }
  if (threadIdx.y == 0) {
    float mean_scratch_value;
    float variance_scratch_value;
    backward_column_row_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
    mean_scratch[(outer) * sizes.inner.value + inner] = narrow<float>(mean_scratch_value);
    variance_scratch[(outer) * sizes.inner.value + inner] = narrow<float>(variance_scratch_value);
  }
}

__device__ __forceinline__ void backward_inner_values(const float d_out, const float x, const float mean,
    const float variance, float& total_3_term, float& total_4_term) {
  total_3_term = d_out * ((x - mean) * (rsqrtf(variance + 1e-05f)));
  total_4_term = d_out;
}

// Reads d_out, x, mean by (outer, inner), variance by (outer, inner); leaves partials of total_3, total_4.
__global__ void __launch_bounds__(256)
backward_inner(const float* __restrict__ d_out, const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, Sum<float>* __restrict__ total_3_partials,
    Sum<float>* __restrict__ total_4_partials, BackwardSizes sizes, Index rows, Index pieces,
    Index piece_length) {
  constexpr int kLanes = 4, kPacks = 2;
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index task = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = task < rows * pieces;
  const Index row = is_live ? task / pieces : 0, piece = is_live ? task % pieces : 0;
  const Index above_middle = divide(row, sizes.middle);
  const Index middle = row - above_middle * sizes.middle.value;
  const Index outer = above_middle;
  Sum<float> total_3_sum;
  Sum<float> total_4_sum;
  const auto element = [&](Index inner, float d_out_value, float x_value) {
    const float mean_value = widen(mean[(outer) * sizes.inner.value + inner]);
    const float variance_value = widen(variance[(outer) * sizes.inner.value + inner]);
    float total_3_term_value;
    float total_4_term_value;
    backward_inner_values(d_out_value, x_value, mean_value, variance_value, total_3_term_value,
        total_4_term_value);
    total_3_sum.add(total_3_term_value);
    total_4_sum.add(total_4_term_value);
  };
  if (is_live) {
    const Index length = sizes.inner.value, base = row * length;
    const Index begin = base + piece * piece_length, end = min(begin + piece_length, base + length);
    // Packs start at multiples of their size; what stands before and behind them goes one by one.
    const Index head = min(end, (begin + kLanes - 1) / kLanes * kLanes);
    const Index packs = (end - head) / kLanes, tail = head + packs * kLanes;
    if (threadIdx.x < (head - begin) + (end - tail)) {
      const Index i = threadIdx.x < head - begin ? begin + threadIdx.x : tail + threadIdx.x - (head - begin);
      element(i - base, widen(d_out[i]), widen(x[i]));
    }
    for (Index from = threadIdx.x; from < packs; from += blockDim.x * kPacks) {
      Pack<float, kLanes> d_out_in[kPacks];
      Pack<float, kLanes> x_in[kPacks];
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
          element(i + lane - base, widen(d_out_in[p], lane), widen(x_in[p], lane));
        }
      }
    }
  }
  total_3_sum = combine(total_3_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1,
      shared);
  total_4_sum = combine(total_4_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1,
      shared);
  if (is_live && threadIdx.x == 0) {
    total_3_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_3_sum;
    total_4_partials[(middle) * (sizes.outer.value * pieces) + (outer) * pieces + piece] = total_4_sum;
  }
}

__device__ __forceinline__ void backward_finalise_values(const float total_3, const float total_4,
    float& d_weight, float& d_bias) {
  d_weight = total_3;
  d_bias = total_4;
}

// Merges partials into total_3, total_4; writes d_weight, d_bias.
__global__ void __launch_bounds__(256)
backward_finalise(float* __restrict__ d_weight, float* __restrict__ d_bias,
    const Sum<float>* __restrict__ total_3_partials, const Sum<float>* __restrict__ total_4_partials,
    BackwardSizes sizes, Index slots) {
  __shared__ alignas(16) unsigned char shared[256 * 8];
  const Index columns = 1, strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index above = blockIdx.x / strips, column = blockIdx.x % strips * blockDim.x + threadIdx.x;
  Sum<double> total_3_sum;
  Sum<double> total_4_sum;
  if (column < columns) {
    for (Index slot = threadIdx.y; slot < slots; slot += blockDim.y) {
      total_3_sum.merge(total_3_partials[(above * slots + slot) * columns + column]);
      total_4_sum.merge(total_4_partials[(above * slots + slot) * columns + column]);
    }
  }
  total_3_sum = combine(total_3_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  total_4_sum = combine(total_4_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  if (threadIdx.y != 0 || column >= columns) return;
  const float total_3_value = static_cast<float>(total_3_sum.sum());
  const float total_4_value = static_cast<float>(total_4_sum.sum());
  const Index result = above * columns + column;
  const Index middle = result;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
  d_weight[middle] = narrow<float>(d_weight_value);
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

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[8]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value),
        length = static_cast<int64_t>(sizes.middle.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 8));
    const dim3 block(32, lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, 32));
    forward_column<<<blocks, block, 0, stream>>>(x, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_weight = reinterpret_cast<float*>(a[4]);
  auto* const d_bias = reinterpret_cast<float*>(a[5]);
  const bool is_measuring = a[6] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[6])};
  const BackwardSizes sizes{ size_of(a[7]), size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int64_t backward_inner_rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value), backward_inner_length = static_cast<int64_t>(sizes.inner.value);
  const int64_t backward_inner_pieces = ceil_divide(backward_inner_length, 8192);
  const int64_t total_3_partials_slots = static_cast<int64_t>(sizes.outer.value) * backward_inner_pieces;
  const int64_t total_4_partials_slots = static_cast<int64_t>(sizes.outer.value) * backward_inner_pieces;
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value));
  auto* const total_3_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.middle.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[10]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.inner.value),
        length = static_cast<int64_t>(sizes.middle.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 8));
    const dim3 block(32, lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, 32));
    backward_column<<<blocks, block, 0, stream>>>(d_out, weight, x, d_x, mean_scratch, variance_scratch,
        sizes);
  }
  {
    const int64_t piece_length = ceil_divide(backward_inner_length, backward_inner_pieces);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(piece_length, 8), 32, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(backward_inner_rows * backward_inner_pieces,
        block.y));
    backward_inner<<<blocks, block, 0, stream>>>(d_out, x, mean_scratch, variance_scratch, total_3_partials,
        total_4_partials, sizes, static_cast<Index>(backward_inner_rows),
        static_cast<Index>(backward_inner_pieces), static_cast<Index>(piece_length));
  }
  {
    const int64_t columns = 1, results = static_cast<int64_t>(sizes.middle.value);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 32));
    const dim3 block(width, 256 / width);
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    backward_finalise<<<blocks, block, 0, stream>>>(d_weight, d_bias, total_3_partials, total_4_partials,
        sizes, static_cast<Index>(total_3_partials_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
