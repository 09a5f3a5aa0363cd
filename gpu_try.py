import torch, sys, time, os
os.environ.setdefault("FUSEGEN_CACHE_DIR", "/tmp/fcg")
from fusegen.dsl import chain
from fusegen.runtime import Fused
torch.manual_seed(0)
D=os.environ.get("DEV","cuda")
def check(text, shape, ops={}, dtype=torch.float64, fmt=None, second=True):
    try:
        f = Fused(chain(text))
        x = torch.randn(shape, dtype=dtype, device=D)
        if fmt: x = x.contiguous(memory_format=fmt)
        x.requires_grad_()
        os_ = [torch.randn(s, dtype=dtype, device=D).requires_grad_() for s in ops.values()]
        y = f(x, *os_); r = f.reference(x, *os_)
        assert y.shape == r.shape and y.dtype == r.dtype, (y.shape, r.shape)
        g = torch.randn_like(r)
        a = torch.autograd.grad(y, (x, *os_), g); b = torch.autograd.grad(r, (x, *os_), g)
        e = [(y-r).abs().max().item()] + [(p-q).abs().max().item() for p,q in zip(a,b)]
        with torch.no_grad():
            e.append((f(x,*os_)-r).abs().max().item())
        ok2=None
        if second and dtype==torch.float64 and x.numel()<1000: ok2 = torch.autograd.gradgradcheck(f, (x, *os_), atol=1e-4)
        print(text, shape, str(dtype)[6:], fmt, ["%.1e"%v for v in e], "bitwise", torch.equal(y,r), ok2, flush=True)
    except Exception as ex:
        print("FAIL", text, shape, dtype, repr(ex)[:600], flush=True)
S=(2,3,4,6,4)
A="leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
check(A, S, {'bias':(3,)})
check(A, S, {'bias':(3,1,1,1)}, fmt=torch.channels_last_3d)
for dt in (torch.float32, torch.bfloat16, torch.float16):
    check(A, (4,64,13,61,59), {'bias':(64,)}, dtype=dt)
    check(A, (4,64,14,62,62), {'bias':(64,)}, dtype=dt, fmt=torch.channels_last_3d)
check("leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)", S, {'scale':(3,)})
check("leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)", (2,3,5,5,4), {'scale':(3,)}, fmt=torch.channels_last_3d)
check("leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)", (8,32,32,64,64), {'scale':(32,)}, torch.float32)
check("layernorm(4, weight, bias) | gelu | mul(0.5)", (2,3,2,4), {'w':(4,),'b':(4,)})
check("layernorm(4, weight, bias) | gelu | mul(0.5)", (2,3,2,4), {'w':(4,),'b':(4,)}, fmt=torch.channels_last)
check("layernorm(64, weight, bias) | gelu | mul(0.5)", (8,64,8,64,64), {'w':(64,),'b':(64,)}, torch.float32)
check("layernorm(weight, bias, axis=1) | gelu", (2,3,2,4), {'w':(3,),'b':(3,)})
check("layernorm(weight, bias, axis=1) | gelu", (8,96,56,56), {'w':(96,),'b':(96,)}, torch.float32)
check("layernorm(weight, bias, axis=1) | gelu", (2,3,2,4), {'w':(3,),'b':(3,)}, fmt=torch.channels_last)
check("add(r) | layernorm((2,4)) | mul_channel", (2,3,2,4), {'r':(2,3,2,4),'s':(3,)})
check("keep(y) | sigmoid | mul(y) | add(p) | mul_channel(q)", (2,3,2,4), {'p':(3,1,4),'s':(3,)})
check("layernorm | max_pool2d(2)", (2,3,4,4))
check("layernorm(weight, bias)", (3, 262144), {'w':(262144,),'b':(262144,)})
check("add_channel | gelu", (65536,256), {'b':(256,)}, torch.float32)
def bench(fn, n=20):
    for _ in range(3): fn()
    ts=[]
    for _ in range(n):
        a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
        a.record(); fn(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts)//2]
if D=="cpu": sys.exit()
def perf(name, text, shape, ops, dtype=torch.float32, fmt=None):
    try:
        f=Fused(chain(text)); x=torch.randn(shape, device=D, dtype=dtype)
        if fmt: x=x.contiguous(memory_format=fmt)
        os_=[torch.randn(s,device=D,dtype=dtype) for s in ops]
        y=torch.empty_like(x); c=bench(lambda: y.copy_(x)); del y
        with torch.no_grad(): fw=bench(lambda: f(x,*os_))
        xg=x.detach().requires_grad_(); og=[o.detach().requires_grad_() for o in os_]
        out=f(xg,*og); g=torch.randn_like(out); del out
        fb=bench(lambda: torch.autograd.grad(f(xg,*og),(xg,*og),g))
        print(f"{name:12s} {dtype} copy {c:.3f} ms  fwd {fw/c:.3f}  fwd+bwd {fb/c:.3f}", flush=True)
    except Exception as ex: print("FAIL", name, repr(ex)[:500])
perf("A", A, (128,64,14,62,62), [(64,)])
perf("A odd", A, (128,64,13,61,59), [(64,)])
perf("A cl", A, (128,64,14,62,62), [(64,)], fmt=torch.channels_last_3d)
perf("A bf16", A, (128,64,14,62,62), [(64,)], torch.bfloat16)
perf("B", "layernorm(64, weight, bias) | gelu | mul(0.5)", (32,64,32,64,64), [(64,),(64,)])
perf("C", "leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)", (128,32,32,64,64), [(32,)])
perf("LN4096", "layernorm(weight, bias)", (16384,4096), [(4096,),(4096,)])
perf("LNch", "layernorm(weight, bias, axis=1)", (256,96,56,56), [(96,),(96,)])
perf("bias256", "add_channel | gelu", (65536,256), [(256,)])
if D=="cpu": sys.exit()
f=Fused(chain(A)); x=torch.randn(1,4,4,8,8,device=D); b=torch.randn(4,device=D)
def host(fn,n=3000):
    for _ in range(100): fn()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): fn()
    e=time.perf_counter()-t; torch.cuda.synchronize(); return e/n*1e6
with torch.no_grad(): print("host no grad %.2f us"%host(lambda: f(x,b)), "relu %.2f"%host(lambda: torch.relu(x)), "empty_like %.2f"%host(lambda: torch.empty_like(x)))
xg=x.clone().requires_grad_(); bg=b.clone().requires_grad_()
print("host grad %.2f us"%host(lambda: f(xg,bg)))
call=list(f._single.plans.values())[0]
print("plan.run %.2f"%host(lambda: call.plan.run((x,b))))
import shutil; shutil.rmtree("/tmp/fcg"); 
from fusegen import runtime
runtime._modules.clear(); f=Fused(chain(A)); t=time.perf_counter(); f(xg,bg); print("cold build A fwd+bwd %.2f s"%(time.perf_counter()-t))
