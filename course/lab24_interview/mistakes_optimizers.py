"""Wrong answers of the tasks on AdamW and on Muon with the sentence each draws, and other right ones."""

import torch

from course.kit.exercises import KnownAnswers

# AdamW.

adamw = KnownAnswers("adamw")

adamw.mistake(
    "decay in the gradient",
    {
        "beta1, beta2 = betas": "beta1, beta2 = betas\n    grad = grad + weight_decay * param",
        "param.mul_(1 - lr * weight_decay)": "pass",
    },
    says="The decay went through the running means, as in Adam with L2: AdamW's is decoupled from the gradient.",
)
adamw.mistake(
    "no bias correction",
    {' / (1 - beta1 ** state["step"])': "", ' / (1 - beta2 ** state["step"])': ""},
    says="The means begin at zero and are too small in the first steps: divide by 1 - beta^t.",
)
adamw.mistake(
    "decay without the learning rate",
    {"1 - lr * weight_decay": "1 - weight_decay"},
    says="The decay is multiplied by the learning rate of the step.",
)
adamw.mistake(
    "decay after the step",
    {
        "param.mul_(1 - lr * weight_decay)\n    param.sub_(lr * m / (v.sqrt() + eps))": (
            "param.sub_(lr * m / (v.sqrt() + eps))\n    param.mul_(1 - lr * weight_decay)"
        )
    },
    says="The decay took param after the update: it takes param as it was before the step.",
)
adamw.mistake(
    "eps inside the root", {"(v.sqrt() + eps)": "(v + eps).sqrt()"}, says="eps is added to the root, not under it."
)
adamw.mistake(
    "eps before the correction",
    {"lr * m / (v.sqrt() + eps)": 'lr * m * (1 - beta2 ** state["step"]) ** 0.5 / (state["v"].sqrt() + eps)'},
    says="eps is added to the root of the corrected mean; here it was added first and then corrected with it.",
)
adamw.mistake(
    "betas exchanged",
    {"beta1, beta2 = betas": "beta2, beta1 = betas"},
    says="betas are (that of the gradient, that of its square): they are exchanged.",
)
adamw.mistake(
    "a new tensor",
    {"param.mul_(1 - lr * weight_decay)": "param = param * (1 - lr * weight_decay)"},
    says="param now names another tensor: the model's own stays as it is. Change it in place.",
)
adamw.mistake(
    "a reshaped copy",
    {
        "param.mul_(1 - lr * weight_decay)\n    param.sub_(lr * m / (v.sqrt() + eps))": (
            "flat = param.reshape(-1)\n    flat.mul_(1 - lr * weight_decay)\n"
            "    flat.sub_((lr * m / (v.sqrt() + eps)).reshape(-1))"
        )
    },
    says="reshape copies a tensor that is not contiguous, and the copy was changed: param stays as it is.",
)
adamw.mistake(
    "param.data is replaced",
    {
        "param.mul_(1 - lr * weight_decay)\n    param.sub_(lr * m / (v.sqrt() + eps))": (
            "param.data = param * (1 - lr * weight_decay) - lr * m / (v.sqrt() + eps)"
        )
    },
    says="Setting param.data gives param other memory: a flat buffer that it was a part of stays as it is.",
)
adamw.mistake(
    "the state beside the tensor",
    {"if not state:": "state = vars(param).setdefault('kept', {})\n    if not state:"},
    says="What a step remembers is not in `state`, so a checkpoint of it loses the means and the step number.",
)
adamw.mistake(
    "the caller's gradient is squared",
    {"addcmul_(grad, grad, value=1 - beta2)": "add_(grad.square_(), alpha=1 - beta2)"},
    says="grad belongs to the caller, who may clip or log it: square a copy.",
)


@adamw.mistake("torch's own", expect="without torch.optim")
def by_library(param, grad, state, lr, betas, eps, weight_decay):
    optimizer = state.setdefault("its", torch.optim.AdamW([param], lr, betas, eps, weight_decay))
    optimizer.param_groups[0]["lr"], param.grad = lr, grad
    optimizer.step()


@adamw.alternative("a step counter of 32 bits, as torch keeps it")
def with_counter(param, grad, state, lr, betas, eps, weight_decay):
    step = state.setdefault("step", torch.tensor(0.0)).add_(1)
    m, v = (state.setdefault(name, torch.zeros_like(param)) for name in ("exp_avg", "exp_avg_sq"))
    m.lerp_(grad, 1 - betas[0])
    v.lerp_(grad * grad, 1 - betas[1])
    param.mul_(1 - lr * weight_decay).addcdiv_(
        m / (1 - betas[0] ** step), (v / (1 - betas[1] ** step)).sqrt() + eps, value=-lr
    )


@adamw.alternative("corrections folded into the step size")
def folded(param, grad, state, lr, betas, eps, weight_decay):
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * grad
    v = state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * grad * grad
    root = (1 - betas[1] ** t) ** 0.5
    size = lr * root / (1 - betas[0] ** t)
    param.add_(-size * m / (v.sqrt() + eps * root) - lr * weight_decay * param)


