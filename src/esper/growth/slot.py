"""A slot on the output of any submodule. Nothing in the model's own graph changes while its seed trains.

The slot is a child module of the submodule it extends, and one forward hook without state finds it there, so copies and
pickles of the model keep working. In TRAINING the hook hands on the very output it was given. A gradient hook on the
tensor keeps the features and the gradient that came back; the seed's own pass runs outside the model's graph, just
before the optimizer's step. So the seed needs no term in the user's loss, and clipping, scaling and accumulating of the
host's gradients never see it.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.sites import Site
from esper.growth.structure import pick, put
from esper.growth.tracing import SLOT, in_slot
from esper.kasmina.blueprints import Residual
from esper.kasmina.objective import SeedMeter, rms
from esper.kasmina.persist import decode_facts, encode_facts
from esper.kasmina.slot import GateNetwork, SeedSlot, mix
from esper.leyline import BlendSpec, LifecycleConfig, SeedStage, SlotSpec, SlotTransition, record

FACTS = "facts"
"""Entry of a slot in the model's state_dict that says what its seed is."""


def encode_tensor(facts: dict[str, Any]) -> Tensor:
    """JSON values as a tensor: all that every format of weights can hold."""
    return torch.frombuffer(bytearray(encode_facts(facts).encode()), dtype=torch.uint8)


def decode_tensor(tensor: Tensor) -> dict[str, Any]:
    """Reads what `encode_tensor` wrote."""
    return decode_facts(bytes(tensor.cpu().numpy()).decode())


def extend_output(module: nn.Module, args: Any, output: Any) -> Any:
    """The forward hook of every site. None leaves the output as it is."""
    slot = module._modules.get(SLOT)
    if not isinstance(slot, SiteSlot) or slot.is_idle:
        return None
    return slot.extend(module, output)


class SiteMeter(SeedMeter):
    """Measures a seed in nats, whatever the unit of the user's loss is and in however many parts a batch is handed in.

    Args:
        config: Limits of growth.
        nats_per_loss: Unit of the loss.
    """

    def __init__(self, config: LifecycleConfig, nats_per_loss: float) -> None:
        super().__init__(config.rho, config.eta_decay)
        self.nats_per_loss = nats_per_loss
        self.num_steps = 0
        """Optimizer steps since the epoch began."""

    def finish_epoch(self) -> tuple[float | None, float | None]:
        """(predicted gain in nats per step, residual ratio), and starts anew."""
        parts, steps = len(self._losses), self.num_steps
        gain, ratio = super().finish_epoch()
        self.num_steps = 0
        # With gradient accumulation every part of a step forecasts its own share of the gain.
        return None if gain is None else gain * self.nats_per_loss * parts / max(1, steps), ratio

    def readings(self) -> dict[str, Any]:
        """What it has measured since the epoch began, as JSON values."""
        losses, ratios = ([float(value) for value in values] for values in (self._losses, self._ratios))
        return {"losses": losses, "ratios": ratios, "num_steps": self.num_steps}

    def set_readings(self, readings: dict[str, Any]) -> None:
        """Continues in the middle of an epoch."""
        device = None if self.eta is None else self.eta.device
        self._losses, self._ratios = (
            [torch.tensor(value, dtype=torch.float32, device=device) for value in readings[name]]
            for name in ("losses", "ratios")
        )
        self.num_steps = readings["num_steps"]
        if self._losses:
            self._values = None  # what was read of them belongs to the process that is gone


@record
class CapturedPass:
    """Features that a seed saw in a pass, and the gradient that came back to them."""

    features: Tensor
    gradient: Tensor
    """As it came back: of a loss that may be scaled."""
    loss_scale: Tensor | None
    autocast: torch.dtype | None
    """Precision of the pass; None for that of the parameters."""


