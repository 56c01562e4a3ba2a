def grade(checks):
    """1 if every check passed, else up to 0.3 for the share that did."""
    share = sum(check["passed"] for check in checks.values()) / len(checks)
    return 1.0 if share == 1.0 else 0.3 * share
