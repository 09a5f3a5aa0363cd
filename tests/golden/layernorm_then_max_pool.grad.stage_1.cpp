// fusegen 0.1.0   chain b1d23cb647a0   signature forward+backward: d_out float32, d_x float32, out float32, x float32; 64-bit offsets
//   layernorm
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

struct Sum {
  double total = 0;
  void add(double term) { total += term; }
  void merge(const Sum& other) { total += other.total; }
  double sum() const { return total; }
};

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
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_row_stage_1(const float x, float& mean_term) {
  mean_term = x;
}

static inline __attribute__((always_inline)) void forward_row_values(const float x, const float mean,
    const float variance, float& out) {
  // layernorm
  out = (x - mean) * (1.0f / sqrtf(variance + 1e-05f));
}

static void forward_row(const float* __restrict__ x, float* __restrict__ out, const ForwardSizes& sizes,
    int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Moments mean_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float mean_part = 0;
#pragma omp simd reduction(+ : mean_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        mean_part += mean_term_value;
      }
      const float mean_about = mean_part / static_cast<float>(end - begin);
      float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float mean_term_value;
        forward_row_stage_1(x_value, mean_term_value);
        const float distance = mean_term_value - mean_about;
        mean_distances += distance * distance;
        mean_drift += distance;
      }
      const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
      mean_all.merge(mean_sum);
    }
    const Moments& mean_sum = mean_all;
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
#pragma omp simd
    for (Index r = 0; r < length; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float out_value;
      forward_row_values(x_value, mean_value, variance_value, out_value);
      out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_row_stage_1(const float d_out, const float x,
    float& total_term, float& mean_term) {
  total_term = d_out;
  mean_term = x;
}

static inline __attribute__((always_inline)) void backward_row_stage_2(const float d_out, const float x,
    const float mean, float& total_2_term) {
  total_2_term = d_out * (x - mean);
}

static inline __attribute__((always_inline)) void backward_row_values(const float x, const float mean,
    const float total_2, const float variance, const float count_of_inner, const float d_out,
    const float total, float& d_x) {
  const float inverse_root = 1.0f / sqrtf(variance + 1e-05f);
  const float product = 2.0f * (-0.5f * total_2 * (inverse_root * inverse_root * inverse_root));
  d_x = (x - mean) * (product / count_of_inner) + d_out * inverse_root - total * inverse_root / count_of_inner;
}

static void backward_row(const float* __restrict__ d_out, const float* __restrict__ x,
    float* __restrict__ d_x, const BackwardSizes& sizes, int threads) {
  const float count_of_inner_value = static_cast<float>(sizes.inner.value);
  const Index rows = sizes.outer.value, length = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index row = 0; row < rows; ++row) {
    const Index outer = row;
    Sum total_all;
    Moments mean_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float total_part = 0;
      float mean_part = 0;
#pragma omp simd reduction(+ : total_part, mean_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float total_term_value;
        float mean_term_value;
        backward_row_stage_1(d_out_value, x_value, total_term_value, mean_term_value);
        total_part += total_term_value;
        mean_part += mean_term_value;
      }
      const Sum total_sum{static_cast<double>(total_part)};
      const float mean_about = mean_part / static_cast<float>(end - begin);
      float mean_distances = 0, mean_drift = 0;
#pragma omp simd reduction(+ : mean_distances, mean_drift)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float total_term_value;
        float mean_term_value;
        backward_row_stage_1(d_out_value, x_value, total_term_value, mean_term_value);
        const float distance = mean_term_value - mean_about;
        mean_distances += distance * distance;
        mean_drift += distance;
      }
      const Moments mean_sum = moments_about(mean_about, end - begin, mean_distances, mean_drift);
      total_all.merge(total_sum);
      mean_all.merge(mean_sum);
    }
    const Sum& total_sum = total_all;
    const Moments& mean_sum = mean_all;
    const float total_value = static_cast<float>(total_sum.sum());
    const float mean_value = static_cast<float>(mean_sum.mean());
    const float variance_value = static_cast<float>(mean_sum.variance());
    Sum total_2_all;
    for (Index begin = 0; begin < length; begin += kPiece) {
      const Index end = std::min(length, begin + kPiece);
      float total_2_part = 0;
#pragma omp simd reduction(+ : total_2_part)
      for (Index r = begin; r < end; ++r) {
        const Index inner = r;
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        float total_2_term_value;
        backward_row_stage_2(d_out_value, x_value, mean_value, total_2_term_value);
        total_2_part += total_2_term_value;
      }
      const Sum total_2_sum{static_cast<double>(total_2_part)};
      total_2_all.merge(total_2_sum);
    }
    const Sum& total_2_sum = total_2_all;
    const float total_2_value = static_cast<float>(total_2_sum.sum());
#pragma omp simd
    for (Index r = 0; r < length; ++r) {
      const Index inner = r;
      const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      float d_x_value;
      backward_row_values(x_value, mean_value, total_2_value, variance_value, count_of_inner_value,
          d_out_value, total_value, d_x_value);
      d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
    }
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]} };
  const int threads = static_cast<int>(a[5]);
  if (is_measuring) return scratch.used;
  forward_row(x, out, sizes, threads);
  return 0;
}

// a: x, d_out, d_x, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const d_out = reinterpret_cast<const float*>(a[1]);
  auto* const d_x = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const BackwardSizes sizes{ {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  if (is_measuring) return scratch.used;
  backward_row(d_out, x, d_x, sizes, threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[6];
  if (given != 6) {
    PyErr_Format(PyExc_TypeError, "forward takes 6 integers, got %zd", given);
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

static PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[7];
  if (given != 7) {
    PyErr_Format(PyExc_TypeError, "backward takes 7 integers, got %zd", given);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < given; ++i) a[i] = PyLong_AsLongLong(args[i]);
  if (PyErr_Occurred()) return nullptr;
  int64_t result;
  Py_BEGIN_ALLOW_THREADS;
  result = run_backward(a);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(result);
}

static PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {"backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(backward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_4de6d51ec1c5", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_4de6d51ec1c5() { return PyModule_Create(&definition); }
