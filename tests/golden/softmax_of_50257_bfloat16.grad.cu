// fusegen 0.1.0   chain b603b08cb04f   signature forward+backward: d_out bfloat16, d_x bfloat16, out bfloat16, x bfloat16; 32-bit offsets
//   softmax(-1)
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

// The upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

[[maybe_unused]] __device__ __forceinline__ float widen(bfloat16 x) {
#if __CUDA_ARCH__ >= 900
  float wide;
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  return __uint_as_float(uint32_t{x.bits} << 16);
#endif
}

template <>
[[maybe_unused]] __device__ __forceinline__ bfloat16 narrow<bfloat16, float>(float x) {
#if __CUDA_ARCH__ >= 800
  bfloat16 stored;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(x));
  return stored;
#else
  // To nearest, ties to even; NaN is all ones but for the sign.
  const uint32_t bits = __float_as_uint(x);
  return {static_cast<uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
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
// Out of pairs, by one instruction each; to take the upper half alone first would be another.
template <int N>
__device__ __forceinline__ float widen(const Pack<bfloat16, N>& pack, int lane) {
  if constexpr (N == 1) {
    return widen(pack.at[lane]);
  } else {
    const unsigned int pair = reinterpret_cast<const unsigned int*>(pack.at)[lane / 2];
    return __uint_as_float(lane % 2 ? pair & 0xffff0000u : pair << 16);
  }
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

// Neighbours that lie anywhere, one by one.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_singly(const T* from) {
  Pack<T, N> pack;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) pack.at[lane] = from[lane];
  return pack;
}

// The pack in which an element lies, on its way; from behind the last whole pack of a tensor, that element alone.
template <int N, typename T, typename Tensor>
__device__ __forceinline__ void send_around(Pack<T, N>* to, Tensor tensor, Index at, Index count) {
  const Index from = at / N * N;
  if (from + N <= count) send(to, tensor + from);
  else to->at[at - from] = tensor[at];
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
  Size outer, inner;
};

__device__ __forceinline__ void forward_row_stage_1(const float x, float& peak_term) {
  peak_term = x;
}

__device__ __forceinline__ void forward_row_stage_2(const float x, const float peak, float& total_term,
    float& total_term_by) {
  total_term = exp2_flushed((x - peak) * 0.721347511f);
  total_term_by = total_term;
}

__device__ __forceinline__ void forward_row_values_once(const float total, float& chosen, float& inverse) {
  const float abs_value = fabsf(total);
  chosen = abs_value < 7.88860905e-31f ? 1.84467441e+19f : (abs_value > 1.2676506e+30f ? 5.42101086e-20f : 1.0f);
  inverse = 1.0f / (total * chosen);
}

__device__ __forceinline__ void forward_row_values(const float x, const float peak, const float inverse,
    const float chosen, float& out) {
  // softmax(-1)
  const float power = exp2_flushed((x - peak) * 0.721347511f);
  out = power * power * inverse * chosen;
}

