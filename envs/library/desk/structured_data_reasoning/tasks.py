# include: ../../../desk/world.py


# include: ../nouns.py

HINT = "Find the record that the customer means in the list before you act."


def draw(rng, knobs):
    return {"lookup"}


# include: ../grade.py