class SiteSlot(SeedSlot):
    """A slot at a site of somebody else's model.

    Args:
        site: Where it is.
        spec: Its shape, as controllers see it.
        config: Limits of growth.
        nats_per_loss: Unit of the user's loss.
    """

    def __init__(self, site: Site, spec: SlotSpec, config: LifecycleConfig, nats_per_loss: float = 1.0) -> None:
        super().__init__(spec, site.kind, config)
        self.site = site
        self.nats_per_loss = nats_per_loss
        self.enabled = True
        """False while a coalition leaves its seed out."""
        self.copies_features = False
        """True once features were seen to be overwritten in place after the site."""
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the user's loss."""
        self.num_missed = 0
        """Passes whose features were overwritten before the seed could learn from them."""

    def _forget_seed(self) -> None:
        super()._forget_seed()
        self.meter: SiteMeter | None = None
        self._captured: CapturedPass | None = None
        self._gradients: list[Tensor | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what belongs to a step under way."""
        return {**self.__dict__, "_captured": None, "_gradients": None, "scaler": None}

    def plant(self, seed: Residual, gate: GateNetwork | None, blueprint: str, blend: BlendSpec) -> SlotTransition:
        """Puts a new seed into the slot, in the mode of the model."""
        for part in (seed, gate):
            if part is not None:
                part.train(self.training)
        return super().plant(seed, gate, blueprint, blend)

    def make_meter(self) -> SiteMeter:
        """What measures a new seed."""
        return SiteMeter(self.config, self.nats_per_loss)

    # ---- as data

    def facts(self) -> dict[str, Any]:
        """Everything about the slot but its weights, in the middle of an epoch too, as JSON values."""
        readings = None if self.meter is None else self.meter.readings()
        return {
            **super().facts(),
            "slot_id": self.spec.slot_id,
            "site": asdict(self.site),
            "copies_features": self.copies_features,
            "num_missed": self.num_missed,
            "readings": readings,
        }

    def set_facts(self, facts: dict[str, Any], seed: Residual | None, gate: GateNetwork | None) -> None:
        """Puts the slot into a recorded state, with modules built from the recorded names."""
        super().set_facts(facts, seed, gate)
        for part in (seed, gate):
            if part is not None:
                part.train(self.training)
        self.copies_features = facts["copies_features"]
        self.num_missed = facts["num_missed"]
        if self.meter is not None and facts["readings"] is not None:
            self.meter.set_readings(facts["readings"])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A state_dict with seeds in it says what they are, so that a fresh model can grow them again."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.stage.has_seed:
            destination[prefix + FACTS] = encode_tensor(self.facts())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weights = {key: value for key, value in state_dict.items() if key != prefix + FACTS}
        super()._load_from_state_dict(weights, prefix, *args)

    # ---- inside the model's pass

    def forward(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        """Never called: a hook does the work.

        Raises:
            RuntimeError: The submodule runs over its children, and took the slot for one of them.
        """
        raise RuntimeError(
            f"{self.site.name} runs over its child modules, so a slot cannot be one of them; name one of its children "
            "as the site instead"
        )

    @property
    def is_idle(self) -> bool:
        """True if the output is to be left alone."""
        if self.stage.is_blended:
            return not self.enabled
        return not (self.stage is SeedStage.TRAINING and self.training and torch.is_grad_enabled())

    def extend(self, module: nn.Module, output: Any) -> Any:
        """The output of the submodule with the seed at work, or None to leave it as it is."""
        h = pick(output, self.site.path)
        if self.stage.is_blended:
            return put(output, self.site.path, self.blended(h))
        watched = self._capture_gradient(module, h)
        return None if watched is h else put(output, self.site.path, watched)

    def blended(self, h: Tensor, source: Tensor | None = None) -> Tensor:
        """The features with the seed at its current alpha."""
        x = self.site.canonical(h)
        if not x.requires_grad:
            x = x.contiguous()  # torch crashes in a norm's backward pass whose channels-last input asks for no gradient
        d = self.site.original(self.delta(x))
        return mix(h, d.to(h.dtype), self.alpha)  # under autocast a seed may answer in another precision

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _capture_gradient(self, module: nn.Module, h: Tensor) -> Tensor:
        """Asks for the gradient of the features. The same tensor, unless its gradient is not computed at all."""
        if not h.requires_grad:  # everything before the site is frozen
            h = h.detach().requires_grad_().clone()
        features = h.detach()
        if self.copies_features:
            features = features.clone()
        device = h.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        own = next((p for name, p in module.named_parameters() if p.requires_grad and not in_slot(name)), None)
        h.register_hook(partial(self._capture, features, features._version, autocast, own))  # type: ignore[no-untyped-call]
        return h

    def _capture(
        self, features: Tensor, version: int, autocast: torch.dtype | None, own: nn.Parameter | None, gradient: Tensor
    ) -> None:
        """Runs inside the model's backward pass: keeps the pair for later."""
        if self.stage is not SeedStage.TRAINING:
            return
        if features._version != version:
            self.copies_features = True
            self.num_missed += 1
            return
        if own is not None and own.grad is None:
            # The host's gradients were dropped since, so the last pass led to no step, or the step is done.
            self._captured, self._gradients = None, None
        self._learn()
        scale = None if self.scaler is None else self.scaler.scale(torch.ones((), device=gradient.device))
        self._captured = CapturedPass(
            features=features, gradient=gradient.detach(), loss_scale=scale, autocast=autocast
        )

    # ---- outside the model's graph

    def take_gradients(self) -> dict[nn.Parameter, Tensor] | None:
        """What the seed has learned since the last call; None if nothing."""
        self._learn()
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return None
        assert self.meter is not None
        self.meter.num_steps += 1
        pairs = zip(self.parameters(), gradients, strict=True)
        return {param: gradient for param, gradient in pairs if gradient is not None}

    def _learn(self) -> None:
        """Adds the seed's gradient for the pair that was captured last, if there is one."""
        if self._captured is None:
            return
        captured, self._captured = self._captured, None
        assert self.meter is not None
        x = self.site.canonical(captured.features).contiguous()
        g = self.site.canonical(captured.gradient).float()
        g = g if captured.loss_scale is None else g / captured.loss_scale
        rows = x.shape[0] * x.shape[1] if self.topology == "transformer" else x.shape[0]
        h_rms = rms(x)
        if self.meter.eta is None:
            self.meter.listen(h_rms, g, rows)
            return
        with (
            torch.enable_grad(),
            torch.autocast(x.device.type, captured.autocast, enabled=captured.autocast is not None),
        ):
            d = self.delta(x)
        towards = self.meter.learn(h_rms, d.detach(), g, rows)
        fresh = torch.autograd.grad(d, list(self.parameters()), towards.to(d.dtype), allow_unused=True)
        if self._gradients is None:
            self._gradients = list(fresh)
        else:
            pairs = zip(self._gradients, fresh, strict=True)
            self._gradients = [b if a is None else a if b is None else a + b for a, b in pairs]
