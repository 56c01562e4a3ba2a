# include: ../world.py


# tools: bash

CAPABILITY = "deep_call_graph_traversal"

HINT = (
    "Follow the calls below the function that shows the symptom, one by one and across files, and repair the cause "
    "where it is instead of where it is seen."
)
