"""Keys for random generators: every draw in Esper comes from a generator seeded by one of these.

The key says who draws and when, never in which process, so results do not depend on how work is spread.
"""

from __future__ import annotations

from hashlib import blake2b

TRAINING_RUN_SEEDS = range(10_000)
"""Run seeds that train policies. Ranges are disjoint, so that nothing is judged on what it has seen."""
TUNING_RUN_SEEDS = range(10_000, 20_000)
"""Run seeds that tune fixed controllers and calibrate rewards."""
FIRST_EVALUATION_SEED = 20_000
"""Run seeds of evaluations start here."""


def derive_seed(run_seed: int, env: int | None, episode: int | None, epoch: int | None, purpose: str) -> int:
    """Returns a 63-bit seed for one purpose at one place and time of a run.

    Args:
        run_seed: The seed the user gave.
        env: Global env id, or None where all envs must draw alike (data order, augmentation).
        episode: Episode index, or None where the draw belongs to the whole run.
        epoch: Epoch index inside the episode, or None where the draw belongs to the whole episode.
        purpose: What the draw is for, such as "order" or "seed:r0c1".
    """
    parts = (run_seed, env, episode, epoch)
    text = "|".join("-" if part is None else str(int(part)) for part in parts) + "|" + purpose
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
