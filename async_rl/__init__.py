"""What actor hosts and learner hosts share: data, wire, buffer, weights, config, metrics and the command line."""

__version__ = "0.1.0"
