// fusegen 0.1.0   chain 7fb0b777ff94   signature forward: out float32, x float32; 64-bit offsets
//   max_pool2d(2)
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

// The first maximum and where it stands; a NaN beats every number, as in torch.
struct Maximum {
  double best = 0;
  int at = -1;
  void add(double value, int position) {
    if (at < 0 || value > best || value != value) best = value, at = position;
  }
  double max() const { return best; }
  int argmax() const { return at; }
};

struct ForwardSizes {
  Size outer, middle, inner, middle_unpooled, inner_unpooled;
};

static inline __attribute__((always_inline)) void forward_window_stage_1(const float x, float& maximum_term) {
  maximum_term = x;
}

static inline __attribute__((always_inline)) void forward_window_row_values(const float maximum, float& out) {
  out = maximum;
}

static void forward_window(const float* __restrict__ x, float* __restrict__ out, const ForwardSizes& sizes,
    int threads) {
  const Index results = sizes.outer.value * sizes.middle.value * sizes.inner.value;
#pragma omp parallel for num_threads(threads) schedule(static) if (results > kSerial / 4)
  for (Index result = 0; result < results; ++result) {
    const Index above_inner = divide(result, sizes.inner);
    const Index inner = result - above_inner * sizes.inner.value;
    const Index above_middle = divide(above_inner, sizes.middle);
    const Index middle = above_inner - above_middle * sizes.middle.value;
    const Index outer = above_middle;
    Maximum maximum_sum;
    for (int position_value = 0; position_value < 4; ++position_value) {
      const Index above_window_2 = position_value / 2;
      const Index window_2 = position_value - above_window_2 * 2;
      const Index window_1 = above_window_2;
      const float x_value = widen(x[((outer) * sizes.middle_unpooled.value + (middle * 2 + window_1)) * sizes.inner_unpooled.value + (inner * 2 + window_2)]);
      float maximum_term_value;
      forward_window_stage_1(x_value, maximum_term_value);
      maximum_sum.add(maximum_term_value, position_value);
    }
    const float maximum_value = static_cast<float>(maximum_sum.max());
    {
      float out_value;
      forward_window_row_values(maximum_value, out_value);
      out[((outer) * sizes.middle.value + middle) * sizes.inner.value + inner] = narrow<float>(out_value);
    }
  }
}

}  // namespace

// a: x, out, scratch (-1: return the bytes it needs), outer, middle, inner, middle_unpooled, inner_unpooled, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const out = reinterpret_cast<float*>(a[1]);
  const bool is_measuring = a[2] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[2])};
  const ForwardSizes sizes{ {a[3]}, {a[4]}, {a[5]}, {a[6]}, {a[7]} };
  const int threads = static_cast<int>(a[8]);
  if (is_measuring) return scratch.used;
  forward_window(x, out, sizes, threads);
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

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_03d618a18bca", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_03d618a18bca() { return PyModule_Create(&definition); }
