// fusegen 0.1.0   chain 3ef4da3fd893   signature forward+backward: bias float32, d_bias float32, d_out float32, d_weight float32, d_x float32, out float32, weight float32, x float32; 32-bit offsets
//   layernorm(64, weight, bias) | gelu | mul(0.5)
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
  Size outer, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void forward_row_values(const float x, const float mean, const float variance,
    const float weight, const float bias, float& out) {
  // layernorm(64, weight, bias)
  const float after_layernorm = (x - mean) * (rsqrtf(variance + 1e-05f)) * weight + bias;
  // gelu
  const float after_gelu = after_layernorm * 0.5f * (1.0f + erff(after_layernorm * 0.707106769f));
  // mul(0.5)
  out = after_gelu * 0.5f;
}

// Reads x, weight by (inner), bias by (inner); writes out.
__global__ void __launch_bounds__(256)
forward_row(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ out, ForwardSizes sizes) {
  __shared__ alignas(16) unsigned char shared[256 * 12];
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = row < rows;
  const Index outer = row;
  Moments<float> mean_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.x; r < length; r += blockDim.x) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float mean_term_value;
      forward_row_stage_1(x_value, mean_term_value);
      mean_sum.add(mean_term_value);
    }
  }
  mean_sum = combine(mean_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  const float mean_value = mean_sum.mean();
  const float variance_value = mean_sum.variance();
  if (!is_live) return;
#pragma unroll 4
  for (Index r = threadIdx.x; r < length; r += blockDim.x) {
    const Index inner = r;
    const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
    const float weight_value = widen(weight[inner]);
    const float bias_value = widen(bias[inner]);
    float out_value;
    forward_row_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
    out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

__device__ __forceinline__ void backward_row_stage_2(const float d_out, const float x, const float mean,
    const float variance, const float weight, const float bias, float& total_term, float& total_2_term) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float after_layernorm = difference * (rsqrtf(variance + 1e-05f)) * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  total_term = d_after_layernorm * weight * difference;
  total_2_term = d_after_layernorm * weight;
}

__device__ __forceinline__ void backward_row_values(const float x, const float mean, const float total,
    const float variance, const float count_of_inner, const float d_out, const float weight,
    const float bias, const float total_2, float& d_x) {
  // layernorm(64, weight, bias)
  const float difference = x - mean;
  const float inverse_root = rsqrtf(variance + 1e-05f);
  const float after_layernorm = difference * inverse_root * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product = after_layernorm * 0.707106769f;
  const float product_2 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product * product)));
  const float d_after_layernorm = product_2 * 0.707106769f + d_after_gelu * (1.0f + erff(product)) * 0.5f;
  const float product_3 = 2.0f * (-0.5f * total * (inverse_root * inverse_root * inverse_root));
  const float sum = difference * (product_3 / count_of_inner) + d_after_layernorm * weight * inverse_root;
  d_x = sum - total_2 * inverse_root / count_of_inner;
}

__device__ __forceinline__ void backward_row_row_values(const float mean, const float variance,
    float& mean_scratch, float& variance_scratch) {
  mean_scratch = mean;
  variance_scratch = variance;
}

