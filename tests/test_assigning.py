"""What functions do to values in place: x[key] = value, and new values by old names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusegen
from fusegen.errors import ChainError


def negative(x):
    y = x * 2
    y[y < 0] = 0
    return y.sum(1)


def first_column(x):
    y = x.clone()
    y[:, 0] = 1.5
    return y * x


def middle(x, v):
    y = x * 2
    y[:, 1:3] = v
    return y


def added_to_a_part(x, v):
    y = x * 2
    y[..., :2] += v
    y[0] += y[1]
    y[:, 3] *= 2
    return y.relu()


def boxes(x, v):
    y = x.tanh() * 2
    y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + v) * 8
    y[..., 2:4] = (y[..., 2:4] * 2) ** 2
    return y


def masked(x, mask):
    s = x * 0.5
    s[~mask] = float("-inf")
    return s.softmax(-1)


def interleaved(x):
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2].sin()
    out[..., 1::2] = x[..., 1::2].cos()
    return out


def made(x):
    out = torch.zeros(3, 4, dtype=x.dtype)
    out[1:] = x[:-1]
    s = out.sum(1)
    out[0] = 5
    return out * s[:, None] + out.mean()


def copied_within(x):
    y = x * 2
    y[0] = 0
    y[:, -1] = y[:, 0]
    return y.tanh()


def by_index(x, index):
    y = x * 2
    y[index] = 0.0
    return y


def mask_of_parts(x):
    m = x > 0
    m[:, 0] = True
    m[:, 1] = False
    m[:, 2] = x[:, 3] > 0
    return torch.where(m, x, 0.0)


def everywhere(x):
    y = x * 2
    y[...] = 3
    return y + x


def one_place(x, v):
    y = x * 2
    y[:, 3] = v[:, 0]
    y[1, 2] = v[0, 1]
    return y.exp()


def by_a_value(x):
    y = x * 2
    y[y > 1] = y.mean()
    return y


def seen_in_another_shape(x):
    y = (x * 2).view(-1)
    y[::2] = 0
    return y.view(3, 4)


def of_a_copy(x):
    y = x * 2
    z = y.clone()
    z[:, 0] = 0
    return y + z


def without_gradients(x):
    with torch.no_grad():
        m = x * 2
        m[m < 0] = 0
    return m * x


def in_a_loop(x):
    y = x + 1
    for i in range(3):
        y[:, i] = y[:, i] * (i + 1)
    return y


def by_two_names(x):
    y = z = x * 2
    z += 1
    z.mul_(3)
    F.silu(y, inplace=True)
    return z * y


def step_by_step(x, v):
    y = x * 2
    y.clamp_(-1, 1)
    y.sub_(y.mean(1, keepdim=True))
    y[:, :2].sum()
    y += v.sum()
    return y


def normalised(x):
    y = x.softmax(-1) * 1.5
    y.masked_fill_(y < 0.2, 0.0)
    y.div_(y.sum(-1, keepdim=True))
    return y


def cast_and_changed(x):
    h = x.abs().double()
    h *= 2
    return h.to(x.dtype)


def ended(x):
    sums = []
    y = x * 2
    for i in range(2):
        y += i + 1
        sums.append(y.sum(1))
    return torch.stack(sums)


def scattered(x):
    y = x * 2
    y.index_fill_(1, torch.tensor([0, 2]), 1.0)
    return y.slice_scatter(x[:1], 0, 0, 1).exp()


def replaced(x):
    y, z = x * 2, torch.empty_like(x)
    z.copy_(x.sin())
    m = x > 0
    w = torch.zeros(3, 4, dtype=x.dtype)
    w.copy_(z[0])
    y.zero_()
    y += z
    z.fill_(2)
    return y * z + m + w


ONE = [
    replaced,
    negative,
    first_column,
    interleaved,
    made,
    copied_within,
    mask_of_parts,
    everywhere,
]
ONE += [by_a_value, seen_in_another_shape, of_a_copy, without_gradients, in_a_loop, by_two_names]
ONE += [normalised, cast_and_changed, ended, scattered, replaced]
TWO = [middle, added_to_a_part, boxes, one_place, step_by_step]


def _agree(function, *tensors):
    # Roundings of float64 add up to less.
    found, wanted = fusegen.compile(function)(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert found.stride() == wanted.stride()
    learning = [t for t in tensors if t.is_floating_point()]
    d = torch.randn_like(wanted)
    for own, theirs in zip(
        torch.autograd.grad(found, learning, d),
        torch.autograd.grad(wanted, learning, d),
        strict=True,
    ):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-9)


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("function", ONE)
def test_values_are_changed_in_place_as_in_eager(function):
    _agree(function, _random(3, 4))


@pytest.mark.parametrize("function", TWO)
def test_values_are_changed_by_operands_as_in_eager(function):
    _agree(function, _random(3, 4), _random(3, 2))


def test_places_may_be_told_by_masks_and_indices():
    mask = torch.tensor([True, False, True, True])
    _agree(masked, _random(3, 4), mask.expand(3, 4).clone())
    _agree(by_index, _random(3, 4), torch.tensor([0, 2]))


def test_a_number_put_somewhere_is_in_the_same_kernel():
    compiled = fusegen.compile(masked).compiled_for(
        torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    )
    assert compiled.chain.text.count("masked_fill") == 1
    compiled = fusegen.compile(first_column).compiled_for(torch.randn(3, 4))
    assert "masked_fill" in compiled.chain.text  # and no copy
    assert "clone" not in compiled.chain.text


def test_what_is_changed_in_place_keeps_its_type():
    def added(x, b):
        y = x * 2
        y += b
        y.mul_(b)
        return y

    x, b = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(4)
    found = fusegen.compile(added)(x, b)
    assert found.dtype == torch.bfloat16
    # A rounding of 2**-8 more or less, of values below 16.
    torch.testing.assert_close(found, added(x, b), rtol=2**-6, atol=2**-4)


def test_a_copy_is_a_value():
    x = torch.randn(3, 4)
    found = fusegen.compile(lambda x: x.clone())(x)
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


# Statements about x of 3 rows and 4 columns.
AS_EAGER = [
    "p=(x*2).split(2,-1); q=p[0]+0; k=p[1]; q*=3; return q*k",
    "y=x.clamp(-.5,.5); y[::2]+=1; return y",
    "y=x*2; q=y[:,:2]; q+=1; k=y[:,2:]; return q*k",
    "q=x.exp()[:,:2]; q+=1; k=x[:,2:]; return q*k",
    "y=x*2; y[1:]=x[:-1]; return y[:-1]+x[1:]",
    "y=x*2; y[1:]=x[:2]; return y[:2]*2",
    "y=x*2; y[torch.tensor([1,0])]=1; return y[1:]+1",
    "y=x*2; y[torch.tensor([1,0])]=1; return y.t()*2",
    "o=torch.empty_like(x); o[...,:2]=x[...,2:]; o[...,2:]=x[...,:2]; return o[1:]*2",
    "y=x*2; y[0]=1; return y.t().t()*1",
    "y=x*2; y[0]=1; return y.t()[1:]*2",
    "y=x*2; y[x>0]=1; return y.t().t()*2",
    "y=torch.zeros_like(x); y[0]=x[0]; return y.t().t()*2",
    "return x.masked_fill(x>0,1.).t()[1:]*2",
    "m=torch.arange(4)>1; return (x*2).masked_fill(m,0).t().t()*2",
    "y=x*2; z=x+1; z[torch.tensor([0,2])]=1; y[torch.tensor([0,1])]=z[:2]; return y",
    "y=x*2; y[:]=x; y[:,:]=y+1; y[...]=y.t().t(); return y",
    "y=(x*2).t(); z=y.contiguous(); z+=1; return y*z",
    "y=x.t(); z=y.contiguous(); z+=1; return y*z",
    "y=x*2; y[[0,2]]=x[:2]; return y",
    "y=x*2; y[[1]]=x[:1]; y[:,[1,3]]=0; return y",
    "y=x*2; y[[True,False,True]]=.3; return y",
    "y=x*2; i=x.argmax(-1,keepdim=True); y.scatter_(-1,i,0.); return y",
    "y=x*2; i=x.argmax(-1); y[torch.arange(3),i]=0; return y",
    "y=x*2; y[0]=float('nan'); return y",
    "a=torch.zeros_like(x); b=torch.zeros_like(x); a[0]=x[0]; b[1]=x[1]; return a*x+b",
    "a=x.clone(); b=x.clone(); a[:,0]=0; b[:,1]=0; return a*b",
    "a,b=(x*2)[:,:2],(x*2)[:,2:]; a+=1; return a*b",
    "y=x*2; q=y[:,:2]; k=y[:,2:]; q+=1; return q*k",
    "y=x*2; q=y[...,::2]; k=y[...,1::2]; q*=3; return q*k",
    "return (x*2).t().contiguous()",
    "return (x.t()*2).contiguous(), x.t().exp()",
]
SHARED = [
    "v=x.exp(); u=v.split(1,0)[1]; v.neg_(); return u*2",
    "v=x.amax(0); u=v.squeeze(-1); F.hardtanh(u,-1,1,True); v[0]=2; return u*2",
    "v=x*5; v[0].mul_(3.); return v[:,1:3]",
    "v=x*5; v.view(-1).mul_(3.); return v.t()",
    "v=x*5; u=v.view(-1); u*=3; return v.flip(-1)",
    "v=x*5; u=v.to(x.dtype); u*=3; return v.roll(1,0)",
    "v=x*2; v.t()[torch.arange(2)]=0; return v.flip(-1)",
    "v=x.mean(0,keepdim=True); u=v.expand(2,3,4); v.tanh_(); return F.pad(u,(1,0))",
    "v=x*2; u=v.t(); u+=1; v*=2; return u",
    "v=x*2; u=v.detach(); u+=1; v*=2; return u+x",
    "v=x*2; u=v[0]; v/=2; u.relu_(); return v*3",
    "v=x*2; u=F.dropout(v,.5,False); u.abs_(); v.tanh_(); return u",
    "y=x*2; a=y[:,:3]; b=y[:,1:]; a+=1; return b",
    "y=x*2; a=y[:2]; b=y[1:]; a*=2; return a+b",
    "y=x*2; a=y[0]; b=y[:,0]; a+=1; return b",
    "y=x*2; a=y[-1]; b=y[2]; b+=1; return a",
    "y=x*2; a=y[:,-1]; b=y[...,3]; b.mul_(3); return a",
    "y=x*2; a=y[0]; b=y[0:1]; b+=1; return a",
    "y=x*2; a=y[:,1:]; b=y[:,1:]; b[:]=0; return a",
    "y=x*2; r=y.unbind(1); b=y[1]; b.mul_(3); return r[1]",
    "y=x*2; a=y.diagonal(); b=y[0]; b[:]=5; return a",
    "y=x*2; r=[y[i] for i in range(3)]; y[0]=0; return torch.stack(r)",
    "y=x*2; y[1]=y[0].mul_(3); return y",
    "y=x*2; a=y[0]; a+=1; y[1]=a; return y*2",
    "y=x*2; a=y[:,:2]; a+=1; y[:,2:]=a; return y*2",
    "y=x*2; y[:,2:]=F.relu(y[:,:2],inplace=True); return y",
    "y=x*2; z=F.dropout(y,0.5,training=False); z+=1; return y*z",
    "y=x*2; z=nn.Dropout(.5).eval()(y); z+=1; return y*z",
]
MADE = [
    "v=torch.zeros(3,4,dtype=x.dtype); v[:,1].add_(x[:,0]); return v+x",
    "v=torch.zeros(3,4,dtype=x.dtype); v.diagonal().add_(x[:,0]); return v+x",
    "o=torch.zeros(3,4,dtype=x.dtype); v=o[1]; v+=x[0]; return o*x",
    "o=torch.zeros(3,4,dtype=x.dtype); o[0].add_(x[0]); return o+x",
    "o=torch.zeros(3,4,dtype=x.dtype); o.view(-1)[:4].add_(x[0]); return o*x",
    "o=torch.zeros(3,4,dtype=x.dtype); v=o[1]; o[1]=x[0]; return v*x",
    "o=torch.zeros(4,3,dtype=x.dtype); v=o.t(); v[0]=x[0]; return o.t()*x+o.sum()",
    "o=torch.zeros(3,4,dtype=x.dtype); v=o.view(-1); v[:4]=x[0]; return o",
    "o=x.new_zeros(3,4); p=o[:,:2]; p+=x[:,:2]; return o+x",
]


def _stating(text):
    """The function of x that has these statements."""
    lines = "".join(f"    {line.strip()}\n" for line in text.split(";"))
    names = {"torch": torch, "F": F, "nn": nn}
    exec(f"def stated(x):\n{lines}", names)
    return names["stated"]


@pytest.mark.parametrize("text", AS_EAGER)
def test_statements_do_what_they_do_in_eager(text):
    function, x = _stating(text), _random(3, 4)
    found, wanted = fusegen.compile(function)(x), function(x.clone())
    found, wanted = (r if isinstance(r, tuple) else (r,) for r in (found, wanted))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert [r.stride() for r in found] == [r.stride() for r in wanted]
    assert [r.requires_grad for r in found] == [r.requires_grad for r in wanted]


@pytest.mark.parametrize("text", SHARED)
def test_what_shares_its_memory_is_not_changed(text):
    with pytest.raises(ChainError, match="changes a value that is used elsewhere too"):
        fusegen.compile(_stating(text))(torch.randn(3, 4))


@pytest.mark.parametrize("text", MADE)
def test_what_is_made_is_not_changed_by_way_of_a_view(text):
    with pytest.raises(ChainError, match="another one has the same memory"):
        fusegen.compile(_stating(text))(torch.randn(3, 4, dtype=torch.float64))


def test_what_has_a_gradient_is_not_changed_without_one():
    def function(x):
        y = x * 2
        with torch.no_grad():
            y[:, 0] = 3
        return y * x

    with pytest.raises(ChainError, match="changes a value that has a gradient"):
        fusegen.compile(function)(torch.randn(3, 4))


def of_numbers(x):
    with torch.no_grad():
        m = x * 2
        m[m < 0] = 0
        m[:, 0] = x[:, 1]
        m[:2] = m[1:].clone()
        m += 1
    return m * x


def of_a_detached_copy(x):
    m = (x * 2).detach().clone()
    with torch.no_grad():
        m[:, 0] = 3
    return x * m


def of_what_is_made(x):
    m = torch.zeros(3, 4, dtype=x.dtype)
    with torch.no_grad():
        m[0] = x[0]
        m[1:] = x[:-1]
        m *= 2
    return x * m


@pytest.mark.parametrize("function", [of_numbers, of_a_detached_copy, of_what_is_made])
def test_what_has_no_gradient_is_changed_without_one(function):
    _agree(function, _random(3, 4))


def test_parts_of_one_split_are_apart():
    def unpacked(x):
        q, k = x.exp().split(2, -1)
        q += 1
        return q * k

    def indexed(x):
        parts = x.exp().split(2, -1)
        q, k = parts[0], parts[1]
        q *= 3
        return q * k

    x = torch.randn(3, 4, dtype=torch.float64)  # eager refuses gradients of such
    for function in (unpacked, indexed):
        torch.testing.assert_close(fusegen.compile(function)(x), function(x))


def test_a_part_of_the_input_has_a_gradient():
    def function(x):
        y = x[:, 1:] * 2
        with torch.no_grad():
            y[:, 0] = 3
        return y * 3

    with pytest.raises(ChainError, match="changes a value that has a gradient"):
        fusegen.compile(function)(torch.randn(3, 4))


def filled(x):
    y = torch.empty_like(x)
    y[:, :2] = x[:, 2:4]
    y[:, 2:] = 0
    return y


def one_sample(x):
    y = x * 2
    y[0] = x[1]
    return y


@pytest.mark.parametrize("function", [filled, one_sample])
def test_what_is_changed_in_place_lies_as_eagers_does(function, device):
    x = torch.randn(2, 4, 6, 6, device=device).to(memory_format=torch.channels_last)
    found, wanted = fusegen.compile(function)(x), function(x)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


def test_a_value_does_not_grow_in_place():
    def function(x):
        s = x.sum(-1, keepdim=True) * x.size(-1)
        s += x
        return s

    with pytest.raises(ChainError, match=r"the result would have shape \(3, 4\), and x has"):
        fusegen.compile(function)(torch.randn(3, 4))


def _through_a_view(x):
    y = x * 2
    z = y.view(-1)
    z[0] = 0
    return y


def _behind_a_view(x):
    y = x * 2
    z = y.t()
    y[0] = 0
    return z.sum(1)


def _the_input(x):
    x[:, 0] = 0
    return x * 2


def _many(x):
    y = x * 2
    y[y > 0] = x[0]
    return y


def _too_large(x):
    y = x * 2
    y[:, :2] = x
    return y


def _no_number(x):
    y = x * 2
    y[:, :2] = "0"
    return y


def _cast(x):
    y = x * 2
    z = y.float()
    z += 1
    return y * z


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_through_a_view, r"x\[...\] = y changes a value that is used elsewhere too"),
        (_behind_a_view, r"x\[...\] = y changes a value that is used elsewhere too"),
        (_the_input, r"changes what the chain is given in place; write x = x.clone\(\) before"),
        (_many, r"x\[condition\] = y: how many elements of y that takes"),
        (_too_large, r"got y of shape \(3, 4\), wanted one that broadcasts to \(3, 2\)"),
        (_no_number, r"y is a str, wanted a tensor or a number"),
        (_cast, r"x \+= y changes a value that is used elsewhere too"),
    ],
)
def test_what_is_not_changed_in_place_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(function)(torch.randn(3, 4))


def test_a_copy_in_another_type_may_be_changed():
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    # Of a product of numbers in 8 bits, in single precision.
    torch.testing.assert_close(fusegen.compile(_cast)(x), _cast(x), rtol=2**-7, atol=2**-7)


def test_that_what_is_given_is_left_as_it_is_is_told():
    def residual(x, b):
        x += b
        return x.sigmoid()

    with pytest.warns(UserWarning, match=r"^x \+= y: what the function is given is left as it is"):
        fused = fusegen.compile(residual)
    x, b = torch.zeros(2), torch.ones(2)
    torch.testing.assert_close(fused(x, b), torch.sigmoid(b))
    assert torch.equal(x, torch.zeros(2))


def scaled_without_gradient(x):
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
        scale.clamp_(min=0.1)
        scale.div_(127.0)
        q = (x / scale).round_()
        q.mul_(scale)
    return x + (q - x).detach()


def changed_twice_without_gradient(x):
    with torch.no_grad():
        s = x.abs()
        s += 1
        s.mul_(2)
        s[:, 0] = 0
        s.clamp_(max=3)
    return s * x


@pytest.mark.parametrize("function", [scaled_without_gradient, changed_twice_without_gradient])
def test_what_is_computed_without_gradient_is_changed_in_place(function, device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    found, expected = fusegen.compile(function)(x), function(x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_what_has_a_gradient_is_not_changed_without():
    def function(x):
        y = x.exp()
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(ChainError, match=r"x\.mul_: under torch\.no_grad\(\) it changes a value"):
        fusegen.compile(function)(torch.ones(3))
