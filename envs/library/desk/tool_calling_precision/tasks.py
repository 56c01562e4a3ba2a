# include: ../../../desk/world.py


# include: ../nouns.py

HINT = "Copy every value exactly as the customer wrote it, character by character."


def draw(rng, knobs):
    return {"precision"}


# include: ../grade.py
