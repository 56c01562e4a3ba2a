# include: world.py


NOUNS = ["vase", "lamp", "chair", "table", "clock", "sofa", "rug", "shelf", "desk", "stool", "bench", "mirror"]

# Which skills a task asks for together. A single request cannot be a return and a new address at once.
MIXES = {
    0.08: [[]],
    0.42: [["lookup"], ["multi"], ["precondition"], ["precision"]],
    # Returns twice as often: a check that was skipped fails only where the order may not be returned.
    0.38: [["lookup", "multi"], ["lookup", "precision"], ["multi", "precision"]]
    + 2 * [["lookup", "precondition"], ["multi", "precondition"]],
    0.12: [["lookup", "multi", "precondition"], ["lookup", "multi", "precision"], ["multi", "precondition", "precision"]],
}

HINT = "Follow the policy and finish every request."


def draw(rng, knobs):
    return set(rng.choice(rng.choices(list(MIXES.values()), weights=list(MIXES))[0]))


def grade(checks):
    """1 if the final state is right and every refusal was told, else 0."""
    return float(all(check["passed"] for name, check in checks.items() if not name.startswith("action")))
