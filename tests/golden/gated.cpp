// fusegen 0.1.0   chain 6bc262b9ec83   signature forward: gate float32, out float32, x float32; 64-bit offsets
//   keep(y) | sigmoid | mul(y) | mul(gate)
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

using Index = int64_t;

// Vector variants of these stand in glibc's libmvec; the attribute lets loops use them.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GLIBC_PREREQ(2, 35)
extern "C" {
__attribute__((simd("notinbranch"))) float expf(float) noexcept;
}
#endif
#endif

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

struct ForwardSizes {
  Size element;
};

static inline __attribute__((always_inline)) void forward_pointwise_values(const float x, const float gate,
    float& out) {
  // sigmoid
  const float after_sigmoid = 1.0f / (1.0f + expf(-x));
  // mul(y)
  const float after_mul = after_sigmoid * x;
  // mul(gate)
  out = after_mul * gate;
}

static void forward_pointwise(const float* __restrict__ x, const float* __restrict__ gate,
    float* __restrict__ out, const ForwardSizes& sizes, int threads) {
  const Index rows = 1, length = sizes.element.value;
  const Index pieces = pieces_of(length);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * length > kSerial)
  for (Index task = 0; task < rows * pieces; ++task) {
    const Index row = task / pieces, piece = task % pieces;
    const Index begin = piece * kPiece, end = std::min(length, begin + kPiece);
#pragma omp simd
    for (Index r = begin; r < end; ++r) {
      const Index element = r;
      const float x_value = widen(x[element]);
      const float gate_value = widen(gate[element]);
      float out_value;
      forward_pointwise_values(x_value, gate_value, out_value);
      out[element] = narrow<float>(out_value);
    }
  }
}

}  // namespace

// a: x, gate, out, scratch (-1: return the bytes it needs), element, threads.
static int64_t run_forward(const int64_t* a) {
  auto* const x = reinterpret_cast<const float*>(a[0]);
  auto* const gate = reinterpret_cast<const float*>(a[1]);
  auto* const out = reinterpret_cast<float*>(a[2]);
  const bool is_measuring = a[3] == -1;
  Scratch scratch{is_measuring ? nullptr : reinterpret_cast<char*>(a[3])};
  const ForwardSizes sizes{ {a[4]} };
  const int threads = static_cast<int>(a[5]);
  if (is_measuring) return scratch.used;
  forward_pointwise(x, gate, out, sizes, threads);
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

static PyMethodDef methods[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(forward)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_0c89c60e1686", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fusegen_0c89c60e1686() { return PyModule_Create(&definition); }
