# include: ../world.py


# tools: bash

CAPABILITY = "structural_refactor_awareness"

HINT = (
    "When a signature, a field or a result changes its form, list all users of it in every file and change each "
    "together with the definition."
)