@adamw.alternative("powers of beta in the state, means by lerp")
def with_powers(param, grad, state, lr, betas, eps, weight_decay):
    if "m" not in state:
        state["m"], state["v"], state["powers"] = torch.zeros_like(grad), torch.zeros_like(grad), [1.0, 1.0]
    state["powers"] = [power * beta for power, beta in zip(state["powers"], betas, strict=True)]
    state["m"].lerp_(grad, 1 - betas[0])
    state["v"].lerp_(grad.square(), 1 - betas[1])
    m, v = (state[name] / (1 - power) for name, power in zip("mv", state["powers"], strict=True))
    old = param.clone()
    param -= lr * (m / (v.sqrt() + eps) + weight_decay * old)


@adamw.alternative("sums of all gradients so far")
def from_all_gradients(param, grad, state, lr, betas, eps, weight_decay):
    seen = state.setdefault("seen", [])
    seen.append(grad.clone())

    def mean(beta, of):
        weights = [beta ** (len(seen) - 1 - place) for place in range(len(seen))]
        return sum(weight * of(each) for weight, each in zip(weights, seen, strict=True)) / sum(weights)

    step = mean(betas[0], lambda g: g) / (mean(betas[1], torch.square).sqrt() + eps)
    param[...] = param * (1 - lr * weight_decay) - lr * step


_shared: dict = {}


@adamw.mistake("one state for all tensors", expect="differs from torch.optim.AdamW")
def one_state(param, grad, state, lr, betas, eps, weight_decay):
    if not state:
        _shared.clear()
    state["begun"] = True
    with_powers(param, grad, _shared, lr, betas, eps, weight_decay)


# Newton–Schulz.

newton_schulz = KnownAnswers("newton-schulz")

newton_schulz.mistake(
    "the large Gram matrix",
    {"g.shape[0] > g.shape[1]": "False"},
    says="A tall matrix has a large X·Xᵀ: iterate on its transpose, whose Gram matrix is the small one.",
)
newton_schulz.mistake(
    "not transposed back",
    {"return x.T if tall else x": "return x"},
    says="A tall matrix was transposed for the iteration: transpose the result back.",
)
newton_schulz.mistake(
    "scaled by the largest singular value",
    {"x.norm()": "torch.linalg.matrix_norm(x, 2)"},
    says="The scale is the Frobenius norm: the largest singular value is what the iteration does not want to compute.",
)
newton_schulz.mistake(
    "not scaled",
    {"x = x / x.norm()": "x = x.clone()"},
    says="Singular values above 1 diverge: divide by the Frobenius norm first.",
)
newton_schulz.mistake(
    "scaled down only",
    {"x / x.norm()": "x / x.norm().clamp(min=1)"},
    says="A matrix smaller than 1 is scaled, too: gradients are small.",
)
newton_schulz.mistake(
    "a large number beside the norm",
    {"x / x.norm()": "x / (x.norm() + 1e-3)"},
    says="What is added against a norm of 0 must be far below the norms that occur: Muon adds 1e-7.",
)
newton_schulz.mistake(
    "scaled in every iteration",
    {"gram = x @ x.T": "x = x / x.norm()\n        gram = x @ x.T"},
    says="The scale is taken once, before the first iteration.",
)
newton_schulz.mistake(
    "the cubic iteration",
    {"3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x": "1.5 * x - 0.5 * gram @ x"},
    says="That is the classical cubic iteration, which needs many more steps for small singular values.",
)
newton_schulz.mistake(
    "the square of each element",
    {"gram @ gram": "gram * gram"},
    says="A·A is a matrix product, not the square of every element.",
)
newton_schulz.mistake(
    "b and c exchanged",
    {"-4.7750 * gram": "2.0315 * gram", "2.0315 * gram @ gram": "-4.7750 * gram @ gram"},
    says="b multiplies A and c multiplies A·A: they are exchanged.",
)
newton_schulz.mistake("one iteration too few", {"range(steps)": "range(steps - 1)"}, says="One iteration is missing.")


@newton_schulz.mistake("by a decomposition", expect="matrix products only")
def by_decomposition(g, steps):
    left, _, right = torch.linalg.svd(g, full_matrices=False)
    return left @ right


@newton_schulz.alternative("Horner's form")
def horner(g, steps):
    x = g if g.shape[0] <= g.shape[1] else g.mT
    x, one = x / torch.linalg.matrix_norm(x), torch.eye(len(x), dtype=g.dtype)
    for _ in range(steps):
        a = x @ x.mT
        x = (3.4445 * one + a @ (-4.7750 * one + 2.0315 * a)) @ x
    return x if g.shape[0] <= g.shape[1] else x.mT


@newton_schulz.alternative("with Muon's 1e-7, three products with X")
def three_products(g, steps):
    flip = g.size(0) > g.size(1)
    x = (g.mT if flip else g).clone()
    x /= x.square().sum().sqrt() + 1e-7
    for _ in range(steps):
        a = torch.einsum("ik,jk->ij", x, x)
        ax = a @ x
        x = torch.add(3.4445 * x, ax, alpha=-4.7750) + 2.0315 * (a @ ax)
    return x.mT if flip else x


@newton_schulz.alternative("the Gram matrix of columns for a tall matrix")
def right_side(g, steps):
    x = g / (g * g).sum() ** 0.5
    for _ in range(steps):
        if len(g) > g.shape[1]:
            a = x.T @ x
            x = 3.4445 * x + x @ (-4.7750 * a + 2.0315 * (a @ a))
        else:
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x
