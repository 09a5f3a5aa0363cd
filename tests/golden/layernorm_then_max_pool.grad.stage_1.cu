// fusegen 0.1.0   chain b1d23cb647a0   signature forward+backward: d_out float32, d_x float32, out float32, x float32; 32-bit offsets
//   layernorm
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
    float& out) {
  // layernorm
  out = (x - mean) * (rsqrtf(variance + 1e-05f));
}

// Reads x; writes out.
__global__ void __launch_bounds__(256)
forward_row(const float* __restrict__ x, float* __restrict__ out, ForwardSizes sizes) {
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
    float out_value;
    forward_row_values(x_value, mean_value, variance_value, out_value);
    out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_row_stage_1(const float d_out, const float x, float& total_term,
    float& mean_term) {
  total_term = d_out;
  mean_term = x;
}

__device__ __forceinline__ void backward_row_stage_2(const float d_out, const float x, const float mean,
    float& total_2_term) {
  total_2_term = d_out * (x - mean);
}

__device__ __forceinline__ void backward_row_values(const float x, const float mean, const float total_2,
    const float variance, const float count_of_inner, const float d_out, const float total, float& d_x) {
  const float inverse_root = rsqrtf(variance + 1e-05f);
  const float product = 2.0f * (-0.5f * total_2 * (inverse_root * inverse_root * inverse_root));
  d_x = (x - mean) * (product / count_of_inner) + d_out * inverse_root - total * inverse_root / count_of_inner;
}

// Reads d_out, x; writes d_x.
__global__ void __launch_bounds__(256)
backward_row(const float* __restrict__ d_out, const float* __restrict__ x, float* __restrict__ d_x,
    BackwardSizes sizes) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  __shared__ alignas(16) unsigned char shared[256 * 12];
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index row = static_cast<Index>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_live = row < rows;
  const Index outer = row;
  Sum<float> total_sum;
  Moments<float> mean_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.x; r < length; r += blockDim.x) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float total_term_value;
      float mean_term_value;
      backward_row_stage_1(d_out_value, x_value, total_term_value, mean_term_value);
      total_sum.add(total_term_value);
      mean_sum.add(mean_term_value);
    }
  }
  total_sum = combine(total_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  mean_sum = combine(mean_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1, shared);
  const float total_value = total_sum.sum();
  const float mean_value = mean_sum.mean();
  const float variance_value = mean_sum.variance();
  Sum<float> total_2_sum;
  if (is_live) {
#pragma unroll 4
    for (Index r = threadIdx.x; r < length; r += blockDim.x) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float total_2_term_value;
      backward_row_stage_2(d_out_value, x_value, mean_value, total_2_term_value);
      total_2_sum.add(total_2_term_value);
    }
  }
  total_2_sum = combine(total_2_sum, threadIdx.x, blockDim.x, threadIdx.y * blockDim.x + threadIdx.x, 1,
      shared);
  const float total_2_value = total_2_sum.sum();
  if (!is_live) return;
#pragma unroll 4
  for (Index r = threadIdx.x; r < length; r += blockDim.x) {
    const Index inner = r;
    const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
    const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
    float d_x_value;
    backward_row_values(x_value, mean_value, total_2_value, variance_value, count_of_inner_value,
        d_out_value, total_value, d_x_value);
    d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
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

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]), size_of(a[4]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[6]);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[5]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value),
        length = static_cast<int64_t>(sizes.inner.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, block.y));
    forward_row<<<blocks, block, 0, stream>>>(x, out, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: x, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  if (is_measuring) return scratch.used;
  const DeviceGuard guard(static_cast<int>(a[6]));
  {
    const int64_t rows = static_cast<int64_t>(sizes.outer.value),
        length = static_cast<int64_t>(sizes.inner.value);
    const auto lanes = static_cast<unsigned>(power_of_two(ceil_divide(length, 4), 1, 256));
    const dim3 block(lanes, 256 / lanes);
    const auto blocks = static_cast<unsigned>(ceil_divide(rows, block.y));
    backward_row<<<blocks, block, 0, stream>>>(d_out, x, d_x, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
