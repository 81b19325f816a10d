"""Growing networks as Gymnasium envs; importing this registers them.

    import gymnasium
    import esper.gym

    env = gymnasium.make("esper/Grow-v0", task="digits_conv", budget=1300)

`esper/Grow-v0` trains a real host; the simulated worlds (`esper/Decoy-v0`, `esper/Cue-v0`, ...) take milliseconds.
Needs the extra `gym`.
"""

try:
    import gymnasium
except ImportError as error:
    raise ImportError(
        "esper.gym needs gymnasium, which is not installed; install it with: pip install 'esper-growth[gym]'"
    ) from error

from esper.gym.envs import GrowEnv, GrowVectorEnv, WorldEnv

__all__ = ["WORLDS", "GrowEnv", "GrowVectorEnv", "WorldEnv"]

WORLDS: tuple[str, ...] = ("decoy", "coin", "inert", "cue", "parasite")
"""Sandboxes that are envs: those with a world and a reward of their own."""

gymnasium.register(
    "esper/Grow-v0", entry_point="esper.gym.envs:GrowEnv", vector_entry_point="esper.gym.envs:make_vector"
)
for world in WORLDS:
    gymnasium.register(f"esper/{world.capitalize()}-v0", entry_point="esper.gym.envs:WorldEnv", kwargs={"world": world})