// Reads x; writes out.
__global__ void __launch_bounds__(1024, 1)
forward_row(const bfloat16* x, bfloat16* __restrict__ out, ForwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 8;
  __shared__ float cells[2][32];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // Packs begin at multiples of their size in memory: `head` elements behind the start of each of this block's rows, which
  // are multiples of kLanes apart. What stands before the first pack and behind the last is taken one by one.
  const Index head = (kLanes - blockIdx.x % kLanes * length % kLanes) % kLanes,
      whole = (length - head) / kLanes * kLanes;
  const Index edge = threadIdx.x < head ? threadIdx.x : whole + threadIdx.x;
  const bool is_edge = threadIdx.x < length - whole;
  const int edge_lane = (threadIdx.x + kLanes - head) % kLanes;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const x_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  auto* const x_edge_next = reinterpret_cast<Pack<bfloat16,
      kLanes>*>(room + 8192) + threadIdx.y * 2 * kLanes + threadIdx.x;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x / kLanes * kLanes * blockDim.y + blockIdx.x % kLanes;
  const auto send_row = [&](Index first) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0, base = row * length + head,
        end = is_live ? whole : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&x_next[p * 1024], x + (base + i));
    }
    if (is_edge && is_live) send_around(x_edge_next, x, row * length + edge, rows * length);
    send_off();
  };
  send_row(first);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0, base = row * length + head,
        end = is_live ? whole : 0;
    Pack<bfloat16, kLanes> x_in[kPacks];
    wait_for_sent<0>();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      x_in[p] = x_next[p * 1024];
    }
    bfloat16 x_edge = {};
    if (is_edge) x_edge = (x_edge_next)->at[edge_lane];
    send_row(first + stride);
    Peak<float> peaks_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float peak_term_value;
        forward_row_stage_1(x_value, peak_term_value);
        peaks_1[0].add_if(is_here, peak_term_value);
      }
    }
    if (is_edge) {
      const bool is_here = is_live;
      const float x_value = widen(x_edge);
      float peak_term_value;
      forward_row_stage_1(x_value, peak_term_value);
      peaks_1[0].add_if(is_here, peak_term_value);
    }
    combine<32, false>(peaks_1, cells[turn++ & 1]);
    const float peak_value = peaks_1[0].best;
    Sum<float> sums_2[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float total_term_value;
        float total_term_by_value;
        forward_row_stage_2(x_value, peak_value, total_term_value, total_term_by_value);
        if (is_here) sums_2[0].add(total_term_value, total_term_by_value);
      }
    }
    if (is_edge) {
      const bool is_here = is_live;
      const float x_value = widen(x_edge);
      float total_term_value;
      float total_term_by_value;
      forward_row_stage_2(x_value, peak_value, total_term_value, total_term_by_value);
      if (is_here) sums_2[0].add(total_term_value, total_term_by_value);
    }
    combine<32, false>(sums_2, cells[turn++ & 1]);
    const float total_value = sums_2[0].total;
    float chosen_value;
    float inverse_value;
    forward_row_values_once(total_value, chosen_value, inverse_value);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      Pack<bfloat16, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x_value = widen(x_in[p], lane);
        float out_value;
        forward_row_values(x_value, peak_value, inverse_value, chosen_value, out_value);
        out_out.at[lane] = narrow<bfloat16>(out_value);
      }
      if (is_here) store(out + (base + i), out_out);
    }
    if (is_edge && is_live) {
      const float x_value = widen(x_edge);
      float out_value;
      forward_row_values(x_value, peak_value, inverse_value, chosen_value, out_value);
      out[row * length + edge] = narrow<bfloat16>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

__device__ __forceinline__ void backward_row_stage_1(const float d_out, const float out, float& total_term,
    float& total_term_by) {
  total_term = d_out;
  total_term_by = out;
}

__device__ __forceinline__ void backward_row_values_once(const float total, float& negated) {
  negated = -total;
}

__device__ __forceinline__ void backward_row_values(const float negated, const float out, const float d_out,
    float& d_x) {
  d_x = fmaf(negated, out, d_out * out);
}

// Reads d_out, out; writes d_x.
__global__ void __launch_bounds__(992, 1)
backward_row(const bfloat16* d_out, const bfloat16* out, bfloat16* __restrict__ d_x, BackwardSizes sizes) {
  wait_for_kernel_before();
  constexpr int kLanes = 8, kPacks = 7, kHeld = 3;
  __shared__ float cells[2][31];
  int turn = 0;
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  // Packs begin at multiples of their size in memory: `head` elements behind the start of each of this block's rows, which
  // are multiples of kLanes apart. What stands before the first pack and behind the last is taken one by one.
  const Index head = (kLanes - blockIdx.x % kLanes * length % kLanes) % kLanes,
      whole = (length - head) / kLanes * kLanes;
  const Index edge = threadIdx.x < head ? threadIdx.x : whole + threadIdx.x;
  const bool is_edge = threadIdx.x < length - whole;
  const int edge_lane = (threadIdx.x + kLanes - head) % kLanes;
  extern __shared__ uint4 room[];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto* const d_out_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 0) + thread;
  auto* const d_out_edge_next = reinterpret_cast<Pack<bfloat16,
      kLanes>*>(room + 13888) + threadIdx.y * 2 * kLanes + threadIdx.x;
  auto* const out_next = reinterpret_cast<Pack<bfloat16, kLanes>*>(room + 6944) + thread;
  auto* const out_edge_next = reinterpret_cast<Pack<bfloat16,
      kLanes>*>(room + 13904) + threadIdx.y * 2 * kLanes + threadIdx.x;
  const Index stride = gridDim.x * blockDim.y;
  Index first = blockIdx.x / kLanes * kLanes * blockDim.y + blockIdx.x % kLanes;
  // A thread's first kHeld packs go into registers; the others stay in shared memory until the row is finished.
  const auto send_packs = [&](Index first, int from, int past) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0, base = row * length + head,
        end = is_live ? whole : 0;
#pragma unroll
    for (int p = from; p < past; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (is_here) send(&d_out_next[p * 992], d_out + (base + i));
      if (is_here) send(&out_next[p * 992], out + (base + i));
    }
    send_off();
  };
  const auto send_own = [&](Index first) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0;
    if (is_edge && is_live) send_around(d_out_edge_next, d_out, row * length + edge, rows * length);
    if (is_edge && is_live) send_around(out_edge_next, out, row * length + edge, rows * length);
    send_off();
  };
  send_packs(first, 0, kPacks);
  send_own(first);
  for (; first < rows; first += stride) {
    const bool is_live = first + threadIdx.y * kLanes < rows;
    const Index row = is_live ? first + threadIdx.y * kLanes : 0, base = row * length + head,
        end = is_live ? whole : 0;
    Pack<bfloat16, kLanes> d_out_in[kPacks];
    Pack<bfloat16, kLanes> out_in[kPacks];
    wait_for_sent<0>();
#pragma unroll
    for (int p = 0; p < kHeld; ++p) {
      d_out_in[p] = d_out_next[p * 992];
      out_in[p] = out_next[p * 992];
    }
    bfloat16 d_out_edge = {};
    if (is_edge) d_out_edge = (d_out_edge_next)->at[edge_lane];
    bfloat16 out_edge = {};
    if (is_edge) out_edge = (out_edge_next)->at[edge_lane];
    send_packs(first + stride, 0, kHeld);
    send_own(first + stride);
    Sum<float> sums_1[1];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (p >= kHeld) {
        d_out_in[p] = d_out_next[p * 992];
        out_in[p] = out_next[p * 992];
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float out_value = widen(out_in[p], lane);
        float total_term_value;
        float total_term_by_value;
        backward_row_stage_1(d_out_value, out_value, total_term_value, total_term_by_value);
        if (is_here) sums_1[0].add(total_term_value, total_term_by_value);
      }
    }
    if (is_edge) {
      const bool is_here = is_live;
      const float d_out_value = widen(d_out_edge);
      const float out_value = widen(out_edge);
      float total_term_value;
      float total_term_by_value;
      backward_row_stage_1(d_out_value, out_value, total_term_value, total_term_by_value);
      if (is_here) sums_1[0].add(total_term_value, total_term_by_value);
    }
    combine<32, false>(sums_1, cells[turn++ & 1]);
    const float total_value = sums_1[0].total;
    float negated_value;
    backward_row_values_once(total_value, negated_value);
