import torch, time, os
os.environ.setdefault("FUSEGEN_CACHE_DIR", "/tmp/fcg")
from fusegen.dsl import chain
from fusegen.runtime import Fused
A="leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
D="cuda"
f=Fused(chain(A)); x=torch.randn(1,4,4,8,8,device=D); b=torch.randn(4,device=D)
def host(fn,n=2000):
    for _ in range(200): fn()
    best=[]
    for _ in range(7):
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(n): fn()
        best.append((time.perf_counter()-t)/n*1e6); torch.cuda.synchronize()
    return sorted(best)[3]
with torch.no_grad():
    f(x,b)
    print("no grad %.2f"%host(lambda: f(x,b)), "relu %.2f"%host(lambda: torch.relu(x)), "add %.2f"%host(lambda: x+1.0), "empty_like %.2f"%host(lambda: torch.empty_like(x)))
    p=list(f._single.plans.values())[0].plan
    print("plan.run %.2f"%host(lambda: p.run((x,b))))
    y=torch.empty_like(x)
    args=(x.data_ptr(),b.data_ptr(),y.data_ptr(),0,*p.sizes,p.where())
    print("launch %.2f"%host(lambda: p.launch(*args)))
    print("alloc %.2f"%host(lambda: p.allocators[0]()), "where %.2f"%host(p.where))
    print("key %.2f"%host(lambda: [(t.dtype, t.shape, t.stride(), t.device) for t in (x,b)]), "data_ptr %.2f"%host(lambda: x.data_ptr()))
    print("new_empty_strided %.2f"%host(lambda: x.new_empty_strided((1,4,4,8,8),(1024,256,64,8,1))))
    print("eager A %.2f"%host(lambda: f.reference(x,b)))
xg=x.clone().requires_grad_(); bg=b.clone().requires_grad_()
print("grad %.2f"%host(lambda: f(xg,bg)), "eager A grad %.2f"%host(lambda: f.reference(xg,bg)))
class T2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *t):
        ctx.save_for_backward(*t); return torch.empty_like(t[0])
    @staticmethod
    def backward(ctx, g): return g, None
print("trivial function %.2f"%host(lambda: T2.apply(xg,bg)))