// Reads x, d_out, weight by (inner), bias by (inner); writes d_x, mean_scratch, variance_scratch.
__global__ void __launch_bounds__(256)
backward_row(const float* __restrict__ x, const float* __restrict__ d_out, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ d_x, float* __restrict__ mean_scratch,
    float* __restrict__ variance_scratch, BackwardSizes sizes) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  __shared__ alignas(16) unsigned char shared[256 * 12];
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = row < rows;
  const Index outer = row;
  Moments<float> mean_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.x; r < length; r += blockDim.x) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float mean_term_value;
      backward_row_stage_1(x_value, mean_term_value);
      mean_sum.add(mean_term_value);
    }
  }
  mean_sum = combine(mean_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  const float mean_value = mean_sum.mean();
  const float variance_value = mean_sum.variance();
  Sum<float> total_sum;
  Sum<float> total_2_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.x; r < length; r += blockDim.x) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float weight_value = widen(weight[inner]);
      const float bias_value = widen(bias[inner]);
      float total_term_value;
      float total_2_term_value;
      backward_row_stage_2(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
          total_term_value, total_2_term_value);
      total_sum.add(total_term_value);
      total_2_sum.add(total_2_term_value);
    }
  }
  total_sum = combine(total_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  total_2_sum = combine(total_2_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1,
      shared);
  const float total_value = total_sum.sum();
  const float total_2_value = total_2_sum.sum();
  if (!is_live) return;
#pragma unroll 4
  for (Index r = threadIdx.x; r < length; r += blockDim.x) {
    const Index inner = r;
    const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
    const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
    const float weight_value = widen(weight[inner]);
    const float bias_value = widen(bias[inner]);
    float d_x_value;
    backward_row_values(x_value, mean_value, total_value, variance_value, count_of_inner_value, d_out_value,
        weight_value, bias_value, total_2_value, d_x_value);
    d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
  }
  if (threadIdx.x == 0) {
    float mean_scratch_value;
    float variance_scratch_value;
    backward_row_row_values(mean_value, variance_value, mean_scratch_value, variance_scratch_value);
    mean_scratch[outer] = narrow<float>(mean_scratch_value);
    variance_scratch[outer] = narrow<float>(variance_scratch_value);
  }
}

__device__ __forceinline__ void backward_outer_values(const float d_out, const float x, const float mean,
    const float variance, const float weight, const float bias, float& total_3_term, float& total_4_term) {
  // layernorm(64, weight, bias)
  const float product = (x - mean) * (rsqrtf(variance + 1e-05f));
  const float after_layernorm = product * weight + bias;
  // backward, down to gelu
  const float d_after_gelu = d_out * 0.5f;
  // backward, down to layernorm(64, weight, bias)
  const float product_2 = after_layernorm * 0.707106769f;
  const float product_3 = d_after_gelu * (after_layernorm * 0.5f) * (1.12837923f * expf(-(product_2 * product_2)));
  const float d_after_layernorm = product_3 * 0.707106769f + d_after_gelu * (1.0f + erff(product_2)) * 0.5f;
  total_3_term = d_after_layernorm * product;
  total_4_term = d_after_layernorm;
}

