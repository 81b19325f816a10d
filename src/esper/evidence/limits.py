"""Every limit that decides what counts as evidence. Changing one changes verdicts: say so in the commit.

Read as `limits.NAME`, so that there is one place to change it.
"""

from __future__ import annotations

# ---- numbers of runs

MIN_PAIRS = 10
"""Below this, no interval and no p-value: they would only look like evidence."""
MIN_SEEDS = 20
"""Paired run seeds that a claim needs; controls run from here on."""
MIN_POLICIES = 5
"""Fewer policies than this say nothing about the method that trained them."""
MAX_ROLLBACKS = 3
"""A run rolled back more often than this counts as failed."""

# ---- claims

MARGIN_PP = 0.5
"""Points by which "not worse" may be worse."""
STATIC_MARGIN_PP = 0.3
"""The same against the best plain network of the same size."""
MAX_GROWTH = 1.1
"""Parameters of a network that had no reason to grow, as a multiple of its host's."""
MAX_RATE_GAP = 0.1
"""How far the op rates of `random` may be from those it is matched to, as a share, before the report says so."""

# ---- learning checks, over the event log of a policy's training

MIN_EXPLAINED_VARIANCE = 0.2
"""Median of the last fifth of updates."""
MIN_RETURN_CORR = 0.3
"""Correlation of values and returns, where returns vary too little to be explained."""
MIN_GRADIENT_SHARE = 0.9
"""Share of updates in which a head received gradient."""
MIN_ENTROPY_SHARE = 0.05
"""Lowest entropy of a head in the first half of training, as a share of its maximum."""
MIN_KL, MAX_KL_OVER_TARGET = 1e-4, 3.0
"""A sound update: nats; multiples of the target."""
MIN_KL_SHARE = 0.8
"""Share of updates that are sound."""
MAX_ROLLBACKS_PER_100 = 2.0
MAX_SKIPPED_SHARE = 0.01
