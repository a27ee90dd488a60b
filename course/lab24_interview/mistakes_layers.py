"""Wrong answers of the tasks on a norm and on rotary embedding with the sentence each draws, and other right ones."""

import torch

from course.kit.exercises import KnownAnswers

# RMSNorm.

rms_norm = KnownAnswers("rms-norm")

rms_norm.mistake(
    "eps outside the root",
    {
        "(wide.square().mean(-1, keepdim=True) + eps).rsqrt()": (
            "1 / (wide.square().mean(-1, keepdim=True).sqrt() + eps)"
        )
    },
    says="eps is added to the mean of the squares, under the root.",
)
rms_norm.mistake(
    "the mean is subtracted",
    {"wide, upper = x.float(), dy.float()": "wide, upper = x.float() - x.float().mean(-1, keepdim=True), dy.float()"},
    says="That is LayerNorm: RMSNorm does not subtract the mean.",
)
rms_norm.mistake(
    "the root is taken for a constant",
    {"dx = inverse * (scaled - normed * along)": "dx = inverse * scaled"},
    says="x also changes the root by which its token is divided: dx loses its part along x.",
)
rms_norm.mistake(
    "a sum for the mean in dx",
    {"(scaled * normed).mean(": "(scaled * normed).sum("},
    says="The root holds a mean of squares: the part along x is a mean over the channels, too.",
)
rms_norm.mistake(
    "the weight is left out of dx",
    {"scaled = upper * weight.float()": "scaled = upper"},
    says="The gradient passes the weight before it reaches the norm: start from dy · weight.",
)
rms_norm.mistake(
    "dweight of a token's row",
    {".flatten(0, -2).sum(0)": ".sum(0)"},
    says="dweight is summed over every leading axis, so that one number per channel is left.",
)
rms_norm.mistake(
    "dweight of x",
    {"dweight = (upper * normed)": "dweight = (upper * wide)"},
    says="What the weight multiplies is the normalised token, not x.",
)
rms_norm.mistake(
    "computed in the inputs' dtype",
    {"wide, upper = x.float(), dy.float()": "wide, upper = x, dy"},
    says="With 16-bit inputs every intermediate result was rounded to 16 bits: convert to 32 first.",
)
rms_norm.mistake(
    "float16 is not widened",
    {"x.float(), dy.float()": "[each.float() if x.dtype == torch.bfloat16 else each for each in (x, dy)]"},
    says="float16 needs 32 bits, too: it ends at 65,504, and the square of 300 is more.",
)
rms_norm.mistake(
    "dweight in the dtype of x",
    {"dweight.to(weight.dtype)": "dweight.to(x.dtype)"},
    says="dweight belongs to the weight, whose dtype need not be that of x.",
)
rms_norm.mistake(
    "dweight from y",
    {"dweight = (upper * normed)": "dweight = (upper * (normed * weight.float()) / weight.float())"},
    says="y / weight is the normalised token only where the weight is not 0: keep the token itself.",
)
rms_norm.mistake(
    "results in 32 bits",
    {"(normed * weight.float()).to(x.dtype), dx.to(x.dtype)": "normed * weight.float(), dx"},
    says="y and dx go back to the dtype of x: what follows in the model has 16 bits.",
)


@rms_norm.mistake("by autograd", expect="without autograd")
def by_autograd(x, weight, dy, eps):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        y = x * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


@rms_norm.alternative("quotient rule in 64 bits")
def quotient_rule(x, weight, dy, eps):
    wide, scale, upper = x.double(), weight.double(), dy.double()
    root = torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    inner = (upper * scale * wide).sum(-1, keepdim=True) / x.shape[-1]
    dx = upper * scale / root - wide * inner / root**3
    dweight = torch.einsum("ti,ti->i", upper.reshape(-1, x.shape[-1]), (wide / root).reshape(-1, x.shape[-1]))
    return (wide / root * scale).to(x.dtype), dx.to(x.dtype), dweight.to(weight.dtype)


