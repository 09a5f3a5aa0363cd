"""The targets as data: how each spells types, literals, primitives and functions. Nothing
branches on a target's name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fusegen.arity import CASTS, QUANTISING_CASTS, QUOTIENT, WRAPS

# fp16 and bf16 are computed in fp32; only fp64 needs fp64.
COMPUTE = {"float16": "float", "bfloat16": "float", "float32": "float", "float64": "double"}
# The distance from 1 to the next number, in the type in which each is computed.
EPSILON = {"float16": 2.0**-23, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-52}
PACK_BYTES = 16  # of the widest access
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "noise": 4,  # as it is computed: in memory there is only a seed
}


class Limits(NamedTuple):
    """What a device has: multiprocessors, and bytes of shared memory that a block may have."""

    processors: int
    shared_bytes: int


# By name, from NVIDIA's data sheets and the table of compute capabilities in the CUDA guide.
GPUS: Mapping[str, Limits] = {
    "A100": Limits(108, 163 << 10),
    "B200": Limits(148, 227 << 10),
    "H100": Limits(132, 227 << 10),
    "H200": Limits(132, 227 << 10),
    "L4": Limits(58, 99 << 10),
    "L40S": Limits(142, 99 << 10),
}
H200 = GPUS["H200"]  # stands for a device that is not here
H200_GB_PER_S = 4290.0  # what a copy of a large tensor reaches on one, as measured


# What rounds to more than a type has.
_LIMITS = {"float": float.fromhex("0x1.ffffffp127"), "double": math.inf}


@dataclass(frozen=True)
class Target:
    """A language to emit: spellings by primitive, with {0}, {1} or {all} for arguments and {f} for
    float's function suffix.
    """

    name: str
    spellings: Mapping[str, str]
    library: Mapping[str, str]  # primitives that call the mathematical library, and what they call
    float_spellings: Mapping[str, str]  # what is spelled in another way where arithmetic is float's
    definitions: Mapping[str, str]  # source text of functions in those that no library has, by name
    accumulators: Mapping[str, str]  # the type that each kind of reduction accumulates in
    source_suffix: str
    is_wide: bool  # offsets have 64 bits always, for they cost nothing; else where the size demands
    is_flat: bool  # elementwise tensors are reached by one flat index
    holds_rows: bool  # rows that are worked on as a whole stay on the chip
    in_cache: tuple[str, ...]  # families of rows that are worked on as a whole while in cache
    fills_edges: bool  # a kernel that writes a whole tensor by windows writes the edge they leave
    joins_from: int  # elements at least, where a norm is in one segment with the pooling behind it
    reports_errors: bool  # a launch may fail; where none can, other threads run Python meanwhile
    trailing_arguments: (
        int  # what a call takes after tensors, scratch and sizes: threads; or device and stream
    )

    @property
    def is_contracted(self) -> bool:
        """Whether arithmetic is made shorter where results are not eager's to the last bit anyway:
        where kernels wait for arithmetic, and products and sums are one instruction.
        """
        return "fma" in self.spellings

    def literal(self, value: float, compute: str) -> str:
        """A typed literal that is the value, rounded to the compute type as torch rounds it."""
        if math.isnan(value) or math.isinf(value) or abs(value) >= _LIMITS[compute]:
            text = "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
            return f"static_cast<double>({text})" if compute == "double" else text
        text = repr(value)
        if compute == "float":
            rounded = struct.unpack("f", struct.pack("f", value))[0]
            if struct.unpack("f", struct.pack("f", float(text)))[0] != rounded or len(text) > 12:
                text = format(rounded, ".9g")
        if not any(c in text for c in ".e"):
            text += ".0"
        return text + ("f" if compute == "float" else "")

    def spell(self, op: str, compute: str, *args: str) -> str:
        """A primitive applied to finished arguments."""
        suffix = "f" if compute == "float" else ""
        one = self.literal(1.0, compute)
        spelling = self.float_spellings.get(op) if suffix else None
        return (spelling or self.spellings[op]).format(
            *args, f=suffix, one=one, all=", ".join(args)
        )

    def library_call(self, op: str, compute: str) -> str | None:
        """The function of the mathematical library that a primitive calls, if any."""
        if op not in self.library or (compute == "float" and op in self.float_spellings):
            return None
        return self.library[op] + ("f" if compute == "float" else "")


# Element types as memory has them, in C and its descendants.
STORAGE = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "noise": "uint32_t",
}
# Comparisons, arithmetic and functions that C and its descendants spell alike.
_COMMON = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    **dict.fromkeys(("div", QUOTIENT), "{0} / {1}"),
    "neg": "-{0}",
    "abs": "fabs{f}({0})",
    "exp": "exp{f}({0})",
    "expm1": "expm1{f}({0})",
    "log": "log{f}({0})",
    "log1p": "log1p{f}({0})",
    "sqrt": "sqrt{f}({0})",
    "rsqrt": "{one} / sqrt{f}({0})",
    "erf": "erf{f}({0})",
    "erfc": "erfc{f}({0})",
    "tanh": "tanh{f}({0})",
    "sigmoid": "{one} / ({one} + exp{f}(-{0}))",
    "sin": "sin{f}({0})",
    "cos": "cos{f}({0})",
    "tan": "tan{f}({0})",
    "asin": "asin{f}({0})",
    "acos": "acos{f}({0})",
    "atan": "atan{f}({0})",
    "sinh": "sinh{f}({0})",
    "cosh": "cosh{f}({0})",
    "asinh": "asinh{f}({0})",
    "acosh": "acosh{f}({0})",
    "atanh": "atanh{f}({0})",
    "log2": "log2{f}({0})",
    "log10": "log10{f}({0})",
    "sign": "sign({0})",
    "floor": "floor{f}({0})",
    "ceil": "ceil{f}({0})",
    # Halves to the even one.
    "round": "rint{f}({0})",
    "trunc": "trunc{f}({0})",
    "detach": "({0})",
    "exp2": "exp2{f}({0})",
    **{op: f"{op}{{f}}({{0}}, {{1}})" for op in ("pow", "fmod", "atan2")},
    # Not fminf and fmaxf: NaN in either argument is the result, as torch has it.
    "minimum": "minimum({0}, {1})",
    "maximum": "maximum({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "repeated": "{0}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_not": "!{0}",
    # What `narrow` makes; "fma" and "narrow_<primitive>" only where a target has them.
    "polynomial": "polynomial({all})",
    "exp2_flushed": "exp2{f}({0})",
    # A quantised type is rounded to where it is stored.
    **dict.fromkeys(QUANTISING_CASTS, "({0})"),
    **{op: f"rounded_to<{STORAGE[t]}>({{0}})" for op, t in CASTS.items()},
    **{op: f"static_cast<{STORAGE[t]}>({{0}})" for op, t in WRAPS.items()},
    "to_int64": "static_cast<int64_t>({0})",
    "to_index": "static_cast<int>({0})",
}

_CALLED = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "erf", "erfc", "sin"),
    *("cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh"),
    "atanh",
)
_LIBRARY = {**{op: op for op in _CALLED}, "sigmoid": "exp", "exp2_flushed": "exp2"}
# Primitives that take a function where others take an instruction.
FUNCTIONS = frozenset(_LIBRARY)
# Primitives that take many instructions: worth more than a register for their result.
DEAR = FUNCTIONS | {"div", "sqrt", "rsqrt", "fmod"}
BRIEF = frozenset({"exp"})  # of those, what takes few registers on its way

# A call of libmvec costs half as much again, and nothing overlaps with it. y and e below are
# fitted to the relative error of the result; both functions were compared with double precision
# over every float.
_EXP_OF = """\
// exp within 1.1 ulp: 2^n * exp(r), n the nearest integer to x / log(2).
inline float exp_of(float x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = fmaf(x, 1.442695f, 0x1.8p23f + 254);  // its last bits are n + 254
  const float n = shifted - (0x1.8p23f + 254);
  const float r = fmaf(n, 1.9046542e-9f, fmaf(n, -0.6931472f, x)), rr = r * r;
  float e = fmaf(0.0013814596f, rr, fmaf(0.0083687175f, r, 0.04166839f));
  e = fmaf(e, rr, fmaf(0.16666521f, r, 0.49999994f));
  e = 1.0f + fmaf(e, rr, r);
  // In two factors, for 2^n may lie beyond what a float holds where the result does not.
  const uint32_t both = bits_of<uint32_t>(shifted), half = both >> 1;
  return e * bits_of<float>(half << 23) * bits_of<float>((both - half) << 23);
#else
  return expf(x);
#endif
}
"""
_ERF_OF = """\
// erf within 1.9 ulp: 1 - exp(-y) on the right of 0, where y is |x| times a polynomial of it.
inline float erf_of(float x) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  float t = fabsf(x);
  t = t > 4.0f ? 4.0f : t;
  const float tt = t * t;
  float y = fmaf(-9.256217e-6f, tt, fmaf(1.1764081e-4f, t, -6.328351e-4f));
  y = fmaf(y, tt, fmaf(0.001667024f, t, -1.6039226e-4f));
  y = fmaf(y, tt, fmaf(-0.019153066f, t, 0.10277783f));
  y = fmaf(y, tt, fmaf(0.6366194f, t, 0.12837917f));
  y = fmaf(y, t, t);
  const float shifted = fmaf(y, -1.442695f, 0x1.8p23f);  // its last bits are n, as in exp
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, 1.9046542e-9f, fmaf(n, -0.6931472f, -y)), rr = r * r;
  float e = fmaf(0.0013814596f, rr, fmaf(0.0083687175f, r, 0.04166839f));
  e = fmaf(e, rr, fmaf(0.16666521f, r, 0.49999994f));
  e = fmaf(e, rr, r);  // exp(r) - 1, so that small results keep their digits
  const float power = bits_of<float>((bits_of<uint32_t>(shifted) << 23) + 0x3f800000);
  return copysignf(fmaf(-power, e, 1.0f - power), x);
