"""Which image goes to which rank and step, its way into memory, and what is done to it on the device."""
