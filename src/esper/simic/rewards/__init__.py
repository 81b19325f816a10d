"""Rewards: pure terms over reports, one ledger of measured credit, seven modes, two families. No torch."""

from esper.simic.rewards.ledger import advance_ledger, open_ledger
from esper.simic.rewards.modes import DEFAULT_MODE, MODES, RewardMode, check_mode, compute_components, get_mode
from esper.simic.rewards.suspicion import suspicions
from esper.simic.rewards.types import (
    FAMILY_NAMES,
    MIN_TERMINAL_DISCOUNT,
    Calibration,
    Ledger,
    RewardComponentsTelemetry,
    RewardConfig,
    RewardInputs,
    RewardWeights,
    SlotLedger,
    calibrate,
    default_gamma,
    uncalibrated,
)
