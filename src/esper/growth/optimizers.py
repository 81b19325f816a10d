"""Seeds in the user's own optimizers: they enter and leave with the settings of the host's parameters around them.

Nothing else of the optimizers changes: survivors keep their state to the bit, schedulers keep their lists in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from esper.growth.network import AttachedNetwork
from esper.growth.slot import SiteSlot
from esper.growth.tracing import in_slot
from esper.leyline import GradientEvidence, SeedStage
from esper.tolaria.optim import HOST, NO_GRADIENTS, gradient_evidence

HOST_NORMS_EVERY = 8
"""Steps between two looks at the host's gradients, which only describe it; those of seeds are read at each step."""
PER_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "_last_lr", "max_lrs", "base_momentums", "max_momentums")
"""Lists of schedulers with one entry per parameter group."""


class UserOptimizers:
    """The user's optimizers, as a growing network asks for them, and what happens to seeds around their steps.

    Args:
        network: The growing network.
        optimizers: The user's.
        schedulers: Those of the user's schedulers that are known. Seeds get groups of their own, without weight decay,
            where there is one; without it they join the group of the site's own parameters, which no scheduler notices.
        scaler: Scales the user's loss.
        on_step: Called before every step.

    Raises:
        ValueError: The optimizers train nothing of the model, or could not take a seed.
    """

    def __init__(
        self,
        network: AttachedNetwork,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        scaler: torch.amp.GradScaler | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.network = network
        self.optimizers = tuple(_inner(optimizer, "optimizer") for optimizer in optimizers)
        self.schedulers = tuple(_inner(scheduler, "scheduler") for scheduler in schedulers)
        self.scaler = scaler
        self.num_steps = 0
        """Since the epoch began, of all optimizers together."""
        self._on_step = on_step
        self._seeds: dict[str, tuple[nn.Parameter, ...]] = {}
        """Parameters by slot, in the order in which they were taken in."""
        self._norms: dict[str, Tensor] = {}
        self._finite: dict[str, bool] = {}
        self._hidden = False
        self._check()
        for slot in network.all_slots():
            slot.scaler = scaler
        self._handles: list[RemovableHandle] = [
            handle
            for optimizer in self.optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def _check(self) -> None:
        if not self.optimizers:
            raise ValueError("an optimizer is needed; pass the one that trains the model")
        held = {id(param) for _, group in self._groups() for param in group["params"]}
        if not any(id(param) in held for param in self.network.host_parameters().values()):
            raise ValueError(
                "the optimizer holds none of the model's parameters; build it from this model's parameters()"
            )
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS cannot take parameters later; grow with another optimizer, such as AdamW")
        for ndim in (1, 2):
            if not any(_takes(optimizer, ndim) for optimizer in self.optimizers):
                names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
                raise ValueError(
                    f"{names} takes no parameters with {ndim} axis, and seeds have some; pass a second optimizer for "
                    "them, such as optimizer=[muon, adamw]"
                )

    def close(self) -> None:
        """Leaves the optimizers alone from now on; what they hold stays."""
        for handle in self._handles:
            handle.remove()
        for scheduler in self.schedulers:
            scheduler.__dict__.pop("state_dict", None)

    # ---- seeds in and out

    def add_group(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        """Starts to train a seed, with the settings of the parameters around it.

        Raises:
            ValueError: The slot has a seed here already. Nothing has changed.
        """
        if name in self._seeds:
            raise ValueError(f"the optimizer holds a seed of slot {name!r} already")
        homes: dict[tuple[int, int], dict[str, nn.Parameter]] = {}
        for key, param in params.items():
            homes.setdefault(self._home(name, param), {})[key] = param
        self._seeds[name] = tuple(params.values())
        try:
            for (which, position), seeds in homes.items():
                self._take_in(self.optimizers[which], position, seeds)
        except BaseException:
            self.remove_group(name)
            raise

    def remove_group(self, name: str) -> None:
        """Forgets a seed and all state of its parameters; a name it does not know is already forgotten."""
        gone = set(map(id, self._seeds.pop(name, ())))
        for optimizer in self.optimizers:
            for param in [param for param in optimizer.state if id(param) in gone]:
                del optimizer.state[param]
            for position in reversed(range(len(optimizer.param_groups))):
                group = optimizer.param_groups[position]
                kept = [at for at, param in enumerate(group["params"]) if id(param) not in gone]
                if not kept and group["params"]:
                    del optimizer.param_groups[position]
                    for values in self._lists(optimizer, len(optimizer.param_groups) + 1):
                        del values[position]
                elif len(kept) < len(group["params"]):
                    for entry in ("params", "param_names"):
                        if entry in group:
                            group[entry][:] = [group[entry][at] for at in kept]
        for book in (self._norms, self._finite):
            book.pop(name, None)

    def holds(self, params: Iterable[nn.Parameter]) -> bool:
        """True if every one of these parameters is trained."""
        held = {id(param) for _, group in self._groups() for param in group["params"]}
        return all(id(param) in held for param in params)

    @property
    def seed_order(self) -> tuple[str, ...]:
        """Slots in the order in which their seeds were taken in: the order of their state."""
        return tuple(self._seeds)

    def _groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield optimizer, group

    def _home(self, name: str, param: nn.Parameter) -> tuple[int, int]:
        """(optimizer, group) by position of most of the site's own parameters, among those that take `param`."""
        module = self.network.model.get_submodule(self.network.slot(name).site.name)
        around = {id(p) for key, p in module.named_parameters() if not in_slot(key)}
        host = {id(p) for p in self.network.host_parameters().values()}
        candidates = [
            (sum(id(p) in around for p in group["params"]), -which, -position)
            for which, optimizer in enumerate(self.optimizers)
            for position, group in enumerate(optimizer.param_groups)
            if _takes(optimizer, param.dim()) and any(id(p) in host for p in group["params"])
        ]
        if not candidates:
            raise ValueError(f"no optimizer takes a parameter of shape {tuple(param.shape)}; pass a second one for it")
        _, which, position = max(candidates)
        return -which, -position

    def _take_in(self, optimizer: torch.optim.Optimizer, position: int, seeds: Mapping[str, nn.Parameter]) -> None:
        home = optimizer.param_groups[position]
        if not any(_schedules(scheduler, optimizer) for scheduler in self.schedulers):
            home["params"].extend(seeds.values())
            if "param_names" in home:
                home["param_names"].extend(seeds)
            _begin_state(optimizer, home, seeds)
            return
        settings = {key: value for key, value in home.items() if key not in ("params", "param_names")}
        if "weight_decay" in settings:
            settings["weight_decay"] = type(settings["weight_decay"])(0)
        named = "param_names" in home
        optimizer.add_param_group({"params": list(seeds.items()) if named else list(seeds.values()), **settings})
        for values in self._lists(optimizer, len(optimizer.param_groups) - 1):
            values.append(values[position])
        _begin_state(optimizer, optimizer.param_groups[-1], seeds)

    def _lists(self, optimizer: torch.optim.Optimizer, length: int) -> Iterator[list[Any]]:
        """Lists of that many entries, one per group of this optimizer, in the schedulers."""
        pending = [scheduler for scheduler in self.schedulers if _schedules(scheduler, optimizer)]
        while pending:
            scheduler = pending.pop()
            pending += getattr(scheduler, "_schedulers", ())
            for name in PER_GROUP:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) == length:
                    yield values

    # ---- as others save them

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Optimizers and schedulers show their seeds for the block, also where `hide_seeds` hides them."""
        self._hidden, hidden = False, self._hidden
        try:
            yield
        finally:
            self._hidden = hidden

    def hide_seeds(self) -> None:
        """From now on, the state_dicts of optimizers and schedulers are those of a model without seeds.

        For libraries that load them into a bare model, before its seeds come back.
        """
        self._hidden = True
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_state_dict_post_hook(self._without_seeds))
        for scheduler in self.schedulers:
            scheduler.state_dict = partial(self._bare_schedule, scheduler)

    def _without_seeds(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if not self._hidden:
            return None
        seeds = {id(param) for params in self._seeds.values() for param in params}
        flags = [id(param) in seeds for group in optimizer.param_groups for param in group["params"]]
        numbers = {old: new for new, old in enumerate(at for at, is_seed in enumerate(flags) if not is_seed)}
        groups = []
        for group in state["param_groups"]:
            kept = [at for at, number in enumerate(group["params"]) if number in numbers]
            if kept:
                own = {"params": [numbers[group["params"][at]] for at in kept]}
                if "param_names" in group:
                    own["param_names"] = [group["param_names"][at] for at in kept]
                groups.append({**group, **own})
        kept_state = {numbers[number]: entry for number, entry in state["state"].items() if number in numbers}
        return {**state, "state": kept_state, "param_groups": groups}

    def _bare_schedule(self, scheduler: Any) -> dict[str, Any]:
        state: dict[str, Any] = type(scheduler).state_dict(scheduler)
        state.pop("state_dict", None)  # this method itself, which stands among the scheduler's attributes
        if not self._hidden:
            return state
        seeds = {id(param) for params in self._seeds.values() for param in params}
        groups = scheduler.optimizer.param_groups
        bare = [at for at, group in enumerate(groups) if not all(id(param) in seeds for param in group["params"])]
        for name in PER_GROUP:
            if isinstance(state.get(name), list) and len(state[name]) == len(groups):
                state[name] = [state[name][at] for at in bare]
        return state

    # ---- around a step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        # The first argument is the optimizer itself.
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._deliver(optimizer)
            return None

        def backward_then_seeds() -> Any:
            loss = closure()
            self._deliver(optimizer)
            return loss

        # Lightning runs forward and backward inside the step.
        return args[:1], {**kwargs, "closure": backward_then_seeds}

    def _deliver(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes what seeds have learned the gradients of this step."""
        self._on_step()
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # of fused kernels, which divide by it
        for name, params in self._seeds.items():
            if not any(id(param) in mine for param in params):
                continue
            slot = self.network.slot(name)
            if slot.stage is SeedStage.TRAINING:
                self._deliver_seed(name, slot, scale)
            else:
                self._read_norms(name, params, scale)
        if self.num_steps % HOST_NORMS_EVERY == 0:
            self._read_norms(HOST, self.network.host_parameters().values(), scale)
        self.num_steps += 1

    def _deliver_seed(self, name: str, slot: SiteSlot, scale: Tensor | None) -> None:
        gradients = slot.take_gradients()
        if not gradients:
            return
        self._norms[name] = torch.stack(torch._foreach_norm(list(gradients.values())))
        total = torch.linalg.vector_norm(self._norms[name])
        # sync: the update of a broken seed must not happen at all; zero gradients would still move its weights
        finite = bool(torch.isfinite(total))
        self._finite[name] = self._finite.get(name, True) and finite
        if finite:
            factor = torch.clamp(slot.config.clip_norm / (total + 1e-6), max=1.0)
            factor = factor if scale is None else factor * scale
            for param, gradient in gradients.items():
                param.grad = (gradient * factor).to(param.dtype)

    def _read_norms(self, name: str, params: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        gradients = [param.grad for param in params if param.grad is not None and not param.grad.is_sparse]
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients))
            self._norms[name] = norms if scale is None else norms / scale

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Training seeds keep no gradients between steps, so that nobody clips or scales them with the host's."""
        mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, params in self._seeds.items():
            if self.network.slot(name).stage is SeedStage.TRAINING:
                for param in params:
                    if id(param) in mine:  # another optimizer may still have to step
                        param.grad = None

    def finish_epoch(self) -> dict[str, GradientEvidence]:
        """What was seen of the host and of every seed since the last call, and starts anew."""
        groups = {HOST: tuple(self.network.host_parameters().values()), **self._seeds}
        seen = {name: self._evidence(name, params) for name, params in groups.items()}
        self._norms.clear()
        self._finite.clear()
        self.num_steps = 0
        return seen

    def readings(self) -> dict[str, Any]:
        """What was seen since the epoch began, as JSON values."""
        return {
            "num_steps": self.num_steps,
            "norms": {name: norms.tolist() for name, norms in self._norms.items()},
            "finite": dict(self._finite),
        }

    def set_readings(self, readings: Mapping[str, Any]) -> None:
        """Continues in the middle of an epoch."""
        self.num_steps = readings["num_steps"]
        self._norms = {name: torch.tensor(norms) for name, norms in readings["norms"].items()}
        self._finite = dict(readings["finite"])

    def _evidence(self, name: str, params: Sequence[nn.Parameter]) -> GradientEvidence:
        if name not in self._norms:
            return NO_GRADIENTS
        return gradient_evidence(
            self._norms[name].double().tolist(),  # sync: once per group and epoch, read by gates and reports
            num_tensors=len(params),
            num_weights=sum(param.numel() for param in params),
            clip_norm=self.network.lifecycle.clip_norm,
            finite=self._finite.get(name, True),
        )


def _inner(wrapped: Any, name: str) -> Any:
    """What Accelerate's wrapper holds, or the object itself: hooks and state belong to what steps in the end."""
    return getattr(wrapped, name) if type(wrapped).__module__.startswith("accelerate.") else wrapped


def _takes(optimizer: torch.optim.Optimizer, ndim: int) -> bool:
    """Whether an optimizer can train a parameter with so many axes."""
    return type(optimizer).__name__ != "Muon" or ndim == 2


def _begin_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], seeds: Mapping[str, nn.Parameter]) -> None:
    """Adagrad makes the state of its parameters when it is built, all others when they first step."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for param in seeds.values():
            total = torch.full_like(param, group["initial_accumulator_value"], memory_format=torch.preserve_format)
            optimizer.state[param] = {"step": torch.zeros((), dtype=torch.float32), "sum": total}


def _schedules(scheduler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler sets the rates of this optimizer; wrappers of it share its list of groups."""
    owner = scheduler.optimizer if isinstance(scheduler, LRScheduler) else getattr(scheduler, "optimizer", None)
    return getattr(owner, "param_groups", None) is optimizer.param_groups