@rms_norm.alternative("token by token, with the Jacobian")
def with_jacobian(x, weight, dy, eps):
    y, dx, dweight = torch.empty_like(x), torch.empty_like(x), torch.zeros(len(weight))
    hidden = x.shape[-1]
    for place in range(x.numel() // hidden):
        token, upper = x.reshape(-1, hidden)[place].float(), dy.reshape(-1, hidden)[place].float()
        r = (token.square().mean() + eps).rsqrt()
        jacobian = r * torch.eye(hidden) - r**3 / hidden * torch.outer(token, token)
        y.view(-1, hidden)[place] = token * r * weight.float()
        dx.view(-1, hidden)[place] = jacobian @ (upper * weight.float())
        dweight += upper * token * r
    return y, dx, dweight.to(weight.dtype)


@rms_norm.alternative("a list, norms by vector_norm")
def by_vector_norm(x, weight, dy, eps):
    hidden, upper = x.shape[-1], dy.to(torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    r = 1 / torch.sqrt(norm**2 / hidden + eps)
    unit = x * r
    back = upper * weight
    dx = r * back - unit * r * (back * unit).sum(-1, keepdim=True) / hidden
    leading = tuple(range(x.dim() - 1))
    return [(unit * weight).type_as(x), dx.type_as(x), (upper * unit).sum(leading).type_as(weight)]


# Rotary embedding.

rotary = KnownAnswers("rotary")

rotary.mistake(
    "layouts exchanged",
    {
        "if interleaved else halves": "if not interleaved else halves",
        "flatten(-2) if interleaved else torch": "flatten(-2) if not interleaved else torch",
    },
    says="The two layouts are exchanged: interleaved pairs are neighbours, 2i and 2i + 1.",
)
rotary.mistake(
    "the second layout for both",
    {
        "if interleaved else halves": "if False else halves",
        "flatten(-2) if interleaved else torch": "x if False else torch",
    },
    says="interleaved changes nothing: with True, pair i is channels 2i and 2i + 1.",
)
rotary.mistake(
    "interleaved pairs come back as halves",
    {"torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)": "torch.cat(turned, -1)"},
    says="The rotated channels must go back to their places, 2i and 2i + 1.",
)
rotary.mistake(
    "exponent without the 2",
    {" * 2 / x.shape[-1]": " / x.shape[-1]"},
    says="The exponent runs from 0 to nearly 1 over head_dim/2 pairs: it is 2i / head_dim.",
)
rotary.mistake(
    "turned the other way",
    {"a * cos - b * sin, a * sin + b * cos": "a * cos + b * sin, b * cos - a * sin"},
    says="The rotation has the wrong sense: (a, b) becomes (a cos - b sin, a sin + b cos).",
)
rotary.mistake(
    "places for positions",
    {"positions.float()": "torch.arange(len(x)).float()"},
    says="The angle comes from a token's position, not from its place in the batch.",
)
rotary.mistake(
    "angles in the dtype of x",
    {
        "positions.float()[:, None, None] * frequencies": (
            "positions.to(x.dtype)[:, None, None] * frequencies.to(x.dtype)"
        )
    },
    says="With 16-bit x the angles had 16 bits, too few even for position 301: compute them in 32.",
)
rotary.mistake(
    "in place",
    {
        "together = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)": (
            "a.copy_(turned[0]), b.copy_(turned[1])\n    together = wide"
        )
    },
    says="For 32-bit x, x.float() is x itself, which belongs to the caller: write into a copy.",
)
rotary.mistake(
    "cosines in the dtype of x",
    {"angles.cos(), angles.sin()": "angles.cos().to(x.dtype), angles.sin().to(x.dtype)"},
    says="Cosines and sines were rounded to 16 bits before the products: round once, at the end.",
)
rotary.mistake(
    "a table of 4,096 positions",
    {
        "positions.float()[:, None, None] * frequencies": (
            "(torch.arange(4096).float()[:, None] * frequencies)[positions][:, None]"
        )
    },
    expect="out of bounds",
)
rotary.mistake(
    "frequencies kept by head_dim",
    {
        "frequencies = base": "frequencies = vars(rotate).setdefault(str(x.shape[-1]), base",
        "* 2 / x.shape[-1])": "* 2 / x.shape[-1]))",
    },
    says="What is kept from call to call must be kept by base, too: two models of one head_dim may differ in it.",
)
rotary.mistake(
    "results in 32 bits",
    {"together.to(x.dtype)": "together"},
    says="The result goes back to the dtype of x: only the angles and the products need 32 bits.",
)


@rotary.alternative("complex numbers")
def by_complex(x, positions, base, interleaved):
    half = x.shape[-1] // 2
    angles = torch.outer(positions.float(), base ** (torch.arange(half) * -2 / x.shape[-1]))[:, None]
    wide = x.float()
    pairs = wide.unflatten(-1, (half, 2)) if interleaved else torch.stack((wide[..., :half], wide[..., half:]), -1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return (turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)).to(x.dtype)


@rotary.alternative("tables and a rotated half")
def by_tables(x, positions, base, interleaved):
    dim, wide = x.shape[-1], x.float()
    inverse = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    angles = positions[:, None].float() * inverse
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    if interleaved:
        other = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).reshape(x.shape)
    else:
        other = torch.cat((-wide[..., dim // 2 :], wide[..., : dim // 2]), -1)
    return (wide * angles.cos()[:, None] + other * angles.sin()[:, None]).to(x.dtype)


@rotary.alternative("one layout by a permutation of the other")
def by_permutation(x, positions, base, interleaved):
    half = x.shape[-1] // 2
    order = torch.arange(2 * half).view(half, 2).T.flatten() if interleaved else torch.arange(2 * half)
    halves = x.double()[..., order]
    angles = positions.double()[:, None, None] * base ** (-2 * torch.arange(half).double() / (2 * half))
    a, b = halves.chunk(2, -1)
    out = torch.empty_like(halves)
    out[..., order] = torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
    return out.to(x.dtype)
