"""One resumable descent for both networks: Adam, cosine decay of the step size, checkpoints by counted steps.

What happens at step t depends on the seed and t alone (keyed streams), so a run resumed from any state equals an
uninterrupted one byte for byte. Steps run on one torch thread: the networks are small, and sums then do not depend on
the number of cores.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lyceum_base import Checkpoint, ShouldStop, State, Stopped

CLIP = 1.0  # largest gradient norm [choice]
_TICK_SECONDS = 0.5


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def descend(
    module: nn.Module,
    loss_at: Callable[[int], torch.Tensor],
    *,
    stage: str,
    steps: int,
    learning_rate: float,
    state_every: int,
    resume: State | None,
    should_stop: ShouldStop | None,
) -> Iterator[Checkpoint]:
    """Minimise `loss_at(step)` over `module`'s parameters. Yields a state every `state_every` steps and ticks in
    between.

    A state holds parameters (`weights.*`), Adam's moments (`adam.*`) and the step. Raises Stopped.
    """
    adam = _Adam(module)
    first = 0
    if resume is not None:
        first = int(resume["step"])
        load_weights(module, resume)
        adam.mean.copy_(resume["adam.mean"])
        adam.square.copy_(resume["adam.square"])
    told = time.monotonic()
    for step in range(first, steps):
        if should_stop is not None and should_stop():
            raise Stopped
        with one_thread():
            loss = loss_at(step)
            loss.backward()  # type: ignore[no-untyped-call]
            adam.update(step, learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / steps)))
        done = step + 1
        metrics = {"loss": loss.item()}
        if done % state_every == 0 and done < steps:
            moments = {"adam.mean": adam.mean, "adam.square": adam.square}
            yield Checkpoint({"step": done, **weights(module), **moments}, stage, done, steps, metrics)
            told = time.monotonic()
        elif time.monotonic() - told > _TICK_SECONDS:
            yield Checkpoint(None, stage, done, steps, metrics)
            told = time.monotonic()


class _Adam:
    """Adam (Kingma, Ba, arXiv 1412.6980, algorithm 1) on all parameters as one flat vector.

    torch.optim imports torch's compiler at its first use, which takes longer than a whole training here.
    """

    def __init__(self, module: nn.Module, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self._betas, self._eps = (beta1, beta2), eps
        parameters = list(module.parameters())
        self._vector = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._gradient, self.mean, self.square = (torch.zeros_like(self._vector) for _ in range(3))
        place = 0
        for p in parameters:  # parameters and gradients become views of the flat vectors
            end = place + p.numel()
            p.data = self._vector[place:end].view(p.shape)
            p.grad = self._gradient[place:end].view(p.shape)
            place = end

    @torch.no_grad()
    def update(self, step: int, learning_rate: float) -> None:
        """One step, counted from 0, along the gradient that backward() has left; clears it."""
        (beta1, beta2), gradient = self._betas, self._gradient
        gradient.mul_(CLIP / gradient.norm().clamp_min(CLIP))
        self.mean.lerp_(gradient, 1.0 - beta1)
        self.square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        spread = (self.square / (1.0 - beta2 ** (step + 1))).sqrt_().add_(self._eps)
        self._vector.addcdiv_(self.mean, spread, value=-learning_rate / (1.0 - beta1 ** (step + 1)))
        gradient.zero_()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters as state entries."""
    return {f"weights.{name}": parameter.detach() for name, parameter in module.named_parameters()}


def load_weights(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Inverse of `weights`; raises ValueError when the state has other parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = state.get(f"weights.{name}")
            if value is None or value.shape != parameter.shape:
                found = "nothing" if value is None else f"shape {list(value.shape)}"
                raise ValueError(f"state[weights.{name}]: {found}; expected shape {list(parameter.shape)}")
            parameter.copy_(value)
