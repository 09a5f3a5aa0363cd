// fusegen 0.1.0   chain f8c0d91a637e: what the binding to Python finds
#include <cstdint>

extern "C" int64_t run_forward(const int64_t* a);
extern "C" int64_t run_backward(const int64_t* a);
extern "C" const char* error_text(int64_t code);

// A program takes pointers to inputs, outputs and scratch memory, sizes, and where to run.
struct Program {
  const char* name;
  int64_t (*run)(const int64_t*);
  int64_t inputs, outputs, arguments;
};

static const Program programs[] = {
    {"forward", run_forward, 2, 1, 9},
    {"backward", run_backward, 3, 2, 11},
};

// A module with these programs: with a text for errors, they hold Python up.
extern "C" void* make_module(const char* name, const Program* programs, int64_t count, const char* (*error_text)(int64_t));

extern "C" void* PyInit_fusegen_733e5fedd608() {
  return make_module("fusegen_733e5fedd608", programs, 2, error_text);
}
