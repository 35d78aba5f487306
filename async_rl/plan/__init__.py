"""``async-rl plan``: how many actors, which staleness bound; the ledger of real runs in virtual time."""
