import sys, statistics, torch
sys.path.insert(0, '.')
from fusegen.bench import timing
from fusegen.bench.measure import Bench, MODES
from fusegen.bench.rivals import fused_of, eager_of, limits_of
from fusegen.bench.works import WORKS
T = timing.CudaTimer()
other = torch.empty(256 << 20, dtype=torch.uint8, device="cuda").view(torch.int32)
def dirty(run, turn): return T(run, turn).device_s
def own(run, turn):
    T.flush.zero_()
    held = run(turn + 1)
    T.pause(3_000_000)
    T.start.record(); r = run(turn); T.end.record(); T.end.synchronize()
    del held, r
    return T.start.elapsed_time(T.end) / 1e3
def clean(run, turn):
    T.flush.zero_(); other.sum()
    T.pause(3_000_000)
    T.start.record(); r = run(turn); T.end.record(); T.end.synchronize()
    return T.start.elapsed_time(T.end) / 1e3
names = sys.argv[1].split(",")
for name in names:
    w = [w for w in WORKS if w.name == name][0]
    b = Bench(w, "cuda", {"fusegen": fused_of(w)})
    for i, mode in enumerate(MODES):
        run = b.runs(mode)["fusegen"]
        out = []
        for t in (dirty, own, clean):
            for _ in range(3): t(b.copy, 0), t(run, 0)
            c, f = [], []
            for k in range(15):
                c.append(t(b.copy, k)); f.append(t(run, k))
            c, f = statistics.median(c), statistics.median(f)
            out.append(f"{t.__name__} {f/c:.3f} ({c*1e6:.1f} {f*1e6:.1f})")
        print(name, mode[:10], "limit %.2f" % limits_of(w, "cuda")[i], *out, flush=True)
    del b; torch.cuda.empty_cache()
