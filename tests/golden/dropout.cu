// fusegen 0.1.0   chain 8c68499c9411   signature forward: bias float32, noise noise, out float32, x float32; 32-bit offsets
//   gelu | dropout(0.1, noise) | add_channel(bias)
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

// Neighbours, the first `left` of them here, the others in another row, by as few accesses as their addresses allow.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load_anywhere(const T* here, const T* next = nullptr, Index left = N) {
  constexpr int kPart = sizeof(T) * N > 16 ? 16 / sizeof(T) : N;
  Pack<T, N> pack;
  if (left >= N && reinterpret_cast<uintptr_t>(here) % (sizeof(T) * kPart) == 0) {
#pragma unroll
    for (int n = 0; n < N; n += kPart) *reinterpret_cast<Pack<T,
        kPart>*>(pack.at + n) = load<kPart>(here + n);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) pack.at[n] = n < left ? here[n] : next[n - left];
  }
  return pack;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Whole = typename Bits<sizeof(T) * N>::type;
  *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(&pack);
}

// Two neighbours have their bits of one hash: the seed is stepped on by the pair's place, and mixed, as splitmix64 has it.
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

__device__ __forceinline__ uint64_t stepped_on(int64_t seed,
    uint64_t pair) { return static_cast<uint64_t>(seed) + (pair + 1) * kStep; }

__device__ __forceinline__ uint64_t mixed(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// Noise is 32 bits: a number in [0, 1), times 2^32.
__device__ __forceinline__ uint32_t noise_at(int64_t seed, uint64_t place) {
  const uint64_t bits = mixed(stepped_on(seed, place / 2));
  return static_cast<uint32_t>(place % 2 == 0 ? bits : bits >> 32);
}

// The kernel before this one in the stream is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct ForwardSizes {
  Size outer, middle, inner;
};

