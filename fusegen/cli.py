"""The command `fusegen`: dump, explain, ops, check, bench, cache and doctor."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fusegen import __version__, cache
from fusegen.bench import command as bench_command
from fusegen.describe import LAYOUTS, Situation, named_shapes, sources
from fusegen.dsl import parse
from fusegen.errors import BuildError, CacheError, FusegenError
from fusegen.explain import explain
from fusegen.ops import OPS, lookup
from fusegen.promotion import FLOATING, INTEGERS
from fusegen.target import GPUS, H200_GB_PER_S, TARGETS, Limits

OK, CHECK_FAILED, USER_MISTAKE, CANNOT_BUILD = range(4)
INTERRUPTED, PIPE_CLOSED = 128 + 2, 128 + 13  # as a shell reports SIGINT and SIGPIPE

_EPILOG = """\
exit codes:
  0  all went well
  1  `check` or `bench` found an error that is larger than allowed
  2  a mistake in the command line, the chain, a shape or a module that --import names
  3  a compiler is missing or failed, or the cache cannot be used
"""
_CHECK_RULE = """\
x, the operands and the incoming gradient are random. fusegen and eager torch both run in float32
and are compared with eager torch in float64 on the same values; the largest difference counts.
fusegen may be as far off as twice eager's own error plus 8 ulp of the largest value. In float64
the reference is eager's own result, so eager's error is estimated from the one in float32, by the
ratio of the two types' precision (shown with ~), and 8 times it is allowed, plus the 8 ulp. In
float16 and bfloat16, which --dtype asks for, it is twice eager's error plus 1 ulp.
"""
_STRUCTURAL = {
    "keep": ("keep(name)", "Name the running value, so that a later step may use it as operand."),
    "give": (
        "give(name)",
        "Name the running value, as keep does, and return it as well.",
    ),
    "recall": ("recall(name)", "Go on with a kept value in place of the running one."),
    "operand": ("operand(name)", "Go on with an operand in place of the running value."),
    "takes": ("takes(name, ...)", "List the operands: a call takes them in this order."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; --help and a wrong option end in SystemExit."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    imports: Sequence[str] = getattr(options, "imports", None) or ()
    try:
        for module in imports:
            _import(module)
        code = run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as head, has enough; Python's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (BuildError, CacheError) as error:
        return _complain(error, CANNOT_BUILD)
    except FusegenError as error:
        return _complain(error, USER_MISTAKE)
    except OSError as error:
        return _complain(f"{error.filename or 'the output'}: {error.strerror}", USER_MISTAKE)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _complain("this command needs torch; pip install torch", CANNOT_BUILD)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        place = _place_in_users_code(error, imports)
        if place is None:
            raise
        return _complain(f"{place}: {type(error).__name__}: {error}", USER_MISTAKE)


def _complain(error: Exception | str, code: int) -> int:
    print(f"fusegen: {error}", file=sys.stderr)
    return code


def _place_in_users_code(error: Exception, modules: Sequence[str]) -> str | None:
    """Where in a module that --import named an error arose, or None where it is fusegen's own."""
    files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def _import(module: str) -> None:
    """Import the user's module, which registers his operations; from the current directory too."""
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except FusegenError:
        raise
    except Exception as error:
        what = f"--import {module}: {type(error).__name__}: {error}"
        raise FusegenError(what) from error
    finally:
        sys.path.remove(os.getcwd())


