// fusegen 0.1.0   chain 9ce7cf08a2eb   signature forward: bias float32, out float32, x float32; 32-bit offsets
//   gelu | softmax(1) | add_channel(bias)
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

// A pack on its way into shared memory, where the thread that sent it will read it.
template <int N, typename T>
__device__ __forceinline__ void send(Pack<T, N>* to, const T* from) {
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(T) * N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(from), "n"(sizeof(T) * N) : "memory");
  }
}

__device__ __forceinline__ void send_off() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than so many of the latest are on their way.
template <int N>
__device__ __forceinline__ void wait_for_sent() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

struct ForwardSizes {
  Size outer, middle, inner;
};

__device__ __forceinline__ void forward_column_stage_1(const float x, float& peak_term,
    float& carried_after_gelu) {
  // gelu
  const float series = polynomial(fabsf(x), -1.0f, -1.15110552f, -0.459209114f, -0.0524738058f,
      0.00698745623f, -2.51266702e-05f, -0.000272270845f, 7.59166942e-05f, -1.1191165e-05f, 9.13259044e-07f,
      -3.24377396e-08f);
  const float power = exp2_flushed(series);
  peak_term = x * (x < 0.0f ? power : 1.0f - power);
  carried_after_gelu = peak_term;
}

__device__ __forceinline__ void forward_column_stage_2(const float carried_after_gelu, const float peak,
    float& total_term, float& carried) {
  total_term = expf(carried_after_gelu - peak);
  carried = total_term;
}

__device__ __forceinline__ void forward_column_values_once(const float total, float& chosen, float& inverse) {
  const float abs_value = fabsf(total);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total * chosen);
}

__device__ __forceinline__ void forward_column_values(const float carried, const float inverse,
    const float chosen, const float bias, float& out) {
  // softmax(1)
  const float after_softmax = carried * inverse * chosen;
  // add_channel(bias)
  out = after_softmax + bias;
}

// Reads x, bias by (middle); writes out.
__global__ void __launch_bounds__(256, 2)
forward_column(const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ out,
    ForwardSizes sizes, Size across, Index tiles) {
  constexpr int kLanes = 4, kPacks = 8;
  __shared__ float cells[1024], totals[64];
  const Index length = sizes.middle.value, behind = sizes.inner.value;
  // Rows lie beside each other in packs, of which across.value have all before the axis in common.
  const Index packs = sizes.outer.value * across.value;
  // So many threads have all of a row, as many packs each.
  const Index along = length / kPacks, y = min(threadIdx.y, along - 1), step = along * behind;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<float, kLanes>*>(room + 0) + thread;
  const auto send_tile = [&](Index tile) {
    if (tile >= tiles) return send_off();
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      if (is_here) send(&x_next[p * 256], x + (base + p * step));
    }
    send_off();
  };
  send_tile(blockIdx.x);
  for (Index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Index place = tile * blockDim.x + threadIdx.x, pack = min(place, packs - 1);
    const Index above = divide(pack, across), beside = (pack - above * across.value) * kLanes;
    const bool is_beside = place < packs;
    [[maybe_unused]] const bool is_here = is_beside && threadIdx.y < along;
    const Index base = above * length * behind + y * behind + beside;
    Pack<float, kLanes> x_in[kPacks];
    wait_for_sent<0>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[p * 256];
    }
    send_tile(tile + gridDim.x);
    Peak<float> peaks_1[1][kLanes];
    float carried_after_gelu[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        float carried_after_gelu_value;
        forward_column_stage_1(x_value, peak_term_value, carried_after_gelu_value);
        peaks_1[0][lane].add(peak_term_value);
        carried_after_gelu[p][lane] = carried_after_gelu_value;
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) peaks_1[0][lane] = {};
    }
    combine_across(peaks_1, cells, totals);
    Sum<float> sums_2[1][kLanes];
    float carried[kPacks][kLanes];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float peak_value = peaks_1[0][lane].best;
        const float carried_after_gelu_value = carried_after_gelu[p][lane];
        float total_term_value;
        float carried_value;
        forward_column_stage_2(carried_after_gelu_value, peak_value, total_term_value, carried_value);
        sums_2[0][lane].add(total_term_value);
        carried[p][lane] = carried_value;
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_here) sums_2[0][lane] = {};
    }
    combine_across(sums_2, cells, totals);
    float chosen_beside[kLanes];
    float inverse_beside[kLanes];
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const float total_value = sums_2[0][lane].total;
      float chosen_value;
      float inverse_value;
      forward_column_values_once(total_value, chosen_value, inverse_value);
      chosen_beside[lane] = chosen_value;
      inverse_beside[lane] = inverse_value;
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      [[maybe_unused]] const Index i = p * along + y;
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Index middle = i;
        const float carried_value = carried[p][lane];
        const float bias_value = widen(bias[middle]);
        float out_value;
        const float chosen_value = chosen_beside[lane];
        const float inverse_value = inverse_beside[lane];
        forward_column_values(carried_value, inverse_value, chosen_value, bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      if (is_here) store(out + (base + p * step), out_out);
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

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ size_of(a[4]), size_of(a[5]), size_of(a[6]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[8]);
  const int device = static_cast<int>(a[7]);
  const DeviceGuard guard(device);
  const int64_t forward_column_across = static_cast<int64_t>(sizes.inner.value) / 4,
      forward_column_packs = static_cast<int64_t>(sizes.outer.value) * forward_column_across;
  const dim3 forward_column_block = column_block(forward_column_packs,
      ceil_divide(static_cast<int64_t>(sizes.middle.value), 8), 16, 256);
  const int64_t forward_column_tiles = ceil_divide(forward_column_packs, forward_column_block.x),
      forward_column_tasks = forward_column_tiles;
  const int64_t forward_column_resident = resident_blocks(forward_column, forward_column_block, 32768, 32768,
      device);
  const int64_t forward_column_slots = forward_column_tasks < forward_column_resident ? forward_column_tasks : forward_column_resident;
  if (is_measuring) return scratch.used;
  {
    forward_column<<<static_cast<unsigned>(forward_column_slots), forward_column_block, 32768, stream>>>(x,
        bias, out, sizes, size_of(forward_column_across), static_cast<Index>(forward_column_tiles));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
