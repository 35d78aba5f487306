"""What actors and learner of a control run share: spaces, the arrays of a fragment, distributions, networks."""
