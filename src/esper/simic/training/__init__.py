"""What runs in an env step, and the loops around it. `TrainingConfig` is found here without loading torch."""

from esper.simic.training.config import TrainingConfig
