"""How much of what a run holds the page shows: so many bytes of each part, so many characters of a text.

A page of any run stays below `PAGE`. Parts that grow with a run (conversations, token views, evidence) are measured as they are written,
and take what fits; the page says how much was left out, and `trace-jax view` has all of it.
"""

PAGE = 5_000_000  # bytes, of everything

# bytes of a part; what is not listed (charts, tables, config) takes less than the rest
TRAJECTORIES = 2_000_000  # token views
CHANGES = 500_000  # conversations side by side: of the fixed tasks, and as many of the broken ones
EVIDENCE = 700_000  # labels with the messages that they cite

# how much is shown of one thing
TOKENS = 2000  # of a trajectory
MESSAGES = 80  # of a conversation
CASES = 12  # of the fixed tasks, and of the broken ones
LISTED = 4000  # characters of a list of task ids
CONVERSATION, BESIDE, CITED = 4000, 1200, 800  # characters of a text: in a conversation, in one beside another, as evidence
TOOLS = 15  # that are told apart in the use of the gate
STEPS = 40  # rows of a table of figures over time
