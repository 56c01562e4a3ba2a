# include: ../../../desk/world.py


# include: ../nouns.py

HINT = "After each result see whether another request is still open."


def draw(rng, knobs):
    return {"multi"}


# include: ../grade.py
