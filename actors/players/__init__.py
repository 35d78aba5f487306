"""How tickets become scored answers: one answer to a prompt, or episodes of several turns."""
