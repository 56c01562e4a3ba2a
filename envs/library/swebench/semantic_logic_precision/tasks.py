# include: ../world.py


# tools: bash

CAPABILITY = "semantic_logic_precision"

HINT = (
    "Compare each condition and each expression of the function with what its description says, at the borders of "
    "every case, before you edit."
)