#pragma unroll
    for (int p = kPacks - 1; p >= 0; --p) {
      const Index i = (p * blockDim.x + threadIdx.x) * kLanes;
      const bool is_here = i < end;
      if (!is_here) continue;
      if (p >= kHeld) {
        d_out_in[p] = d_out_next[p * 992];
        out_in[p] = out_next[p * 992];
        send_packs(first + stride, p, p + 1);
      }
      Pack<bfloat16, kLanes> d_x_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const float d_out_value = widen(d_out_in[p], lane);
        const float out_value = widen(out_in[p], lane);
        float d_x_value;
        backward_row_values(negated_value, out_value, d_out_value, d_x_value);
        d_x_out.at[lane] = narrow<bfloat16>(d_x_value);
      }
      if (is_here) store(d_x + (base + i), d_x_out);
    }
    if (is_edge && is_live) {
      const float d_out_value = widen(d_out_edge);
      const float out_value = widen(out_edge);
      float d_x_value;
      backward_row_values(negated_value, out_value, d_out_value, d_x_value);
      d_x[row * length + edge] = narrow<bfloat16>(d_x_value);
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

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const out = reinterpret_cast<bfloat16*>(a[1]);
  const bool is_measuring = a[2] == -1;
  if (!is_measuring && ((a[0] | a[1]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ size_of(a[3]), size_of(a[4]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[6]);
  const int device = static_cast<int>(a[5]);
  const DeviceGuard guard(device);
  const int64_t forward_row_rows = static_cast<int64_t>(sizes.outer.value),
      forward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 forward_row_block = row_block(ceil_divide(forward_row_length / 8 * 8, 64), 256, 16);
  // Rows that begin alike within a pack go to the same blocks.
  const int64_t forward_row_tasks = ceil_divide(forward_row_rows, 8 * forward_row_block.y) * 8;
  const int64_t forward_row_each = resident_blocks(forward_row, forward_row_block, 131328, 131328,
      device) / 8;
  const int64_t forward_row_resident = 8 * (forward_row_each > 0 ? forward_row_each : 1);
  const int64_t forward_row_slots = forward_row_tasks < forward_row_resident ? forward_row_tasks : forward_row_resident;
  if (is_measuring) return scratch.used;
  {
    follow(forward_row, static_cast<unsigned>(forward_row_slots), forward_row_block, 131328, stream, x, out,
        sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

// a: out, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_backward(const int64_t* a) {
  auto* const out = reinterpret_cast<const bfloat16*>(a[0]);
  auto* const d_out = reinterpret_cast<const bfloat16*>(a[1]);
  auto* const d_x = reinterpret_cast<bfloat16*>(a[2]);
  const bool is_measuring = a[3] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[2]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ size_of(a[4]), size_of(a[5]) };
  const auto stream = reinterpret_cast<cudaStream_t>(a[7]);
  const int device = static_cast<int>(a[6]);
  const DeviceGuard guard(device);
  const int64_t backward_row_rows = static_cast<int64_t>(sizes.outer.value),
      backward_row_length = static_cast<int64_t>(sizes.inner.value);
  const dim3 backward_row_block = row_block(ceil_divide(backward_row_length / 8 * 8, 56), 256, 16);
  // Rows that begin alike within a pack go to the same blocks.
  const int64_t backward_row_tasks = ceil_divide(backward_row_rows, 8 * backward_row_block.y) * 8;
  const int64_t backward_row_each = resident_blocks(backward_row, backward_row_block, 222720, 222720,
      device) / 8;
  const int64_t backward_row_resident = 8 * (backward_row_each > 0 ? backward_row_each : 1);
  const int64_t backward_row_slots = backward_row_tasks < backward_row_resident ? backward_row_tasks : backward_row_resident;
  if (is_measuring) return scratch.used;
  {
    follow(backward_row, static_cast<unsigned>(backward_row_slots), backward_row_block, 222720, stream,
        d_out, out, d_x, sizes);
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
