import torch, time, os
os.environ.setdefault("FUSEGEN_CACHE_DIR", "/tmp/fcg")
import fusegen
A="leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
D=os.environ.get("DEV","cuda")
f=fusegen.compile(A); x=torch.randn(1,4,4,8,8,device=D); b=torch.randn(4,device=D)
sync=torch.cuda.synchronize if D=="cuda" else (lambda: None)
def host(fn,n=2000):
    for _ in range(200): fn()
    best=[]
    for _ in range(9):
        sync(); t=time.perf_counter()
        for _ in range(n): fn()
        best.append((time.perf_counter()-t)/n*1e6); sync()
    return sorted(best)[4]
def show(**k): print("  ".join(f"{a} {host(v):.2f}" for a,v in k.items()), flush=True)
with torch.no_grad():
    f(x,b)
    part=f._single; p=list(part.plans.values())[0].plan
    show(call=lambda: f(x,b), part=lambda: part(x,(b,),None), run=lambda: p.run((x,b)), relu=lambda: torch.relu(x), empty_like=lambda: torch.empty_like(x))
    y=torch.empty_like(x)
    args=(x.data_ptr(),b.data_ptr(),y.data_ptr(),0,*p.sizes,p.where())
    show(launch=lambda: p.launch(*args), new_empty=lambda: x.new_empty_strided(*p.layout, dtype=p.dtype), new_empty_nodtype=lambda: x.new_empty_strided(*p.layout))
    t=(x,b)
    key=(False,*[(q.dtype,q.shape,q.stride(),q.device) for q in t])
    d=part.plans
    show(key=lambda: (False,*[(q.dtype,q.shape,q.stride(),q.device) for q in t]), hash=lambda: hash(key), get=lambda: d.get(key), key2=lambda: (False,*[(q.dtype,q.shape,q.stride(),q.device) for q in t])==key)
    sh=x.shape; dv=x.device; dt=x.dtype; st=x.stride()
    show(hshape=lambda: hash(sh), hdev=lambda: hash(dv), hdt=lambda: hash(dt), hst=lambda: hash(st), eqdev=lambda: dv==x.device, eqshape=lambda: sh==x.shape, nothing=lambda: None, index=lambda: x.get_device(), iscuda=lambda: x.is_cuda)
xg=x.clone().requires_grad_(); bg=b.clone().requires_grad_()
show(grad=lambda: f(xg,bg), eagerA=lambda: f.reference(xg,bg))
