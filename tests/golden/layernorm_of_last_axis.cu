// fusegen 0.1.0   chain 3ef4da3fd893   signature forward: bias float32, out float32, weight float32, x float32; 32-bit offsets
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

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
