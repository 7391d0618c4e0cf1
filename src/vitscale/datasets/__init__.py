"""Which image each rank gets in which step, its way into memory, and its processing on the device."""
