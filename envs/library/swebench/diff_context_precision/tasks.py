# include: ../world.py


# tools: bash

CAPABILITY = "diff_context_precision"

HINT = (
    "Several functions look alike. Find the only one that the report is about, and edit it by its place, so that "
    "the same text elsewhere stays as it is."
)
