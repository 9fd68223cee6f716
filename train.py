"""Trains one language model: a backbone, a vocabulary head and a dataset, all named in one config file.

    python train.py config/quickstart.toml
    python train.py config/quickstart.toml --head.name=euclidean --optimizer.learning_rate=1e-3 --out_dir=out/mine
    python train.py config/quickstart.toml --resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_small_cosine.toml
"""

import contextlib
import dataclasses
import inspect
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import runs
from commands import InputError, Interrupted, RunFailed, command
from config import Config, load_config, parse_command_line, to_toml
from config.schema import LogConfig
from data.loader import BatchShape, TrainLoader, validation_batches
from data.token_file import open_dataset
from eval.geometry import PrototypeGeometry
from eval.validation import mean_nll, validate
from model.pretrained import load_pretrained
from training.calibration import HiddenStates
from training.checkpoint import Checkpoints, load_model
from training.distributed import World, connect
from training.emissions import EmissionsMeter
from training.energy import check_country, this_node
from training.optimizer import build_optimizer, gradient_norms, learning_rate
from training.precision import Precision, compile_backbone
from training.randomness import seed_torch
from training.record import Record, check_folder, peak_memory_mb
from training.stop import StopRequest, stop_on_signal
from training.trackers import build_trackers, check_trackers
from training.utilization import flops_per_token, peak_flops

# The buffers, an exponent and a scale, are equal everywhere from the start. torch 2.13 has renamed the argument.
RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
UNSYNCHRONISED_BUFFERS = {"forward_sync_buffers" if RENAMED else "broadcast_buffers": False}
MAX_SKIPS = 20  # float16 overflows in a row before the run stops: the scale has then shrunk a million-fold


def main(argv: list[str]) -> None:
    line = parse_command_line(argv)
    if line.print_config:
        print(to_toml(runs.resolve_if_prepared(line.config)), end="")
        return
    with connect(line.config.train.device) as world:
        run_dir = Path(line.config.out_dir)
        world.on_main(lambda: check_folder(run_dir, line.resume, line.overwrite))
        checkpoints = Checkpoints(run_dir, line.config.train.keep_last)
        found = world.on_main(checkpoints.newest_valid) if line.resume else None
        training = Training(line.config, world, checkpoints, found)
        if training.step >= training.config.train.max_steps:
            training.record.say(f"{run_dir} is finished: {training.step} of {training.config.train.max_steps} steps are done")
            training.loader.close()
            return
        if line.resume and not found:
            training.record.say(f"{run_dir} holds no checkpoint: starting at step 0")
        with stop_on_signal() as stop:
            training.run(stop, line.resume)


