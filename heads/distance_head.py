"""What all distance heads share: the link, the exponent, the scale of the hidden states, and their calibration."""

import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.floor import Floor
from heads.fused_loss import Operands, Recipe, chunks_of_values
from heads.head import Head, Problem, outside_compiled_graphs, product_dtype, widened
from heads.kernels import Kernel, widest
from heads.links import Gibbs, Harmonic, distance, log_distance

SMALLEST_OPTION = 1e-30  # options from here to its inverse are taken: float32 holds them and their inverses


@dataclass(frozen=True)
class Geometry:
    """A distance as the fused loss computes it: d = factor * kernel(x, y)^root, of mapped rows x and y.

    norm: mapped rows (n, D), and the metric if the head has one -> (n,), the distance from 0 but for the factor. d is floored at
    factor * 1e-6 (norm(x) + norm(y)), so the kernel's value at that to the power `floor_power` (None: 1 / root).
    """

    kernel: Kernel
    norm: Callable[..., Tensor]
    root: float = 1.0
    factor: float = 1.0
    floor_power: float | None = None

    @property
    def floor(self) -> Floor:
        return Floor(self.norm, 1 / self.root if self.floor_power is None else self.floor_power)

    @property
    def degree(self) -> float:
        """d is multiplied by c^degree where mapped rows are multiplied by c."""
        return 0.0 if self.kernel.scale_free else round(self.kernel.power * self.root, 9)


