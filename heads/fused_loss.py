"""Softmax cross-entropy over a vocabulary of pairwise values, chunk by chunk of tokens: nothing of size tokens x V is ever held.

    u_ik = kernel(x_i, y_k)      z = link(u)      loss_i = ln sum_k exp z_ik - sum_k t_ik z_ik      dL/dz = softmax(z) - t

Where the loss is a sum, the gradients are formed in the forward pass, while a chunk's values are at hand, and scaled in the backward pass:
three matrix products for an inner-product kernel, none of them twice. Per-token losses recompute the chunks in the backward pass.
Gradient sums over chunks are float32 (float64 for float64 inputs). The loss knows kernels and links, not distances.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.kernels import Buffer, Kernel

# Numbers in the (rows, V) buffers of a chunk, which with small change make up the memory of an inner-product loss on a CPU. On CUDA a chunk
# has to be large enough to fill the device. Prototypes that dwarf the buffers may have larger ones: half of their own size.
CHUNK_ELEMENTS = {"cpu": 13_000_000, "cuda": 2**28}
PROTOTYPES_PER_BUFFER = 2
# Where products run over all rows of y, words or not: tensor cores want sizes that are multiples of 8, which a vocabulary seldom is.
WHOLE_PRODUCTS = {"cuda"}
# Numbers that what follows a product works on at a time: on a CPU as many as its caches hold, of a chunk's some millions.
PART_ELEMENTS = {"cpu": 2**20}
# With fewer rows than this a matrix product reads the prototypes too often; with many words the buffers grow instead.
MINIMUM_ROWS = {"cpu": 64, "cuda": 256}


class Recipe(NamedTuple):
    """What a head asks of the loss, apart from tensors."""

    kernel: Kernel
    link: Any
    vocab_size: int  # rows of y beyond it take no part
    floor: Any = None  # heads.floor.Floor, or None where the kernel has none (linear)
    label_smoothing: float = 0.0
    dtype: torch.dtype | None = None  # of matrix products


class Operands(NamedTuple):
    """The tensors of a loss, each with a gradient if it needs one."""

    x: Tensor  # (N, D)
    y: Tensor  # (rows, D)
    parameter: Tensor | None = None  # of the kernel: a bias, a metric
    row_ratio: Tensor | None = None  # (N,) and (rows,): the separable denominator row_i + column_k
    column_ratio: Tensor | None = None
    sharpness: Tensor | None = None  # 0-d: the exponent, or 1 / tau


def fused_loss(recipe: Recipe, operands: Operands, targets: Tensor, weights: Tensor, per_token: bool = False) -> Tensor:
    """Weighted cross-entropy: sum_i weights_i loss_i, 0-d, or with `per_token` its terms, (N,).

    targets (N,): ids in 0..vocab_size-1; weights (N,): 0 for tokens to ignore.
    """
    return _FusedLoss.apply(recipe, targets, weights, per_token, torch.is_grad_enabled(), *operands)


def chunks_of_values(recipe: Recipe, operands: Operands):
    """Yields (slice of tokens, u, ratio) without gradients: for log-probabilities, distances and statistics."""
    work = _Work(recipe, operands, words_only=True)
    for rows in work.slices():
        u = work.pairs.values(work.x[rows])
        work.complete(u, rows, 0)
        yield rows, u, work.ratio(rows)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recipe, targets, weights, per_token, grad_enabled, *tensors):
        operands = Operands(*tensors)
        ctx.recipe, ctx.needs = recipe, ctx.needs_input_grad[5:]
        ctx.save_for_backward(targets, weights, *tensors)
        at_once = grad_enabled and any(ctx.needs) and not per_token
        losses, ctx.grads = _run(recipe, operands, targets, weights, ctx.needs if at_once else None)
        return losses if per_token else losses.sum()

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # create_graph: the gradients below are constants, and a second derivative would lack their part
            raise RuntimeError("the loss of a head can be differentiated once only (create_graph=True was asked for)")
        targets, weights, *tensors = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None  # given away: autograd may keep them as .grad without a copy
        if grads is None:  # per-token losses, or a second backward through the same graph
            weights = weights * grad_output
            grads = _run(ctx.recipe, Operands(*tensors), targets, weights, ctx.needs)[1]
        elif grad_output.is_cuda or grad_output != 1:
            for grad in grads:
                if grad is not None:
                    grad.mul_(grad_output)
        grads = (grad.to(tensor.dtype) if need else None for tensor, grad, need in zip(tensors, grads, ctx.needs))
        return (None,) * 5 + tuple(grads)


def _run(recipe, operands, targets, weights, needs):
    """(losses (N,), gradients or None): one pass over the chunks. needs: which operands need a gradient; None: no pass for gradients."""
    with torch.autocast(operands.x.device.type, enabled=False):
        work = _Work(recipe, operands)
        losses = work.y.new_zeros(len(targets))
        if needs is not None:
            work.start_gradients(needs)
        for rows in work.slices():
            losses[rows] = work.chunk(rows, targets[rows], weights[rows, None].to(work.y.dtype))
        return losses, None if needs is None else work.gradients()


class _Work:
    """One pass: the bound kernel, the operands in their working dtype, and the gradient sums."""

    def __init__(self, recipe: Recipe, operands: Operands, words_only: bool = False):
        wide = torch.float64 if operands.x.dtype == torch.float64 else torch.float32
        self.recipe, self.link, self.smoothing = recipe, recipe.link, recipe.label_smoothing
        self.operands = Operands(*(None if tensor is None else tensor.detach().to(wide) for tensor in operands))
        whole = recipe.kernel.is_product and operands.x.device.type in WHOLE_PRODUCTS and not words_only
        self.x, self.y = self.operands.x, self.operands.y if whole else self.operands.y[: recipe.vocab_size]
        self.words, self.padding = slice(recipe.vocab_size), slice(recipe.vocab_size, len(self.y))  # columns of u
        self.pairs = recipe.kernel.bind(self.y, self.operands.parameter, recipe.dtype or operands.x.dtype)
        self.sharpness = self.operands.sharpness
        # A product's backward does not look at its values: their gradients take their place, part by part. Where it takes a copy of
        # them in bfloat16, that is a second buffer.
        self.one_buffer = recipe.kernel.is_product and self.x.device.type in PART_ELEMENTS
        self.buffers = 1 if self.one_buffer and recipe.dtype != torch.bfloat16 else 2
        self.space, self.grads = Buffer(self.y), None

    def slices(self):
        """Slices of tokens, nearly equal, whose (rows, V) buffers are of the size wanted."""
        tokens, kind = len(self.x), self.x.device.type
        elements = max(CHUNK_ELEMENTS.get(kind, CHUNK_ELEMENTS["cuda"]), self.y.numel() // PROTOTYPES_PER_BUFFER)
        count = -(-tokens // max(elements // self.buffers // len(self.y), MINIMUM_ROWS.get(kind, 256)))
        return [slice(tokens * i // count, tokens * (i + 1) // count) for i in range(count)]

    def ratio(self, rows):
        """The denominators (n, V) of some tokens, or None."""
        if self.operands.row_ratio is None:
            return None
        return self.operands.row_ratio[rows, None] + self.operands.column_ratio[: len(self.y)]

    def complete(self, u, rows, first):
        """Completes the values u (n, V), in place, and floors them. Which pairs are at the floor: (row indices, mask (len, V)), or None."""
        self.pairs.complete(u, self.x[rows], first)
        return self.recipe.floor and self.recipe.floor.apply(u, self.norms(self.x[rows]), lambda: self.norms_of_y)

    @functools.cached_property
    def norms_of_y(self):
        return self.norms(self.y)

    def norms(self, vectors):
        parameter = self.operands.parameter
        return self.recipe.floor.norm(vectors, *([] if parameter is None else [parameter]))

    def logits(self, u, ratio, out=None):
        """z (n, V), -inf in the padding; in `out` unless it is u itself."""
        z = self.link.logits(u, ratio, self.sharpness, out)
        z[:, self.padding] = -torch.inf
        return z

    @property
    def in_place(self):
        """Whether what is computed from the values of a chunk may take their place."""
        return self.one_buffer or self.grads is None

    def chunk(self, rows, targets, weights):
        """The losses (n,) of a chunk, weighted; adds its gradients where they are wanted."""
        u = self.pairs.values(self.x[rows])
        grad = u if self.in_place else self.space.shaped(*u.shape)
        losses = []
        height = max(1, PART_ELEMENTS.get(u.device.type, u.numel()) // max(1, u.shape[1]))
        for start in range(0, len(u), height):
            at = slice(start, min(start + height, len(u)))
            tokens = slice(rows.start + at.start, rows.start + at.stop)
            floored = self.complete(u[at], tokens, start)
            losses.append(self.part(tokens, targets[at], weights[at], (u[at], floored), grad[at]))
        if self.grads is not None:
            weights = weights * self.link.slope(self.sharpness)
            self.pairs.backward(self.x[rows], u, grad, weights, (self.grads.x[rows], self.grads.y[: len(self.y)]))
        return torch.cat(losses) if losses else weights[:, 0]

    def part(self, rows, targets, weights, values, grad):
        """The losses (n,) of some tokens of a chunk, weighted. values: u (n, V), and which are at the floor, as `complete` says it.

        grad (n, V), which may be u itself, becomes dL/du where gradients are wanted, but for the factors weights (n, 1) and the link's slope.
        """
        (u, floored), ratio, targets = values, self.ratio(rows), targets[:, None]
        space = self.space.shaped(*u.shape) if self.in_place else grad
        z = self.logits(u, ratio, out=space)
        z_target = z.gather(1, targets)
        expected = z_target * (1 - self.smoothing)  # sum_k t_k z_k
        if self.smoothing:
            expected += z[:, self.words].mean(1, keepdim=True).mul_(self.smoothing)
        learns_sharpness = self.grads is not None and self.grads.sharpness is not None
        mean = _mean_under_softmax(z[:, self.words]) if learns_sharpness else None
        p = torch.softmax(z, 1, out=space)
        p_target = p.gather(1, targets)
        log_sum = z_target - p_target.log()
        far = (p_target < 1e-20).nonzero()[:, 0]  # a probability that small has lost its digits, or is 0
        if len(far):
            z_far = self.logits(u[far], None if ratio is None else ratio[far])
            log_sum[far] = torch.logsumexp(z_far, 1, keepdim=True)
        if learns_sharpness:  # dL/ds = sum_k (p_k - t_k) z_k / s
            self.grads.sharpness.add_(((mean - expected) * weights).sum() / self.sharpness)
        if self.grads is not None:
            # p_y - t_y from the sum of the others: for p near 1, p - 1 would keep no digits.
            others = p.scatter_(1, targets, 0).sum(1, keepdim=True)
            p.scatter_(1, targets, self.smoothing - others)
            if self.smoothing:
                p[:, self.words] -= self.smoothing / self.recipe.vocab_size
            self.pull(rows, weights, (u, ratio, floored), p, grad)
        return (log_sum - expected).mul_(weights)[:, 0]

    def pull(self, rows, weights, at, grad_z, grad):
        """From dL/dz (n, V), overwritten, to dL/du in grad (n, V), both but for the factors weights (n, 1) and slope. at: (u, ratio, floored)."""
        u, ratio, floored = at
        grad_ratio = self.link.pull(grad_z, u, ratio, out=grad)
        grad[:, self.padding] = 0  # whatever u is there
        if floored is not None and self.link.singular:
            index, mask = floored
            for each in (grad, grad_ratio):
                if each is not None:
                    each[index] = each[index].masked_fill_(mask, 0)
        if grad_ratio is not None:
            grad_ratio *= weights * self.link.slope(self.sharpness)
            if self.grads.row_ratio is not None:
                self.grads.row_ratio[rows] = grad_ratio.sum(1)
            if self.grads.column_ratio is not None:
                self.grads.column_ratio[: len(self.y)] += grad_ratio.sum(0)

    def start_gradients(self, needs):
        self.grads = Operands(
            torch.zeros_like(self.operands.x),
            self.pairs.gradient_buffer(self.operands.y, will_be_written=len(self.x) > 0),
            *(torch.zeros_like(tensor) if need else None for tensor, need in zip(self.operands[2:], needs[2:])),
        )

    def gradients(self):
        parameter = self.pairs.finish(self.grads.y[: len(self.y)])
        return self.grads._replace(parameter=parameter)


def _mean_under_softmax(z):
    """sum_k softmax(z)_k z_k of z (n, V) -> (n, 1), a few rows at a time; on CUDA more, as every launch costs."""
    return torch.cat([torch.linalg.vecdot(torch.softmax(rows, 1), rows) for rows in z.split(8 if z.device.type == "cpu" else 512)])[:, None]
