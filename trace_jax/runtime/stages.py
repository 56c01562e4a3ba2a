"""How long the stages of a run are, before it has begun: what the time that is left is reckoned from."""

from trace_jax.config import Config
from trace_jax.runtime.seeds import AGREEMENT_SEEDS


def plan(config: Config, capabilities: int = 4) -> dict[str, float]:
    """The stages of a run and the rollouts of each, which is what most of its time goes into."""
    train, gate, synthesis, evaluation = config.train, config.gate, config.synthesis, config.evaluation
    selection = train.selection_seeds * capabilities
    batch = train.groups * train.group_size
    return {
        "rollouts": config.target.train_tasks * config.diagnosis.trials,
        "diagnose": 1,
        "synthesize": synthesis.calibration_seeds * synthesis.calibration_rollouts * capabilities,
        "train": (train.iterations * batch + train.validations(train.iterations) * train.validation_seeds) * capabilities
        + 2 * selection
        + AGREEMENT_SEEDS * (train.agreement > 0),
        "compose": capabilities * (gate.successes + gate.table_seeds * (capabilities + 4))
        + gate.grpo_iterations * batch
        + train.validations(gate.grpo_iterations) * train.validation_seeds
        + selection * (capabilities + 7),
        "evaluate": evaluation.tasks * evaluation.trials * sum(capabilities if p == "adapters" else 1 for p in evaluation.policies),
    }
