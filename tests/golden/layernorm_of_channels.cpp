// fusegen 0.1.0   chain 4b84aacee5b2   signature forward: bias float32, out float32, weight float32, x float32; 64-bit offsets
//   layernorm(weight, bias, axis=1)
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using Index = int64_t;

namespace {

struct Size {
  Index value;
};

inline Index divide(Index n, Size d) { return n / d.value; }

template <typename Stored>
inline Stored widen(Stored x) {
  return x;
}

template <typename Stored, typename Value>
inline Stored narrow(Value x) {
  return static_cast<Stored>(x);
}

// Scratch memory, handed out piece by piece; with no base it only counts.
struct Scratch {
  char* base;
  Index used = 0;
  template <typename T>
  T* take(Index count) {
    T* const piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<Index>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// Work is cut into pieces that depend on the sizes alone, never on the number of threads: so are the results.
constexpr Index kPiece = 16384;

inline Index pieces_of(Index length) { return std::max<Index>(1, (length + kPiece - 1) / kPiece); }

// Below this many elements one thread does it all: waking another costs more.
constexpr Index kSerial = 16384;

// How many blocks of rows leave partials of their own, where columns are added up.
inline Index slots_of(Index rows, Index columns) {
  return std::max<Index>(1, std::min<Index>(std::min<Index>(rows, 64), rows * columns / kPiece));
}

// Count, mean and the sum of squared distances from it; merged by Chan's formula.
struct Moments {
  double count = 0, centre = 0, distances = 0;
  void merge(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count, gap = other.centre - centre;
    centre += gap * (other.count / all);
    distances += other.distances + gap * gap * (count * other.count / all);
    count = all;
  }
  void add(double term) { merge({1, term, 0}); }
  double mean() const { return centre; }
  double variance() const { return distances / count; }
};

// From sums about a first guess of the mean: drift is the sum of distances, which would be 0 had the guess been exact.
inline Moments moments_about(double about, Index count, double distances, double drift) {
  const double n = static_cast<double>(count);
  return {n, about + drift / n, distances - drift * (drift / n)};
}

struct ForwardSizes {
  Size outer, middle, inner;
};

static inline __attribute__((always_inline)) void forward_column_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void forward_column_values(const float x, const float mean,
    const float variance, const float weight, const float bias, float& out) {
  // layernorm(weight, bias, axis=1)
  out = (x - mean) * (1.0f / sqrtf(variance + 1e-05f)) * weight + bias;
}

static void forward_column(const float* __restrict__ x, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  constexpr Index kBlock = 64;
  const Index above = sizes.outer.value, length = sizes.middle.value, beside = sizes.inner.value;
  const Index blocks = (beside + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static) if (above * length * beside > kSerial)
  for (Index task = 0; task < above * blocks; ++task) {
    const Index above_index = task / blocks, first = task % blocks * kBlock;
    const Index width = std::min(kBlock, beside - first);
    const Index outer = above_index;
    double mean_part[kBlock] = {};
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_column_stage_1(x_value, mean_term_value);
        mean_part[b] += mean_term_value;
      }
    }
    float mean_about[kBlock];
    double mean_distances[kBlock] = {}, mean_drift[kBlock] = {};
    for (Index b = 0; b < width; ++b) mean_about[b] = static_cast<float>(mean_part[b] / static_cast<double>(length));
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_column_stage_1(x_value, mean_term_value);
        const double distance = mean_term_value - mean_about[b];
        mean_distances[b] += distance * distance;
        mean_drift[b] += distance;
      }
    }
    float mean_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      mean_at[b] = static_cast<float>(mean_sum.mean());
    }
    float variance_at[kBlock];
    for (Index b = 0; b < width; ++b) {
      const Moments mean_sum = moments_about(mean_about[b], length, mean_distances[b], mean_drift[b]);
      variance_at[b] = static_cast<float>(mean_sum.variance());
    }
    for (Index r = 0; r < length; ++r) {
      const Index middle = r;
#pragma omp simd
      for (Index b = 0; b < width; ++b) {
        const Index beside_index = first + b;
        const Index inner = beside_index;
        const float mean_value = mean_at[b];
        const float variance_value = variance_at[b];
        const float x_value = widen(x[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner]);
        const float weight_value = widen(weight[middle]);
        const float bias_value = widen(bias[middle]);
        float out_value;
        forward_column_values(x_value, mean_value, variance_value, weight_value, bias_value, out_value);
        out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(out_value);
      }
    }
  }
}

}  // namespace

// a: x, weight, bias, out, scratch (-1: return the bytes it needs), outer, middle, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const weight = reinterpret_cast<const float*>(a[1]);
  auto* const bias = reinterpret_cast<const float*>(a[2]);
  auto* const out = reinterpret_cast<float*>(a[3]);
  const bool is_measuring = a[4] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[4])};
  const ForwardSizes sizes{ {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_column(x, weight, bias, out, sizes, threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[9];
  if (given != 9) {
    PyErr_Format(PyExc_TypeError, "forward takes 9 integers, got %zd", given);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < given; ++i) a[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  int64_t result;
  Py_BEGIN_ALLOW_THREADS;
  result = run_forward(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_cc73c11fef9d", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_cc73c11fef9d() { return PyModule_Create(&definition); }
