"""One small run of every kernel family, forward and backward, for compute-sanitizer."""
import os
os.environ.setdefault("FUSEGEN_CACHE_DIR", "/tmp/fcs")
import torch, fusegen
C=[("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu",(3,5,7,9),[(5,)]),
("add_channel | gelu",(67,33),[(33,)]),
("leaky_relu(0.2) | mul_channel | max_pool2d(2)",(2,3,5,7),[(3,)]),
("mul(p) | max_pool2d(2)",(2,3,5,7),[(7,)]),
("layernorm(weight, bias) | gelu",(37,129),[(129,),(129,)]),
("layernorm(weight, bias, axis=1)",(2,19,5,7),[(19,),(19,)]),
("add(r) | mul(q)",(5,6,7),[(5,6,7),(6,1)]),
]
for dt in (torch.float32, torch.bfloat16):
    for t,s,o in C:
        f=fusegen.compile(t); x=torch.randn(s,device="cuda",dtype=dt).requires_grad_(); os_=[torch.randn(q,device="cuda",dtype=dt).requires_grad_() for q in o]
        y=f(x,*os_); g=torch.autograd.grad(y,(x,*os_),torch.randn_like(y))
        with torch.no_grad(): f(x,*os_)
        assert all(torch.isfinite(v).all() for v in g)
import fusegen.execution as E, fusegen.signature as S
S._LONG_ROW, S._FEW_ROWS = 64, 10**6
f=fusegen.compile("layernorm(weight, bias) | gelu"); x=torch.randn(7,1000,device="cuda").requires_grad_(); w=torch.randn(1000,device="cuda").requires_grad_(); b=torch.randn(1000,device="cuda").requires_grad_()
y=f(x,w,b); torch.autograd.grad(y,(x,w,b),torch.randn_like(y)); torch.cuda.synchronize(); print("ran all")
