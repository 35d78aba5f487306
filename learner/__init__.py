"""What runs on a learner host: the group, flat parameters, algorithms, the trainer, checkpoints and the publisher."""