class Training:
    """One run in this process: everything it is made of, and the loop."""

    def __init__(self, config: Config, world: World, checkpoints: Checkpoints, found: tuple[Path, dict] | None):
        """`found`: the checkpoint to go on from, as (folder, state). Raises InputError before anything is written."""
        self.world, self.checkpoints = world, checkpoints
        self.precision = Precision(config.train.precision, world.device)
        check_trackers(config.log)
        check_country(config.emissions)
        self.dataset = open_dataset(config.data.dataset)
        stored = load_config(checkpoints.folder.parent / "config.toml") if found else None
        config = runs.resolve(config, self.dataset.meta, stored.schedule if stored else None)

        seed_torch(config.seed, "initialisation")
        self.model = runs.build(config, self.dataset.meta).to(world.device)
        self.config = config = runs.record_head(config, self.model.head)
        self.masking = runs.masking(config, self.dataset.meta, self.model)
        self.shape = BatchShape(config.model.block_size, config.train.batch_size, config.train.gradient_accumulation_steps, world.rank, world.size)
        self.loader = TrainLoader(self.dataset.train, self.shape, config.seed, self.masking, world.device)
        self.windows(self.dataset.val)  # a validation set that is too short shows now
        self.optimizer = build_optimizer(self.model, config.optimizer, world.device)

        self.step, self.best_step, self.best_nll = 0, None, math.inf
        self.geometry = PrototypeGeometry()
        if found:
            runs.check_resume(config, stored, (found[1].get("sequences_per_step"), self.shape.global_batch_size))
            runs.check_dataset(checkpoints.folder.parent, self.dataset.meta)
            self.load(*found)
            if self.step % config.eval.interval == 0:
                self.geometry.remember(self.model.head)
        else:
            if config.model.init_from:
                load_pretrained(self.model, config, runs.pretrained_folder(config, self.dataset.meta))
            if self.model.head.needs_calibration:
                self.calibrate()
        self.wrapped = self.model
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True, **UNSYNCHRONISED_BUFFERS)
        if config.train.compile:  # inside DDP, whose buckets then cut the graph: gradients travel while others are computed
            compile_backbone(self.model.backbone, self.one_pass)

        self.record = Record(checkpoints.folder.parent, world.is_main, config.log.interval)
        self.meter = None  # of emissions; begins with run()

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self, stop: StopRequest, resumed: bool) -> None:
        """Updates until `max_steps`; evaluates at step 0, every interval and the end; a checkpoint at every interval, at
        every new best, at the end, and when a signal asks to stop."""
        reason = "failed"
        self.begin(resumed)
        try:
            if self.step == 0:
                self.evaluate()
            while self.step < self.config.train.max_steps:
                with self.meter.scope("training"):
                    line = self.update()
                self.step += 1
                self.record.train({"step": self.step, **line})
                self.trackers.log({"step": self.step, **line})
                self.meter.step_done(self.step)

                at_end = self.step == self.config.train.max_steps
                stopping = stop.on_any_process(self.world)
                is_best = (self.step % self.config.eval.interval == 0 or at_end) and self.evaluate()
                if is_best or at_end or stopping or self.step % self.config.train.checkpoint_interval == 0:
                    self.save()
                if stopping and not at_end:
                    reason = stop.name
                    raise Interrupted(stop.number, f"{stop.name}: stopped after step {self.step} with a checkpoint; go on with --resume")
            reason = "finished"
        except RunFailed as failure:
            reason = str(failure)
            raise
        finally:
            self.end(reason)

    def update(self) -> dict:
        """One optimizer step over the global batch. Returns its line for the record."""
        started = time.perf_counter()
        rate = learning_rate(self.step, self.config.optimizer.learning_rate, self.config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = self.loader.batches(self.step)
        skipped = 0
        while (figures := self.attempt(batches)) is None:  # float16 only: again, at half the scale
            skipped += 1
            self.record.say(f"step {self.step + 1}: float16 gradient overflow, update skipped; scale now {self.precision.scaler.get_scale():g}")
            if skipped == MAX_SKIPS:
                raise RunFailed(f"step {self.step + 1}: {MAX_SKIPS} float16 gradient overflows in a row. {self.advice()}")
        loss, norm, norm_head, norm_backbone = figures
        seconds = time.perf_counter() - started
        tokens_per_step = self.shape.global_batch_size * self.config.model.block_size
        return {
            "loss": loss, "lr": rate, "grad_norm": norm, "grad_norm_head": norm_head, "grad_norm_backbone": norm_backbone,
            "tokens": (self.step + 1) * tokens_per_step, "step_ms": 1e3 * seconds, "tokens_per_s": tokens_per_step / seconds,
            "mfu": self.utilization(tokens_per_step / seconds), "memory_mb": peak_memory_mb(self.world.device),
            "skipped": skipped,
        }  # fmt: skip

    def attempt(self, batches: list) -> tuple[float, float, float, float] | None:
        """Forward, backward, clip, step. Returns the loss and the norms of the gradient before clipping (whole, head,
        backbone); None if float16 gradients overflowed and nothing was updated.

        Raises RunFailed, before the parameters change, if the loss or the gradient is not finite.
        """
        seed_torch(self.config.seed, "dropout", self.step, self.world.rank)
        loss = self.backward(batches)
        scaler = self.precision.scaler
        scaler.unscale_(self.optimizer)
        norms = gradient_norms(self.model)
        figures = torch.cat([loss.reshape(1).to(norms), norms]).tolist()  # waits for the device
        loss, norm, *_ = figures
        overflow = scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(norm)
        if not (math.isfinite(loss) and math.isfinite(norm) or overflow):
            raise RunFailed(f"step {self.step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; nothing was updated. {self.advice()}")
        if 0 < self.config.train.grad_clip < norm:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.train.grad_clip, norms[0])
        scaler.step(self.optimizer)  # after an overflow: does nothing
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return None if overflow else figures

    def backward(self, batches: list) -> Tensor:
        """Leaves the gradient of the mean loss over the global batch in the parameters; returns that loss, 0-dim."""
        scored = sum(batch.targets.numel() for batch in batches)
        scored = self.world.all_reduce(torch.tensor(float(scored), device=self.world.device)).clamp(min=1)  # () over all processes
        total = torch.zeros((), device=self.world.device)
        for micro_step, batch in enumerate(batches):
            last = micro_step == len(batches) - 1
            # gradients travel between processes once per update, with the last micro-step
            quiet = contextlib.nullcontext() if last or self.world.size == 1 else self.wrapped.no_sync()
            with quiet:
                with self.precision.autocast():
                    nll, _ = self.wrapped(batch.tokens, batch.targets, batch.positions, self.config.train.label_smoothing)
                # DDP averages over processes: times their number, it sums
                self.precision.scaler.scale(nll * (self.world.size / scored)).backward()
            total += nll.detach()
        return self.world.all_reduce(total) / scored

    # ------------------------------------------------------------------------------------------- around the loop

    def evaluate(self) -> bool:
        """Metrics on fixed windows of both splits, by all processes. Returns whether this is the best step so far."""
        with self.meter.scope("evaluation"):
            reduce, autocast = self.world.all_reduce, self.precision.autocast
            train_nll = mean_nll(self.model, self.windows(self.dataset.train), reduce, autocast)
            line = {"step": self.step, "train_nll": train_nll, **validate(self.model, self.windows(self.dataset.val), reduce, autocast)}
            line["exponent"] = self.model.head.exponent_value
            if self.world.is_main:
                line["prototypes"] = self.geometry.measure(self.model.head)
        self.record.evaluation(line)
        self.trackers.log(line)
        if self.step == 0 or line["val_nll"] is None or not line["val_nll"] < self.best_nll:
            return False
        self.best_step, self.best_nll = self.step, line["val_nll"]
        return True

    def windows(self, tokens):
        shape = self.shape._replace(batch_size=self.config.eval.batch_size)
        return validation_batches(tokens, shape, self.config.eval.tokens, self.masking, self.world.device)

    def save(self) -> None:
        with self.meter.scope("checkpoint"):
            self.record.flush()
            if self.world.is_main:
                optimizer = {"optimizer": self.optimizer.state_dict(), "scaler": self.precision.scaler.state_dict()}
                state = {"step": self.step, "best_step": self.best_step, "best_val_nll": None if self.best_step is None else self.best_nll}
                state["sequences_per_step"] = self.shape.global_batch_size
                self.checkpoints.save(self.model, optimizer, state)

    def load(self, folder: Path, state: dict) -> None:
        load_model(self.model, folder / "model.safetensors")
        stored = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(stored["optimizer"])
        self.precision.scaler.load_state_dict(stored["scaler"])
        self.step, self.best_step = state["step"], state["best_step"]
        self.best_nll = math.inf if state["best_val_nll"] is None else state["best_val_nll"]

    def begin(self, resumed: bool) -> None:
        about = {"dataset": dataclasses.asdict(self.dataset.meta), "seed": self.config.seed, "world_size": self.world.size}
        about["objective"] = "causal" if self.masking is None else "masked"
        about["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        self.record.begin(to_toml(self.config), about, (self.step, self.config.train.max_steps), resumed)
        settings = {**dataclasses.asdict(self.config), "world_size": self.world.size}
        self.trackers = build_trackers(self.config.log if self.world.is_main else LogConfig(), self.record.run_dir, settings)
        tokens_per_step = self.shape.global_batch_size * self.config.model.block_size
        session = self.world.on_main(lambda: self.record.session)  # after which the folder is what the new session needs
        self.meter = EmissionsMeter(
            self.config.emissions, self.record.run_dir, self.step, tokens_per_step, self.record.emissions, this_node(self.world.device.type), session
        )
        exponent = self.model.head.exponent_value
        self.record.say(
            f"{self.config.model.name} with the {self.config.head.name} head: {about['parameters']:,} parameters"
            + ("" if exponent is None else f", exponent {exponent:.4g}")
            + f"; {self.world.size} process(es) on {self.world.device.type}; from step {self.step} to {self.config.train.max_steps}"
        )

    def end(self, reason: str) -> None:
        self.loader.close()
        self.meter.close()
        self.record.describe(emissions=self.meter.describe())
        self.trackers.close()
        self.record.end(reason)

    def utilization(self, tokens_per_s: float) -> float | None:
        """Share of the devices' peak, None where it is not known."""
        peak = peak_flops(self.world.device, self.precision.dtype)
        scored = 1.0 if self.masking is None else self.config.data.mask_fraction
        return peak and tokens_per_s * flops_per_token(self.model, self.config.model, scored) / (peak * self.world.size)

    def calibrate(self) -> None:
        """Gives the head's `auto` options their values, from the whole global batch of step 0."""
        try:
            self.model.head.calibrate(HiddenStates(self.model.backbone, self.loader.batches(0), self.precision), self.world.all_reduce)
        except ValueError as error:
            raise InputError(f"the head cannot be calibrated: {error}") from error

    def one_pass(self) -> None:
        """A forward and backward pass that leaves nothing behind."""
        self.backward(self.loader.batches(self.step)[:1])
        self.optimizer.zero_grad(set_to_none=True)

    def advice(self) -> str:
        kept = self.checkpoints.steps()
        last = f"The last checkpoint is step {kept[-1]}" if kept else "There is no checkpoint yet"
        return f"{last}; try a lower optimizer.learning_rate"


if __name__ == "__main__":
    command(main)
