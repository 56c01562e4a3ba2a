# include: ../../../desk/world.py


# include: ../nouns.py

HINT = "Look at the status before you change anything, and tell the customer when the policy forbids it."


def draw(rng, knobs):
    return {"precondition"}


# include: ../grade.py