// Reads d_out, x, mean by (outer), variance by (outer), weight by (inner), bias by (inner); leaves partials of total_3, total_4.
__global__ void __launch_bounds__(256)
backward_outer(const float* __restrict__ d_out, const float* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ variance, const float* __restrict__ weight, const float* __restrict__ bias,
    Sum<float>* __restrict__ total_3_partials, Sum<float>* __restrict__ total_4_partials,
    BackwardSizes sizes, Index slots) {
  __shared__ alignas(16) unsigned char shared[256 * 4];
  const Index rows = sizes.outer.value, columns = sizes.inner.value;
  const Index strips = (columns + blockDim.x - 1) / blockDim.x;
  const Index task = blockIdx.x / strips;  // (kept, slot)
  const Index inner = blockIdx.x % strips * blockDim.x + threadIdx.x;
  const Index slot = task;
  Sum<float> total_3_sum;
  Sum<float> total_4_sum;
  if (inner < columns) {
    const Index share = (rows + slots - 1) / slots;
    const Index end = min(rows, (slot + 1) * share);
#pragma unroll 4
    for (Index row = slot * share + threadIdx.y; row < end; row += blockDim.y) {
      const Index outer = row;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float mean_value = widen(mean[outer]);
      const float variance_value = widen(variance[outer]);
      const float weight_value = widen(weight[inner]);
      const float bias_value = widen(bias[inner]);
      float total_3_term_value;
      float total_4_term_value;
      backward_outer_values(d_out_value, x_value, mean_value, variance_value, weight_value, bias_value,
          total_3_term_value, total_4_term_value);
      total_3_sum.add(total_3_term_value);
      total_4_sum.add(total_4_term_value);
    }
  }
  total_3_sum = combine(total_3_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  total_4_sum = combine(total_4_sum, threadIdx.y, blockDim.y, threadIdx.y * blockDim.x + threadIdx.x,
      blockDim.x, shared);
  if (threadIdx.y == 0 && inner < columns) {
    total_3_partials[task * columns + inner] = total_3_sum;
    total_4_partials[task * columns + inner] = total_4_sum;
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
  const Index columns = sizes.inner.value, strips = (columns + blockDim.x - 1) / blockDim.x;
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
  const Index inner = result;
  float d_weight_value;
  float d_bias_value;
  backward_finalise_values(total_3_value, total_4_value, d_weight_value, d_bias_value);
  d_weight[inner] = narrow<float>(d_weight_value);
  d_bias[inner] = narrow<float>(d_bias_value);
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

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[7]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value),
        length = static_cast<int64_t>(sizes.inner.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, block.y));
    forward_row<<<blocks, block, 0, stream>>>(x, weight, bias, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, weight, bias, d_out, d_x, d_weight, d_bias, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const d_out = reinterpret_cast<const float*>(a[3]);
  auto* const d_x = reinterpret_cast<float*>(a[4]);
  auto* const d_weight = reinterpret_cast<float*>(a[5]);
  auto* const d_bias = reinterpret_cast<float*>(a[6]);
  const bool is_measuring = a[7] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[7])};
  const BackwardSizes sizes{ size_of(a[8]), size_of(a[9]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[11]);
  const int64_t backward_outer_strips = ceil_divide(static_cast<int64_t>(sizes.inner.value), 32),
      backward_outer_kept = 1;
  const int64_t backward_outer_most = ceil_divide(static_cast<int64_t>(sizes.outer.value), 64);
  const int64_t backward_outer_wanted = ceil_divide(4096, backward_outer_strips * backward_outer_kept);
  const int64_t backward_outer_slots = backward_outer_wanted < backward_outer_most ? backward_outer_wanted : backward_outer_most;
  const int64_t total_3_partials_slots = backward_outer_slots;
  const int64_t total_4_partials_slots = backward_outer_slots;
  auto* const mean_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const variance_scratch = scratch.take<float>(static_cast<int64_t>(sizes.outer.value));
  auto* const total_3_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_3_partials_slots);
  auto* const total_4_partials = scratch.take<Sum<float>>(static_cast<int64_t>(sizes.inner.value) * total_4_partials_slots);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[10]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value),
        length = static_cast<int64_t>(sizes.inner.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, block.y));
    backward_row<<<blocks, block, 0, stream>>>(x, d_out, weight, bias, d_x, mean_scratch, variance_scratch,
        sizes);
  }
  {
    const dim3 block(32, 8);
    const auto blocks = static_cast<unsigned>(backward_outer_kept * backward_outer_slots * backward_outer_strips);
    backward_outer<<<blocks, block, 0, stream>>>(d_out, x, mean_scratch, variance_scratch, weight, bias,
        total_3_partials, total_4_partials, sizes, static_cast<Index>(backward_outer_slots));
  }
  {
    const int64_t columns = static_cast<int64_t>(sizes.inner.value),
        results = static_cast<int64_t>(sizes.inner.value);
    const auto width = static_cast<unsigned>(power_of_two(columns, 1, 32));
    const dim3 block(width, 256 / width);
    const auto blocks = static_cast<unsigned>(results / columns * ceil_divide(columns, width));
    backward_finalise<<<blocks, block, 0, stream>>>(d_weight, d_bias, total_3_partials, total_4_partials,
        sizes, static_cast<Index>(total_3_partials_slots));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