#else
  return erff(x);
#endif
}
"""

CPP = Target(
    name="cpp",
    spellings=_COMMON,
    library=_LIBRARY,
    float_spellings={
        "erf": "erf_of({0})",
        "exp": "exp_of({0})",
        "sigmoid": "{one} / ({one} + exp_of(-{0}))",
    },
    definitions={"erf_of": _ERF_OF, "exp_of": _EXP_OF},
    accumulators={
        "sum": "Sum",
        "moments": "Moments<{compute}>",
        "max": "Maximum<{compute}>",
        "peak": "Peak<{compute}>",
        "pick": "Picked<{compute}>",
        "winner": "Winner<{compute}>",
    },
    source_suffix="cpp",
    is_wide=True,
    is_flat=False,
    holds_rows=False,
    in_cache=("row", "column"),
    fills_edges=False,
    joins_from=1 << 22,
    reports_errors=False,
    trailing_arguments=1,
)

CUDA = Target(
    name="cuda",
    spellings={
        **_COMMON,
        "rsqrt": "rsqrt{f}({0})",
        "sigmoid": "sigmoid({0})",
        "fma": "fma{f}({0}, {1}, {2})",
        "exp2_flushed": "exp2_flushed({0})",
        "narrow_div": "narrow_div({0}, {1})",
        "bounded_div": "bounded_div({0}, {1})",
        "narrow_bounded_div": "narrow_bounded_div({0}, {1})",
        "narrow_sqrt": "narrow_sqrt({0})",
        "narrow_sigmoid": "narrow_sigmoid({0})",
        "narrow_tanh": "narrow_tanh({0})",
        "narrow_expm1": "narrow_expm1({0})",
        "narrow_log1p": "narrow_log1p({0})",
        "narrow_pow": "narrow_pow({0}, {1})",
    },
    library={},
    float_spellings={},
    definitions={},
    accumulators={
        "sum": "Sum<{compute}>",
        "moments": "Moments<{compute}>",
        "max": "Maximum<{compute}>",
        "peak": "Peak<{compute}>",
        "pick": "Picked<{compute}>",
        "winner": "Winner<{compute}>",
    },
    source_suffix="cu",
    is_wide=False,
    is_flat=True,
    holds_rows=True,
    in_cache=(),
    fills_edges=True,
    joins_from=0,
    reports_errors=True,
    trailing_arguments=2,
)

TARGETS: Mapping[str, Target] = {target.name: target for target in (CPP, CUDA)}

# Names that generated code uses itself, and the words and functions of its languages. An operand
# that has one of them, or looks like a derived name, is called <name>_operand there.
_SPOKEN_FOR = """
    a about above abs acos acosh across add add_if add_square add_to_columns add_up again alignas
    aligned alignof alike alike_step all all_drift all_squares along along_groups and answers apart
    argmax args asin asinh asm assemble at at_1 at_2 at_3 atan atan2 atanh auto await_word b base
    base_element base_inner base_middle base_outer beats before begin behind beside best better
    beyond bfloat16 bit bits bits_of block blockDim blockIdx blocks blocks_of bool both bottom
    bounded_div break bundle bundles by candidate case catch ceil ceil_divide cell cells centre char
    class clock code coefficient column column_block columns columns_together combine combine_across
    combine_team compare compl const constexpr continue cos cosh count count_of counted counts
    cudaGetErrorString d deal decltype default definition delete device dim3 distance distance_1
    distance_2 distance_3 distances divide do double draw draw_singly drift dynamic_cast e each
    early edge edge_lane edges element elements elements_of else end enter_row enum erf erf_of erfc
    error_text excess exchange exp exp2 exp2_flushed exp_of expect explicit expm1 exponent export
    extern f fabs fabsf factor false families far few finish finite first first_element first_inner
    first_middle first_outer fit float float16 floor fma fmaf fmod fold folded follow for found
    friend from from_element from_inner from_middle from_outer further gamma gap gather given
    goto gridDim guard half head here high home i if index inline inner int int4 inverse
    inverse_length is_beside is_edge is_here is_it is_live is_low j j0 j1 jn join kept kernel
    lane lanes lanes_for larger largest last launch least leave leave_sums leave_total left
    left_of length lengths line lines linux load load_again load_anywhere load_around
    load_singly load_some log log10 log1p log2 long low lower lowest magnitude main max
    may_cross meeting memory merge merge_beside merge_columns merge_moments merge_numbers
    merge_slots merge_tree merge_trees methods min mine minimum mixed moments moments_about more
    most most_beside most_bytes move mutable n namespace narrow narrow_bounded_div narrow_div
    narrow_expm1 narrow_log1p narrow_pow narrow_sigmoid narrow_sqrt narrow_tanh near needed new
    next noexcept normal not nullptr number offset oldest on_each operator or order other out
    outer output outside own p pack packs pad padded pair part partial partials parts passing
    past pick picked piece piece_length pieces pieces_of pitch place places polynomial position
    position_of_best pow power power_of_two previous private protected public q r rank ratio
    reach register rescale resident_blocks rest result results return rint room root round
    rounded rounded_to row row_block row_cells rows rows_of_block rows_together rr rsqrt run
    scatter scratch seed send send_all send_around send_off send_own send_packs send_row
    send_rows send_tile settle share shared shared_bytes shares shift short side sides sigmoid
    sign signal signed sin sinh size size_of sizeof sizes slot slot_before slots slots_of
    slots_of_rows special split sqrt squares start static std stderr stdin stdout step stepped
    stepped_on store store_all store_anywhere store_some stored stream stretch stretch_length
    stride strip strip_width strips struct subnormal sum sum_of sum_of_warps sums switch t tail
    take taken tan tanh target task tasks template tensor term theirs then this thread threadIdx
    threads throw tile time to together top total true trunc try tt turn turns type typedef
    typename uint2 uint4 uniform union unix unmerged unsigned used using usual value values
    virtual visit void volatile w wait_for_kernel_before wait_for_sent wanted warps while whole
    wide widen width window word words x xor y y0 y1 yn z
"""
_TAKEN = frozenset(_SPOKEN_FOR.split())
# How derived names begin and end.
_BEGINNINGS = """
    _ above_ add_to_ after_ axis_ backward base_axis_ beside_ carried count_of_ d_ forward
    from_axis_ given_ held is_ kept_ maximum mean new_ peak picked_ position_ run_ spreads_
    stretched_ sums_ total variance window winner
"""
_ENDINGS = """
    _ahead _along _block _blocks _column _columns _early _edge _edges _from _here _high _in _lanes
    _line _low _memory _mine _next _operand _out _pairs _part _partials _room _rooms _row _rows
    _scratch _seed _slots _staged _stored _sum _sums _t _value
"""
_DERIVED = tuple(_BEGINNINGS.split()), tuple(_ENDINGS.split())


def code_name(operand: str) -> str:
    """What an operand is called in generated code."""
    is_constant = operand[0].isupper() or (operand[0] == "k" and operand[1:2].isupper())
    beginnings, endings = _DERIVED
    is_derived = operand.startswith(beginnings) or operand.endswith(endings)
    return f"{operand}_operand" if is_constant or is_derived or operand in _TAKEN else operand