class DistanceHead(Head):
    """A head on a distance; a subclass says which with `geometry`, and where needed `map`, `metric` or `denominators`.

    Options: link "harmonic" or "gibbs"; tau (Gibbs); exponent: a number, "auto" (calibrated, see `calibrate`), "dim" (n_embd) or
    "sqrt_dim"; exponent_spread: the standard deviation in nats that "auto" gives the logits over the vocabulary; learn_exponent: ln n is
    a parameter; hidden_scale: a number by which hidden states are multiplied, or "auto" (calibrated: as large as the prototypes).
    """

    defaults = {"link": "harmonic", "tau": 1.0, "exponent": "auto", "exponent_spread": 0.5, "learn_exponent": False, "hidden_scale": 1.0}
    harmonic_only = ("exponent", "exponent_spread", "learn_exponent")

    def __init__(self, n_embd, vocab_size, padded_vocab_size=None, **options):
        super().__init__(n_embd, vocab_size, padded_vocab_size, **options)
        self._check()
        self.harmonic = self.settings["link"] == "harmonic"
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("calibrated", torch.empty((), dtype=torch.bool))
        if self.harmonic:
            if self.settings["learn_exponent"]:
                self.log_exponent = nn.Parameter(torch.empty(()))
            else:
                self.register_buffer("exponent", torch.empty(()))
        self._known = None  # the buffer `calibrated` once it was seen to be true: a device is asked once, not in every step
        self.geometry = self.build_geometry()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        super().reset_parameters()
        scale, exponent = self.settings["hidden_scale"], self.settings["exponent"]
        self.scale.fill_(1.0 if scale == "auto" else scale)
        self.calibrated.fill_("auto" not in (scale, self.harmonic and exponent))
        self._known = None
        if self.harmonic:
            exponent = {"auto": 1.0, "dim": self.n_embd, "sqrt_dim": math.sqrt(self.n_embd)}.get(exponent, exponent)
            if self.settings["learn_exponent"]:
                self.log_exponent.fill_(math.log(exponent))
            else:
                self.exponent.fill_(exponent)

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._known = None

    # What a distance says of itself.

    def build_geometry(self) -> Geometry:
        """The kernel and its surroundings; raises ValueError for bad options of the distance."""
        raise NotImplementedError

    def map(self, rows: Tensor, noise: int | None = None) -> Tensor:
        """Rows (n, D) of hidden states or prototypes -> rows for the kernel. noise: the seed of this forward's noise while training."""
        return rows

    def metric(self) -> Tensor | None:
        """The kernel's parameter, if it has one."""
        return None

    def denominators(self, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(row (n,), column (rows,)): d is divided by row_i + column_k."""
        return None, None

    def definition(self, h: Tensor, w: Tensor) -> Tensor:
        """d (N, V) of h (N, D) and w (V, D), in plain torch: the meaning of the head, and the oracle of its tests."""
        raise NotImplementedError

    # What follows from it.

    @torch.no_grad()
    def prepare(self, flat, kept=None):
        if self._known is self.calibrated:
            return
        if self.needs_calibration:
            counting = flat if kept is None else flat[kept]
            if len(counting) == 0:
                return
            self._calibrate_alone(counting)
        self._known = self.calibrated

    def problem(self, hidden, training=False):
        geometry, h = self.geometry, hidden * self.scale.to(hidden.dtype)
        noise = int(torch.randint(2**31, ())) if training and self.noisy else None
        x, y = self.map(h, noise), self.map(self.weight.to(hidden.dtype), None if noise is None else noise + 1)
        sharpness, unit = self._sharpness(hidden.dtype), _common_unit(x, y, geometry.kernel.power)
        if unit is not None:
            x, y, unit = x * unit, y * unit, unit**geometry.degree
            if not self.harmonic:
                sharpness = sharpness / unit
        recipe = Recipe(geometry.kernel, self.link(), self.vocab_size, geometry.floor)
        operands = Operands(x, y, self.metric(), *self.denominators(x, y), sharpness)
        return Problem(recipe, operands, 1.0 if unit is None else unit)

    noisy = False  # whether `map` adds noise while training

    def link(self) -> Harmonic | Gibbs:
        return (Harmonic if self.harmonic else Gibbs)(self.geometry.root, self.geometry.factor)

    def _sharpness(self, dtype):
        if not self.harmonic:
            return self.scale.new_full((), 1 / self.settings["tau"], dtype=dtype)
        return self.log_exponent.to(dtype).exp() if self.settings["learn_exponent"] else self.exponent.to(dtype)

    @outside_compiled_graphs
    @torch.no_grad()
    def distances(self, hidden: Tensor) -> Tensor:
        """d(h, w) (..., rows) of hidden (..., D), padded rows included; without gradient."""
        flat = self._flat(hidden)
        self.prepare(flat)
        with torch.autocast(hidden.device.type, enabled=False):
            flat = widened(flat)
            recipe, operands, unit = self.problem(flat)
            recipe = recipe._replace(vocab_size=len(self.weight), dtype=product_dtype(hidden))
            out = flat.new_empty(len(flat), len(self.weight))
            for rows, u, ratio in chunks_of_values(recipe, operands):
                out[rows] = distance(recipe.link, u, ratio) / unit
        return out.view(*hidden.shape[:-1], len(self.weight))

    # Exponent and scale.

    @property
    def exponent_value(self) -> float | None:
        """The exponent n in use; None under the Gibbs link or before calibration."""
        if not self.harmonic:
            return None
        if self.settings["exponent"] == "auto" and self.needs_calibration:
            return None
        return math.exp(self.log_exponent.detach()) if self.settings["learn_exponent"] else float(self.exponent)

    @property
    def needs_calibration(self) -> bool:
        """Whether an "auto" option has no value yet."""
        return not self.calibrated

    @torch.no_grad()
    def calibrate(self, hidden: Tensor | Iterable[Tensor], reduce: Callable[[Tensor], None] | None = None) -> None:
        """Sets "auto" options from hidden states (..., D), a tensor or a re-iterable of tensors (the micro-steps of a batch).

        hidden_scale: h and w get the same root mean square. exponent: n = exponent_spread / sqrt(mean over tokens of Var over the
        vocabulary of ln d). reduce: sums a tensor over processes, in place; the result depends on the union of all hidden states only.
        Raises ValueError if there are none, or they are not finite, or all prototypes are equally far from each of them.
        """
        parts = [hidden] if isinstance(hidden, Tensor) else hidden
        wide = widest(self.weight.device)
        if self.settings["hidden_scale"] == "auto":
            square = self._mean(parts, reduce, lambda rows: rows.to(wide).square().sum() / self.n_embd)
            words = self.weight[: self.vocab_size].to(wide).square().mean()
            scale = (words / square).sqrt()
            if not (torch.isfinite(scale) and scale > 0):
                raise ValueError(f"hidden_scale \"auto\": cannot be calibrated on hidden states of mean square {square.item()} and prototypes of "
                                 f"mean square {words.item()}")
            self.scale.copy_(scale)
        if self.harmonic and self.settings["exponent"] == "auto":
            variance = self._mean(parts, reduce, self._spread)
            n = self.settings["exponent_spread"] / variance.sqrt()
            if not torch.isfinite(n):
                raise ValueError(f"exponent \"auto\": cannot be calibrated on hidden states for which ln d has variance {variance.item()} "
                                 "over the vocabulary")
            target, value = (self.log_exponent, n.log()) if self.settings["learn_exponent"] else (self.exponent, n)
            target.copy_(value)
        self.calibrated.fill_(True)
        self._known = self.calibrated

    def _spread(self, rows):
        """Sum over rows of the variance over the vocabulary of ln d."""
        with torch.autocast(rows.device.type, enabled=False):
            recipe, operands, _ = self.problem(widened(rows))
            total = rows.new_zeros((), dtype=widest(rows.device))
            for _, u, ratio in chunks_of_values(recipe, operands):
                total += log_distance(recipe.link, u, ratio).var(1, correction=0).to(total.dtype).sum()
        return total

    def _mean(self, parts, reduce, sums):
        """Mean over all rows of a quantity whose sum over some rows `sums` gives."""
        totals = torch.zeros(2, dtype=widest(self.weight.device), device=self.weight.device)
        for part in parts:
            rows = self._flat(part.detach())
            if len(rows):
                totals += torch.stack([sums(rows), totals.new_tensor(len(rows))])
        if reduce is not None:
            reduce(totals)
        if totals[1] == 0:
            raise ValueError("hidden: there are no hidden states to calibrate on")
        return totals[0] / totals[1]

    def _calibrate_alone(self, hidden):
        """A head used before `calibrate` takes the first hidden states that it sees; processes would not agree on those."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError("this head has an \"auto\" option and runs in several processes: call head.calibrate(hidden, reduce) first")
        self.calibrate(hidden)

    # Options.

    def options(self):
        foreign = ("tau",) if self.harmonic else self.harmonic_only
        return {key: value for key, value in self.settings.items() if key not in foreign}

    def _check(self):
        given, settings = self.given, self.settings
        if settings["link"] not in ("harmonic", "gibbs"):
            raise ValueError(f"link {settings['link']!r}: must be harmonic or gibbs")
        foreign = ("tau",) if settings["link"] == "harmonic" else self.harmonic_only
        for key in foreign:
            if key in given:
                raise ValueError(f"{key}: has no meaning under the {settings['link']} link")
        if not isinstance(settings["learn_exponent"], bool):
            raise ValueError(f"learn_exponent {settings['learn_exponent']!r}: must be true or false")
        check_positive("tau", settings["tau"])
        check_positive("exponent_spread", settings["exponent_spread"])
        check_positive("exponent", settings["exponent"], words=("auto", "dim", "sqrt_dim"))
        check_positive("hidden_scale", settings["hidden_scale"], words=("auto",))


def check_positive(name: str, value, words: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless value is one of `words` or a number above 0 that float32 holds, as its inverse."""
    if isinstance(value, str) and value in words:
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not SMALLEST_OPTION <= value <= 1 / SMALLEST_OPTION:
        raise ValueError(f"{name} {value!r}: must be {', '.join((*words, 'a number above 0'))}, within float32's range")


def _common_unit(x, y, power):
    """A power of two for both x and y where sums of their entries' `power`-th powers would leave float32's range, else None.

    On CUDA always one: looking first would wait for the device.
    """
    if power == 1 or len(x) == 0:
        return None
    largest = torch.maximum(_largest(x.detach()), _largest(y.detach()))
    reach = 2.0 ** (60 / power)  # a sum of up to 2^30 entries keeps within float32's 2^127
    if x.device.type == "cpu" and not torch.isfinite(largest):
        return None
    if x.device.type == "cpu" and 1 / reach < largest < reach:
        return None
    unit = torch.exp2(-largest.log2().round())
    return torch.where(torch.isfinite(unit), unit, 1.0)


def _largest(rows):
    smallest, largest = torch.aminmax(rows)
    return torch.maximum(largest, -smallest)
