"""How good policies are, with intervals and paired tests, and whether what is compared may be compared; what all steps count with."""
