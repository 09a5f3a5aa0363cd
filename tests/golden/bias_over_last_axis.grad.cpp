// fusegen 0.1.0   chain 6beb62936165   signature forward+backward: bias float32, d_bias float32, d_out float32, d_x float32, out float32, x float32; 64-bit offsets
//   add_channel(bias, axis=-1) | relu
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

struct ForwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float bias,
    float& out) {
  // add_channel(bias, axis=-1)
  const float after_add_channel = x + bias;
  // relu
  out = after_add_channel <= 0.0f ? 0.0f : after_add_channel;
}

static void forward_pointwise(const float* __restrict__ x, const float* __restrict__ bias,
    float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  const Index rows = sizes.outer.value, length = sizes.inner.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
    const Index outer = row;
#pragma omp simd
    for (Index r = begin; r < end; ++r) {
      const Index inner = r;
      const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
      const float bias_value = widen(bias[inner]);
      float out_value;
      forward_pointwise_values(x_value, bias_value, out_value);
      out[(outer) * sizes.inner.value + inner] = narrow<float>(out_value);
    }
  }
}

struct BackwardSizes {
  Size outer, inner;
};

static inline __attribute__((always_inline)) void backward_outer_values(const float x, const float bias,
    const float d_out, float& d_x, float& total_term) {
  // add_channel(bias, axis=-1)
  const float after_add_channel = x + bias;
  // backward, down to add_channel(bias, axis=-1)
  d_x = after_add_channel <= 0.0f ? 0.0f : d_out;
  total_term = after_add_channel <= 0.0f ? 0.0f : d_out;
}

static void backward_outer(const float* __restrict__ x, const float* __restrict__ bias,
    const float* __restrict__ d_out, float* __restrict__ d_x, Sum* __restrict__ total_partials,
    const BackwardSizes& sizes, int threads) {
  const Index kept = 1, rows = sizes.outer.value, columns = sizes.inner.value;
  const Index slots = slots_of(rows, columns);
#pragma omp parallel for num_threads(threads) schedule(static) if (kept * rows * columns > kSerial)
  for (Index task = 0; task < kept * slots; ++task) {
    const Index kept_index = task / slots, slot = task % slots;
    Sum* const total_sums = total_partials + task * columns;
    std::fill(total_sums, total_sums + columns, Sum());
    for (Index row = rows * slot / slots; row < rows * (slot + 1) / slots; ++row) {
      const Index outer = row;
#pragma omp simd
      for (Index r = 0; r < columns; ++r) {
        const Index inner = r;
        const float x_value = widen(x[(outer) * sizes.inner.value + inner]);
        const float bias_value = widen(bias[inner]);
        const float d_out_value = widen(d_out[(outer) * sizes.inner.value + inner]);
        float d_x_value;
        float total_term_value;
        backward_outer_values(x_value, bias_value, d_out_value, d_x_value, total_term_value);
        d_x[(outer) * sizes.inner.value + inner] = narrow<float>(d_x_value);
        total_sums[r].add(total_term_value);
      }
    }
  }
}

static inline __attribute__((always_inline)) void backward_finalise_values(const float total, float& d_bias) {
  d_bias = total;
}

static void backward_finalise(float* __restrict__ d_bias, const Sum* __restrict__ total_partials,
    const BackwardSizes& sizes, Index slots, int threads) {
  const Index columns = sizes.inner.value, results = sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results * slots > kSerial)
  for (Index result = 0; result < results; ++result) {
    const Index above = result / columns, column = result % columns;
    Sum total_sum;
    for (Index slot = 0; slot < slots; ++slot) total_sum.merge(total_partials[(above * slots + slot) * columns + column]);
    const float total_value = static_cast<float>(total_sum.sum());
    const Index inner = result;
    float d_bias_value;
    backward_finalise_values(total_value, d_bias_value);
    d_bias[inner] = narrow<float>(d_bias_value);
  }
}

}  // namespace

// a: x, bias, out, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]}, {a[5]} };
  const int threads = static_cast<int>(a[6]);
  if (is_measuring) return scratch.used;
  forward_pointwise(x, bias, out, sizes, threads);
  return 0;
}

// a: x, bias, d_out, d_x, d_bias, scratch (-1: return the bytes it needs), outer, inner, threads.
static int64_t run_backward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const bias = reinterpret_cast<const float*>(a[1]);
  auto* const d_out = reinterpret_cast<const float*>(a[2]);
  auto* const d_x = reinterpret_cast<float*>(a[3]);
  auto* const d_bias = reinterpret_cast<float*>(a[4]);
  const bool is_measuring = a[5] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[5])};
  const BackwardSizes sizes{ {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  const Index total_partials_slots = slots_of(sizes.outer.value, sizes.inner.value)
;
  auto* const total_partials = scratch.take<Sum>(static_cast<int64_t>(sizes.inner.value) * total_partials_slots);
  if (is_measuring) return scratch.used;
  backward_outer(x, bias, d_out, d_x, total_partials, sizes, threads);
  backward_finalise(d_bias, total_partials, sizes, total_partials_slots, threads);
  return 0;
}
static PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t given) {
  int64_t a[7];
  if (given != 7) {
    PyErr_Format(PyExc_TypeError, "forward takes 7 integers, got %zd", given);
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
  int64_t a[9];
  if (given != 9) {
    PyErr_Format(PyExc_TypeError, "backward takes 9 integers, got %zd", given);
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

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_f61ae67921ef", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_f61ae67921ef() { return PyModule_Create(&definition); }