struct ForwardDrawnNoise {
  const int64_t* seed;
  ForwardSizes sizes;
  Index from = 0;
  __device__ __forceinline__ Index place(Index offset) const {
    const Index above_inner = divide(offset, sizes.inner);
    const Index inner = offset - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    return ((outer) * sizes.inner.value + inner) * sizes.middle.value + middle;
  }
  template <typename Offset>
  __device__ __forceinline__ ForwardDrawnNoise operator+(Offset offset) const {
    return {seed, sizes, from + static_cast<Index>(offset)};
  }
  template <typename Offset>
  __device__ __forceinline__ uint32_t operator[](Offset offset) const { return noise_at(*seed,
      place(from + static_cast<Index>(offset))); }
};

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw_singly(ForwardDrawnNoise from, int64_t seed) {
  Pack<uint32_t, N> pack;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) pack.at[lane] = noise_at(seed, from.place(from.from + lane));
  return pack;
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> draw(ForwardDrawnNoise from, int64_t seed) {
  return draw_singly<N>(from, seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load_singly(ForwardDrawnNoise from) {
  return draw_singly<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ Pack<uint32_t, N> load(ForwardDrawnNoise from) {
  return draw<N>(from, *from.seed);
}

template <int N>
__device__ __forceinline__ void send(Pack<uint32_t, N>* to, ForwardDrawnNoise from) {
  *to = load<N>(from);
}

template <bool kIsWide, int N>
__device__ __forceinline__ void load_line(ForwardDrawnNoise from, uint32_t (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

__device__ __forceinline__ void forward_pointwise_values(const uint32_t noise, const float x,
    const float bias, float& out) {
  // gelu
  const float after_gelu = x * 0.5f * (1.0f + erff(x * 0.707106769f));
  // dropout(0.1, noise)
  const float after_dropout = noise >= 429496832u ? after_gelu * 1.11111116f : 0.0f;
  // add_channel(bias)
  out = after_dropout + bias;
}

// Reads noise, x, bias by (inner); writes out.
template <bool kMayCross>
__global__ void __launch_bounds__(64)
forward_pointwise(const ForwardDrawnNoise noise, const float* x, const float* bias, float* __restrict__ out,
    ForwardSizes sizes, Index count) {
  wait_for_kernel_before();
  constexpr int kLanes = 4, kPacks = 2;
  const Index first = (static_cast<Index>(blockIdx.x) * kPacks * 64 + threadIdx.x) * kLanes;
  const int64_t noise_seed = *noise.seed;
  Pack<float, kLanes> x_in[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i + kLanes > count) break;
    x_in[p] = load<kLanes>(x + i);
  }
  // What element i's row has one of, where it is in what its row shares with others, and how many are left of the row.
  const auto enter_row = [&](Index i, Index& bias_row) {
    const Index above_inner = divide(i, sizes.inner);
    const Index inner = i - above_inner * sizes.inner.value;
    bias_row = inner;
    return sizes.inner.value - inner;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const Index i = first + static_cast<Index>(p) * 64 * kLanes;
    if (i >= count) return;
    Index bias_here;
    const Index left = enter_row(i, bias_here);
    const bool is_crossing = kMayCross && left < kLanes;
    if (i + kLanes <= count && (left >= kLanes || (kMayCross && sizes.inner.value >= kLanes))) {
      Index bias_next = bias_here;
      if (is_crossing) enter_row(i + left, bias_next);
      const auto bias_in = load_anywhere<kLanes>(bias + bias_here, bias + bias_next,
          is_crossing ? left : kLanes);
      const auto noise_in = draw<kLanes>(noise + i, noise_seed);
      Pack<float, kLanes> out_out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t noise_value = widen(noise_in, lane);
        const float x_value = widen(x_in[p], lane);
        const float bias_value = widen(bias_in, lane);
        float out_value;
        forward_pointwise_values(noise_value, x_value, bias_value, out_value);
        out_out.at[lane] = narrow<float>(out_value);
      }
      store(out + i, out_out);
    } else {
#pragma unroll 1
      for (Index j = i; j < count && j < i + kLanes; ++j) {
        enter_row(j, bias_here);
        const float bias_value = widen(bias[bias_here]);
        const uint32_t noise_value = widen(noise[j]);
        const float x_value = widen(x[j]);
        float out_value;
        forward_pointwise_values(noise_value, x_value, bias_value, out_value);
        out[j] = narrow<float>(out_value);
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

// a: x, noise, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, device, stream.
// Returns 0; 1 if a tensor that is read in packs is not aligned to 16 bytes; or minus a cudaError_t.
extern "C" int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  if (!is_measuring && ((a[0] | a[1] | a[3]) & 15) != 0) return 1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ size_of(a[5]), size_of(a[6]), size_of(a[7]) };
  const ForwardDrawnNoise noise{reinterpret_cast<const int64_t*>(a[1]), sizes};
  const auto stream = reinterpret_cast<cudaStream_t>(a[9]);
  const int device = static_cast<int>(a[8]);
  const DeviceGuard guard(device);
  if (is_measuring) return scratch.used;
  {
    const int64_t count = static_cast<int64_t>(sizes.outer.value) * static_cast<int64_t>(sizes.middle.value) * static_cast<int64_t>(sizes.inner.value);
    const auto blocks = static_cast<unsigned>(ceil_divide(count, 512));
    // Packs that lie in two rows: none where rows are whole packs, and few where they are long.
    const bool may_cross = sizes.inner.value % 4 != 0 && sizes.inner.value < 4096;
    const auto run = may_cross ? forward_pointwise<true> : forward_pointwise<false>;
    follow(run, blocks, 64, 0, stream, noise, x, bias, out, sizes, static_cast<Index>(count));
  }
  return -static_cast<int64_t>(cudaGetLastError());
}

extern "C" const char* error_text(int64_t code) { return cudaGetErrorString(static_cast<cudaError_t>(-code)); }
