"""Pure functions of tensors: advantages, losses, schedules. No I/O, no state."""
