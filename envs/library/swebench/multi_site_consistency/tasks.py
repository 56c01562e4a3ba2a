# include: ../world.py


# tools: bash

CAPABILITY = "multi_site_consistency"

HINT = "Before you finish, search the whole package for other places that apply the same rule, and change all of them alike."
