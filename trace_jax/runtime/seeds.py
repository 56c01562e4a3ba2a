"""Which seeds a step may use, so that no step sees another's tasks. The target's train split is a fixed set, as a benchmark's is."""

TRAIN_TASKS = 0
CALIBRATION = 1_000_000
TRAINING = 2_000_000
GATE = 3_000_000
GATE_TRAINING = 4_000_000
SELECTION = 5_000_000  # held-out seeds of the capability environments, which decide what is kept
VALIDATION = 6_000_000  # others, which decide which iteration's adapter, or gate, is the best
AGREEMENT = 7_000_000  # of them so many: on which engine and learner must agree
AGREEMENT_SEEDS = 64
HELDOUT_TASKS = 9_000_000
APART = 1_000_000  # seeds of one purpose
# where the seeds of capability environments begin, for certificates
USED = tuple(range(start, start + 1000) for start in (TRAINING, GATE, GATE_TRAINING, SELECTION, VALIDATION, AGREEMENT))