# The command line.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusegen",
        description="Fuse a chain of operations into one kernel, forward and backward.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusegen {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        help="import a module that registers operations of your own; may be repeated",
    )
    shapes = argparse.ArgumentParser(add_help=False, parents=[own])
    shapes.add_argument(
        "--shape", type=_shape, metavar="N,N,...", help="x's shape, such as 8,64,14,62,62"
    )
    shapes.add_argument(
        "--operand",
        type=_named_shape,
        metavar="NAME=N,N,...",
        action="append",
        default=[],
        help="an operand's shape, where it is not the plain one; may be repeated",
    )
    shapes.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of x in memory")
    situation = argparse.ArgumentParser(add_help=False, parents=[shapes])
    situation.add_argument("chain", metavar="CHAIN", help="such as 'add_channel | gelu'")

    gpus = (*GPUS, "here")
    gpu_help = "that CUDA is for (default: H200); here: the one that torch finds, as for a call"
    dump = commands.add_parser(
        "dump",
        parents=[situation],
        help="print the source that a chain becomes",
        description="Print the source that a chain becomes. Needs no torch, GPU or compiler.",
    )
    dump.add_argument("--target", choices=sorted(TARGETS), default="cuda")
    dump.add_argument("--gpu", choices=gpus, default="H200", help=gpu_help)
    dump.add_argument("--dtype", choices=(*FLOATING, *INTEGERS), default="float32")
    dump.add_argument("--grad", action="store_true", help="with the backward for every input")
    dump.add_argument(
        "--gaps",
        metavar="NAME",
        action="append",
        default=[],
        help="x or an operand that is dense but for gaps, as half of each row of a larger tensor "
        "is; may be repeated. Where it would be copied first, the source is the copy's",
    )
    dump.add_argument("-o", dest="output", type=Path, metavar="FILE", help="write there instead")
    dump.set_defaults(run=_dump)

    told = commands.add_parser(
        "explain",
        parents=[situation],
        help="tell which kernels a chain becomes, and what they cost",
        description="Tell which kernels a chain becomes: the steps that each holds, the bytes that "
        "it reads and writes, what is saved for the backward, and why the chain is cut where it "
        "is. Needs no torch, GPU or compiler.",
    )
    told.add_argument("--target", choices=sorted(TARGETS), default="cuda")
    told.add_argument("--gpu", choices=gpus, default="H200", help=gpu_help)
    told.add_argument("--dtype", choices=(*FLOATING, *INTEGERS), default="float32")
    told.add_argument(
        "--bandwidth",
        type=_bandwidth,
        default=H200_GB_PER_S,
        metavar="GB/S",
        help="that the limits are for (default: %(default)s, a copy on an H200 as measured)",
    )
    told.set_defaults(run=_explain)

    ops = commands.add_parser(
        "ops", parents=[own], help="list the operations", description="List the operations."
    )
    ops.add_argument("name", nargs="?", metavar="NAME", help="tell everything about this one")
    ops.set_defaults(run=_ops)

    check = commands.add_parser(
        "check",
        parents=[situation],
        help="build a chain and compare it with eager torch",
        description=f"Build a chain and compare it with eager torch.\n\n{_CHECK_RULE}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:1")
    check.add_argument(
        "--dtype", choices=FLOATING, help="of the results (default: float32, and then float64)"
    )
    check.add_argument("--seed", type=int, default=0, help="of the random values (default: 0)")
    check.set_defaults(run=_check)

    bench = commands.add_parser(
        "bench",
        parents=[shapes],
        help="measure chains beside eager torch and torch.compile",
        description=bench_command.__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_command.add_arguments(bench)
    bench.set_defaults(run=bench_command.run)

    stored = commands.add_parser(
        "cache",
        help="show or empty the cache of built modules",
        description=cache.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stored.add_argument("action", choices=("path", "list", "clear"))
    stored.set_defaults(run=_cache)

    doctor = commands.add_parser(
        "doctor",
        help="tell what fusegen finds on this machine",
        description="Tell what fusegen finds on this machine; exit code 3 where it cannot build.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _shape(text: str) -> tuple[int, ...]:
    words = [word for word in text.strip("()[] ").split(",") if word.strip()]
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted sizes such as 8,64,14,62,62")
    if math.prod(map(int, words)) >= 1 << 48:
        raise argparse.ArgumentTypeError(f"got {text!r}, more elements than any memory has")
    return tuple(map(int, words))


def _bandwidth(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted GB/s above 0, such as 4290")
    return found


def _named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, sizes = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted NAME=SHAPE such as bias=64")
    return name.strip(), _shape(sizes)


def _situation(options: argparse.Namespace, dtype: str, gpu: str = "H200") -> Situation:
    shapes = named_shapes(options.operand)
    return Situation(options.shape, shapes, dtype, options.layout, _limits(gpu))


def _limits(gpu: str) -> Limits:
    if gpu in GPUS:
        return GPUS[gpu]
    # Here, because it imports torch.
    from fusegen.modules import limits_here

    return limits_here()


# The commands.


def _dump(options: argparse.Namespace) -> int:
    situation = _situation(options, options.dtype, options.gpu)
    situation = replace(situation, gaps=tuple(options.gaps))
    found = sources(parse(options.chain), options.target, situation, grad=options.grad)
    text = "\n".join(source.text for source in found)
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return OK


def _explain(options: argparse.Namespace) -> int:
    situation = _situation(options, options.dtype, options.gpu)
    print(explain(parse(options.chain), options.target, situation, options.bandwidth))
    return OK


def _ops(options: argparse.Namespace) -> int:
    if options.name is not None:
        print(_help_on(options.name))
        return OK
    rows = [(found.signature, found.summary) for found in OPS.values()] + [*_STRUCTURAL.values()]
    width = min(max(len(signature) for signature, _ in rows), 44)
    for signature, summary in sorted(rows):
        if len(signature) > width:
            print(signature)
            signature = ""
        print(f"{signature:{width}}  {summary}")
    return OK


def _help_on(name: str) -> str:
    if name in _STRUCTURAL:
        return "\n\n".join(_STRUCTURAL[name])
    found = lookup(name)
    also = f"\nalso called {', '.join(found.aliases)}" if found.aliases else ""
    return f"{found.signature}{also}\n\n{found.doc}"


def _check(options: argparse.Namespace) -> int:
    chain = parse(options.chain)
    # Here, because it imports torch.
    from fusegen.compare import compare

    situation = _situation(options, "float32")
    rows = compare(chain, situation, options.device, options.seed, options.dtype)
    print(f"{chain.text}\nlargest error against eager in float64; {options.device}\n")
    width = max(len(row.result) for row in rows)
    first = max(len(row.dtype) for row in rows)
    print(f"{'':{first}}  {'':{width}}   fusegen     eager   allowed")
    for row in rows:
        about = "~" if row.dtype == "float64" else " "
        print(
            f"{row.dtype:{first}}  {row.result:{width}}  {row.fused_error:8.1e} {about}"
            f"{row.eager_error:8.1e}  {row.allowed_error:8.1e}{'' if row.is_good else '  FAILED'}"
        )
    bad = sum(not row.is_good for row in rows)
    print(f"\n{bad} of {len(rows)} failed" if bad else "\nall within what is allowed")
    return CHECK_FAILED if bad else OK


def _cache(options: argparse.Namespace) -> int:
    if options.action == "path":
        print(cache.cache_root())
    elif options.action == "clear":
        count = cache.clear()
        print(f"removed {count} build{'s' * (count != 1)} from {cache.cache_root()}")
        if left := len(cache.list_entries()):
            return _complain(f"{left} cannot be removed; see who may write there", CANNOT_BUILD)
    else:
        for entry in cache.list_entries():
            built = entry.manifest
            size_kib = built.size_bytes / 1024
            place = entry.directory.parent.name
            print(
                f"{built.date}  {built.target:4} {size_kib:6.0f} KiB  {place}  {built.chain_text}"
            )
    return OK


def _doctor(options: argparse.Namespace) -> int:
    # Here, because what it imports may import torch, which may be what is missing.
    from fusegen import toolchain

    lacks: list[str] = []

    def tell(what: str, found: str | None, remedy: str = "") -> None:
        if found is None and remedy:
            lacks.append(what)
        print(f"{what:8}  {found or f'missing; {remedy}'}")

    tell("fusegen", f"{__version__} in {Path(__file__).parent}")
    tell("python", f"{platform.python_version()} in {sys.prefix}")
    try:
        import torch  # late: the other commands run without it

        tell("torch", str(torch.__version__))
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except ImportError:
        tell("torch", None, "pip install torch")
        gpus = []
    cxx, nvcc = toolchain.cxx_path(), toolchain.nvcc_path()
    searched = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    tell("ninja", shutil.which("ninja", path=searched), "pip install ninja")
    tell("c++", cxx and toolchain.compiler_version(cxx), toolchain.INSTALL_CXX)
    tell("GPU", ", ".join(gpus) or "none that torch can use")
    if gpus or nvcc:
        tell("nvcc", nvcc and toolchain.compiler_version(nvcc), toolchain.INSTALL_NVCC)
    tell("cache", f"{cache.cache_root()} ({len(cache.list_entries())} builds)")
    return CANNOT_BUILD if lacks else OK
